"""How what a request has computed becomes the cache's: at every commit, and when the request goes.

Nothing is published but full blocks of accepted tokens that a finished step has written: pages below the request's
boundary, and slots for which `may_publish` says so and whose recorded write is of this very path. A request that fails
takes back what it has published; one that went on from that, or runs while the cache is reset, publishes no more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from deltaserve.cache.boundaries import BoundaryKind, SlotVersion, Wanted, may_publish
from deltaserve.cache.content import Content
from deltaserve.cache.lookup import Lookup
from deltaserve.cache.prefix import Node, Snapshot
from deltaserve.cache.retention import Conversation
from deltaserve.core.plan import Cut
from deltaserve.core.request import Request
from deltaserve.core.types import BLOCK

_PASSING = (BoundaryKind.PROMPT, BoundaryKind.PERIODIC, BoundaryKind.PREEMPTED)


@dataclass(slots=True, eq=False)
class Holding:
    """What one running request holds. Only the manager changes it; `boundary` is the position of the live state.

    The rest is the manager's alone: `cuts` into further slots that are planned but not back; `wanted` boundaries not
    yet reached, the last first; `tip`, the last node published; `published` snapshots; the `num_hit_blocks` that were
    not its own; and whether it publishes at all.
    """

    pages: list[int]
    boundary: int
    live_slot: int
    spare_slot: int | None = None
    cuts: list[Cut] = field(default_factory=list)
    wanted: list[Wanted] = field(default_factory=list)
    tip: Node | None = None
    num_hit_blocks: int = 0
    published: list[Snapshot] = field(default_factory=list)
    conversation: Conversation | None = None
    is_donor: bool = False


class Publisher:
    """`awaited` holds, by preempted request, the snapshot to which it will come back."""

    def __init__(self, content: Content, lookup: Lookup) -> None:
        self._content = content
        self._lookup = lookup
        self.awaited: dict[int, Snapshot] = {}

    def record(self, request: Request, holding: Holding) -> None:
        """A step has come back that wrote the live slot and those of the cuts."""
        keys = self._lookup.extend(request, holding.boundary)
        for position, slot in (*_writes(holding.cuts), (holding.boundary, holding.live_slot)):
            self._content.versions[slot] = SlotVersion(keys[position // BLOCK - 1], position)

    def publish(self, request: Request, holding: Holding) -> None:
        """The pages up to the boundary, and the wanted ones among the states written."""
        kinds = {wanted.position: wanted.kind for wanted in self.pass_wanted(request, holding, holding.boundary)}
        if not holding.is_donor:
            return
        for position, slot in (*_writes(holding.cuts), (holding.boundary, holding.live_slot)):
            node = self._publish_path(request, holding, position)
            kind = kinds.get(position)
            if kind is not None:
                self._publish_snapshot(request, holding, node, slot, kind)

    def donate(self, request: Request, holding: Holding, is_preempted: bool) -> None:
        """The request goes; its live state stays, for its next turn or for itself."""
        kind = BoundaryKind.PREEMPTED if is_preempted else BoundaryKind.TURN
        node = self._publish_path(request, holding, holding.boundary)
        snapshot = self._publish_snapshot(request, holding, node, holding.live_slot, kind)
        if snapshot is None:
            return
        if is_preempted:
            snapshot.num_waiting += 1
            self.awaited[request.id] = snapshot
        elif snapshot.kind in _PASSING:
            snapshot.kind = kind
        self._content.rank_anew(snapshot)

    def withdraw(self, holding: Holding, others: Iterable[Holding]) -> None:
        """The request has failed, and what it has published is not to be trusted.

        Of the `others`, who went on from it use its pages still; they publish no more, or these would come back.
        """
        for snapshot in holding.published:
            if not snapshot.is_gone:
                self._content.drop_snapshot(snapshot)
        if holding.tip is not None and not holding.tip.is_gone:
            self._remove_own(holding, holding.tip)
        for other in others:
            other.is_donor &= other.tip is None or not other.tip.is_gone

    def _remove_own(self, holding: Holding, tip: Node) -> None:
        """The first block that the request has made, and with it all behind."""
        for node in self._content.index.path(tip)[holding.num_hit_blocks :]:
            if node.page == holding.pages[node.depth - 1]:
                self._content.remove(node)
                return

    def forget(self, request: Request) -> None:
        """The request does not wait for its snapshot any more."""
        snapshot = self.awaited.pop(request.id, None)
        if snapshot is not None:
            snapshot.num_waiting -= 1
            self._content.rank_anew(snapshot)

    def want(self, request: Request, holding: Holding, wanted: list[Wanted]) -> None:
        """Boundaries that lie ahead, ascending: others may wait for them."""
        holding.wanted = wanted[::-1]
        self._lookup.promise(request, (each.position for each in wanted))

    def pass_wanted(self, request: Request, holding: Holding, end: int) -> list[Wanted]:
        """Those up to `end`, which are wanted no more."""
        passed = []
        while holding.wanted and holding.wanted[-1].position <= end:
            passed.append(holding.wanted.pop())
            self._lookup.end_promise(request, passed[-1].position)
        return passed

    def give_up(self, request: Request, holding: Holding, wanted: Wanted) -> None:
        """There is no slot for this one."""
        holding.wanted.remove(wanted)
        self._lookup.end_promise(request, wanted.position)
        self._content.stats.snapshots_refused += 1

    def reset(self, holdings: list[Holding]) -> None:
        """The cache has forgotten everything, and what runs now was begun before."""
        for holding in holdings:
            holding.is_donor, holding.tip = False, None
            holding.wanted.clear()
            holding.published.clear()
        self._lookup.promised.clear()
        self.awaited.clear()

    def _publish_path(self, request: Request, holding: Holding, end: int) -> Node:
        """All blocks up to `end`; O(blocks that are new) unless the path was forgotten meanwhile."""
        keys, node = self._lookup.extend(request, end), holding.tip
        if node is None or node.is_gone:
            node = self._content.index.root
        while node.host_page is not None and node.parent is not None:  # its page was a twin's, which has left
            node = node.parent
        assert end <= request.num_computed, (end, request.num_computed)
        new = slice(node.depth, max(end // BLOCK, node.depth))
        holding.tip = self._content.publish_pages(node, keys[new], holding.pages[new])
        return holding.tip

    def _publish_snapshot(
        self, request: Request, holding: Holding, node: Node, slot: int, kind: BoundaryKind
    ) -> Snapshot | None:
        """The snapshot that now is at `node`, this one or an earlier one; None if this one is not to be believed."""
        version = self._content.versions[slot]
        if not may_publish(request.num_computed, node.depth * BLOCK, version):
            return None
        assert version is not None
        assert version.key == node.key, f"slot {slot} was written for another path: {version}, {node.key!r}"
        snapshot = self._content.publish_snapshot(node, slot, kind, request)
        if snapshot.slot == slot:
            holding.published.append(snapshot)
        snapshot.last_use = self._content.now
        if holding.conversation is not None:
            holding.conversation.want(snapshot)
        return snapshot


def _writes(cuts: list[Cut]) -> list[tuple[int, int]]:
    return [(cut.position, cut.slot) for cut in cuts]
