"""How likely somebody comes back to a snapshot, by what it is: counted while requests come, not guessed beforehand.

Remembered are the names of boundaries at which a snapshot was published, whether or not it has been evicted since. The
deepest of them on the way of a new prompt is where it resumes, or would if nothing had been evicted: that one is
*wanted*. Those of one kind fall into two classes, since to come back to a snapshot mostly means to go on from it and to
leave a newer one behind: nobody has wanted it yet, and somebody has. For each class

    chance = times one of them was wanted / how many there were

It may exceed 1: a system prompt is wanted again and again. What people do differs too much to be fixed in advance:
where a template drops old thinking nobody ever resumes behind an answer, in a loop of tool calls everybody does. PRIORS
count as NUM_IMAGINED of each class, and counts are halved from time to time, so that new habits win over old ones.

Since the evicted count too, what is kept does not colour what is learnt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from deltaserve.cache.boundaries import BoundaryKind

MAX_REMEMBERED = 1 << 15  # boundaries
NUM_IMAGINED = 8
_HALVE_AT = 1024

# (while nobody has wanted it, afterwards)
PRIORS = {
    BoundaryKind.SYSTEM: (8.0, 8.0),
    BoundaryKind.USER: (0.7, 0.05),
    BoundaryKind.TURN: (0.3, 0.2),
    BoundaryKind.BRANCH: (0.8, 0.8),
    BoundaryKind.PROMPT: (0.3, 0.05),
    BoundaryKind.PREEMPTED: (1.0, 0.1),
    BoundaryKind.PERIODIC: (0.1, 0.1),
}


class Chances:
    """O(1) a publication, O(new blocks) a request."""

    def __init__(self) -> None:
        classes = [(kind, was_wanted) for kind in BoundaryKind for was_wanted in (False, True)]
        self._num_wanted = {each: PRIORS[each[0]][each[1]] * NUM_IMAGINED for each in classes}
        self._num_seen = {each: float(NUM_IMAGINED) for each in classes}
        self._remembered: OrderedDict[bytes, tuple[BoundaryKind, bool]] = OrderedDict()

    def of(self, kind: BoundaryKind, was_wanted: bool) -> float:
        """How many more requests will resume from such a snapshot, on average; above 0."""
        return self._num_wanted[kind, was_wanted] / self._num_seen[kind, was_wanted]

    def published(self, key: bytes, kind: BoundaryKind) -> None:
        if key in self._remembered:
            return
        self._remembered[key] = (kind, False)
        self._see((kind, False))
        if len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)

    def looked_up(self, keys: Sequence[bytes]) -> None:
        """`keys` are the blocks of a prompt that a hit could cover, in order."""
        for key in reversed(keys):
            found = self._remembered.get(key)
            if found is None:
                continue
            kind, was_wanted = found
            self._num_wanted[found] += 1
            if not was_wanted:
                self._remembered[key] = (kind, True)
                self._see((kind, True))
            self._remembered.move_to_end(key)
            return

    def forget_paths(self) -> None:
        """The cache was emptied on purpose; habits stay."""
        self._remembered.clear()

    def _see(self, each: tuple[BoundaryKind, bool]) -> None:
        self._num_seen[each] += 1
        if self._num_seen[each] > _HALVE_AT:
            self._num_seen[each] /= 2
            self._num_wanted[each] /= 2
