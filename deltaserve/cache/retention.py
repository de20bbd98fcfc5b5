"""Which snapshot goes when room is needed: a value for each, and a heap that finds the least.

The value of a snapshot is what its loss would cost over what its absence would free:

    FLOPs to compute again from the nearest earlier snapshot x chance that somebody comes back / bytes

The chance is what `cache.chances` has counted for snapshots like this one, less where its conversation has gone on, and
fades as exp(-(now - last use) / tau). Since all fade alike, the order of two snapshots does not change with time, and
log value = log(FLOPs x chance / bytes) + last use / tau is a key that stays. The clock counts tokens looked up, so that
a replay is deterministic. The bytes are those that are needed: where room for pages is made, the slot that becomes free
with them counts a tenth.

A policy is any object with `rank`. The heap asks again when an entry comes to the top and puts it back if its rank has
risen meanwhile; whoever lowers a rank pushes the snapshot again. Where the chance of a whole class falls, this is
noticed snapshot by snapshot as they are pushed.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Protocol

from deltaserve.cache.boundaries import BoundaryKind
from deltaserve.cache.chances import Chances
from deltaserve.cache.layout import PoolSizes
from deltaserve.cache.prefix import Node, Snapshot
from deltaserve.core.request import Request
from deltaserve.core.types import BLOCK


@dataclass(frozen=True, slots=True)
class Held:
    """What a policy may know of a snapshot.

    `key` names its path; it is the state after `position` tokens, `num_gap_tokens` behind the nearest earlier snapshot.
    `slot_bytes` and `page_bytes` would be freed: its own, and those of pages that then cannot be resumed any more.
    `chance`: how many requests resume from snapshots like this one. Times count tokens looked up.
    """

    key: bytes
    kind: BoundaryKind
    position: int
    num_gap_tokens: int
    slot_bytes: int
    page_bytes: int
    chance: float
    num_waiting: int
    last_use: int
    is_old: bool


class Retention(Protocol):
    """A policy. The least rank goes first. `is_for_pages`: pages are short, a slot is not."""

    def rank(self, held: Held, now: int, is_for_pages: bool = False) -> float: ...


@dataclass(frozen=True, slots=True)
class ByValue:
    """As above. `tau_tokens` is what must be looked up for a chance to fade to 1/e.

    At `attention_tokens` of context attention costs as much per token as everything else. A preempted request that
    waits for its snapshot is certain to come back: `waiting_weight`.
    """

    tau_tokens: float
    attention_tokens: float = 32_768.0
    old_weight: float = 0.3
    waiting_weight: float = 1e6
    spare_slot_share: float = 0.1

    def rank(self, held: Held, now: int, is_for_pages: bool = False) -> float:
        chance = held.chance
        if held.is_old:
            chance *= self.old_weight
        if held.num_waiting:
            chance *= self.waiting_weight
        middle = held.position - held.num_gap_tokens / 2
        flops = held.num_gap_tokens * (1 + middle / self.attention_tokens)
        num_bytes = held.page_bytes + held.slot_bytes * (self.spare_slot_share if is_for_pages else 1)
        return math.log(flops * chance / num_bytes) + held.last_use / self.tau_tokens


@dataclass(frozen=True, slots=True)
class LeastRecentlyUsed:
    """What went unused for longest goes first; among equals the longest prefix."""

    def rank(self, held: Held, now: int, is_for_pages: bool = False) -> float:
        return held.last_use - held.position / (1 << 40)


MAX_SESSIONS = 1 << 16
_SHARED = (BoundaryKind.SYSTEM, BoundaryKind.BRANCH)  # they belong to no conversation


class Conversation:
    """The snapshots of one conversation by the turn that last wanted them."""

    __slots__ = ("_recent", "num_turns")

    def __init__(self) -> None:
        self.num_turns = 0
        self._recent: deque[tuple[int, Snapshot]] = deque()

    def start_turn(self, retained_turns: int) -> list[Snapshot]:
        """One more request of this conversation. Gives the snapshots that have thereby become old."""
        self.num_turns += 1
        aged = []
        while self._recent and self._recent[0][0] <= self.num_turns - max(retained_turns, 1):
            turn, snapshot = self._recent.popleft()
            if snapshot.turn == turn and snapshot.conversation is self and not snapshot.is_gone:
                snapshot.is_old = True
                aged.append(snapshot)
        return aged

    def want(self, snapshot: Snapshot) -> None:
        """The turn that runs now has use for it."""
        if snapshot.kind in _SHARED:
            return
        if snapshot.conversation is not self or snapshot.turn != self.num_turns:
            snapshot.conversation, snapshot.turn, snapshot.is_old = self, self.num_turns, False
            self._recent.append((self.num_turns, snapshot))


class Conversations:
    """By session id where there is one; else a conversation is what goes on from one of its snapshots."""

    def __init__(self, retained_turns: int) -> None:
        self._retained_turns = retained_turns
        self._sessions: OrderedDict[tuple[str, str], Conversation] = OrderedDict()

    def start_turn(self, request: Request, resumed: Snapshot | None) -> tuple[Conversation, list[Snapshot]]:
        """The request's conversation, and the snapshots that have become old by this turn of it."""
        session_id = request.options.session_id
        if session_id is not None:
            conversation = self._session((request.options.cache_salt, session_id))
        elif resumed is not None and resumed.conversation is not None and resumed.kind not in _SHARED:
            conversation = resumed.conversation
        else:
            conversation = Conversation()
        return conversation, conversation.start_turn(self._retained_turns)

    def clear(self) -> None:
        self._sessions.clear()

    def _session(self, name: tuple[str, str]) -> Conversation:
        conversation = self._sessions.setdefault(name, Conversation())
        self._sessions.move_to_end(name)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return conversation


class VictimHeap:
    """Snapshots by rank. `rank_of` gives the rank now; what has changed since a push is noticed at the top."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Snapshot]] = []
        self._numbers: dict[Snapshot, int] = {}  # of each snapshot's valid entry
        self._next_number = 0

    def __contains__(self, snapshot: Snapshot) -> bool:
        return snapshot in self._numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def push(self, snapshot: Snapshot, rank: float) -> None:
        """Add it, or give it a new rank."""
        self._next_number += 1
        self._numbers[snapshot] = self._next_number
        heapq.heappush(self._entries, (rank, self._next_number, snapshot))
        if len(self._entries) > 2 * len(self._numbers) + 64:
            self._entries = [entry for entry in self._entries if self._numbers.get(entry[2]) == entry[1]]
            heapq.heapify(self._entries)

    def discard(self, snapshot: Snapshot) -> None:
        self._numbers.pop(snapshot, None)

    def least(self, rank_of: RankOf) -> tuple[Snapshot, float] | None:
        """The snapshot of least rank and that rank; it stays."""
        while self._entries:
            rank, number, snapshot = self._entries[0]
            if self._numbers.get(snapshot) != number:
                heapq.heappop(self._entries)
                continue
            now = rank_of(snapshot)
            if now <= rank:
                return snapshot, now
            self._next_number += 1
            self._numbers[snapshot] = self._next_number
            heapq.heapreplace(self._entries, (now, self._next_number, snapshot))
        return None

    def clear(self) -> None:
        self._entries.clear()
        self._numbers.clear()


class RankOf(Protocol):
    def __call__(self, snapshot: Snapshot, /) -> float: ...


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a page and of a slot."""

    page_bytes: int
    slot_bytes: int


def describe(snapshot: Snapshot, sizes: Sizes, chances: Chances) -> Held:
    """O(blocks to the nearest earlier snapshot)."""
    node = snapshot.node
    own_blocks, is_own = 0, node.num_live == 1
    above: Node = node
    while True:
        own_blocks += is_own
        assert above.parent is not None, "the root is no snapshot's node"
        above = above.parent
        if above.parent is None or above.snapshot is not None:
            break
        is_own = is_own and above.num_live == 1
    return Held(
        key=node.key,
        kind=snapshot.kind,
        position=node.depth * BLOCK,
        num_gap_tokens=(node.depth - above.depth) * BLOCK,
        slot_bytes=sizes.slot_bytes,
        page_bytes=own_blocks * sizes.page_bytes,
        chance=chances.of(snapshot.kind, snapshot.num_uses > 0),
        num_waiting=snapshot.num_waiting,
        last_use=snapshot.last_use,
        is_old=snapshot.is_old,
    )


def default_retention(sizes: PoolSizes) -> Retention:
    """Chances fade with what the pages could hold once over."""
    return ByValue(tau_tokens=float(max(sizes.num_tokens, BLOCK)))
