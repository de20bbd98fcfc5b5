"""What `bench cache` compares: policies that say which snapshot goes first, over the same books.

| name      | which goes first                                                                                       |
| --------- | ------------------------------------------------------------------------------------------------------ |
| lru       | the one unused for longest                                                                             |
| value     | the least value, as the engine has it (`cache.retention`)                                              |
| oracle    | it has read the trace: first what no request will resume from, then the least FLOPs that the next one  |
|           | to resume there would save, over bytes and the time until then                                         |
| unlimited | none: pools in which nothing has to go                                                                 |

The oracle looks at one snapshot at a time, so it is no upper bound of what could be kept, only hard to beat.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from deltaserve.bench.cache_replay import Arrival
from deltaserve.bench.conversation import MARKERS
from deltaserve.bench.flops import PrefillFlops
from deltaserve.cache.layout import PoolSizes
from deltaserve.cache.manager import CacheManager
from deltaserve.cache.prefix import Node, PrefixIndex
from deltaserve.cache.retention import Held, LeastRecentlyUsed
from deltaserve.core.config import CacheConfig

POLICIES = ("lru", "value", "oracle")
UNLIMITED = "unlimited"
_NUM_USES_TRIED = 64  # of a snapshot's future requests, those that deeper snapshots might serve instead


@dataclass(slots=True, eq=False)
class Oracle:
    """`uses[key]`: numbers of the requests whose prompt contains the block, ascending. `number` is the present one."""

    flops: PrefillFlops
    uses: dict[bytes, list[int]]
    index: PrefixIndex = field(default_factory=PrefixIndex)
    number: int = -1

    def rank(self, held: Held, now: int, is_for_pages: bool = False) -> float:
        following = self._next_use(held.key)
        if following is None:
            return 0.0
        saved = self.flops.between(held.position - held.num_gap_tokens, held.position)
        return saved / (held.page_bytes + held.slot_bytes) / (following - self.number)

    def start(self, number: int) -> None:
        self.number = number

    def _next_use(self, key: bytes) -> int | None:
        """The next request that would resume there, as no deeper snapshot is on its path."""
        deeper = [self.uses.get(node.key, []) for node in _snapshots_below(self.index.nodes[key])]
        uses = self.uses.get(key, [])
        first = _first_after(uses, self.number)
        for number in uses[first : first + _NUM_USES_TRIED]:
            if not any(_contains(others, number) for others in deeper):
                return number
        return None


def future_uses(arrivals: Sequence[Arrival]) -> dict[bytes, list[int]]:
    """From arrivals that have been replayed once, so that their hashes are known."""
    uses: dict[bytes, list[int]] = defaultdict(list)
    for number, arrival in enumerate(arrivals):
        for key in arrival.hashes[: arrival.num_resumable_blocks]:
            uses[key].append(number)
    return uses


def make_manager(
    policy: str, sizes: PoolSizes, config: CacheConfig, flops: PrefillFlops, arrivals: Sequence[Arrival]
) -> tuple[CacheManager, Callable[[int], None] | None]:
    """The books under one policy, and who wants to hear of each request's number."""
    if policy == "lru":
        return CacheManager(sizes, config, markers=MARKERS, retention=LeastRecentlyUsed()), None
    if policy == "oracle":
        oracle = Oracle(flops, future_uses(arrivals))
        manager = CacheManager(sizes, config, markers=MARKERS, retention=oracle)
        oracle.index = manager.index
        return manager, oracle.start
    assert policy in ("value", UNLIMITED), policy
    return CacheManager(sizes, config, markers=MARKERS), None


def _snapshots_below(node: Node) -> Iterator[Node]:
    """Of each path that leads on from here, the first node with a snapshot."""
    pending = [child for child in node.children if child.num_live]
    while pending:
        below = pending.pop()
        if below.snapshot is not None:
            yield below
        else:
            pending += [child for child in below.children if child.num_live]


def _first_after(numbers: Sequence[int], number: int) -> int:
    return bisect.bisect_right(numbers, number)


def _contains(numbers: Sequence[int], number: int) -> bool:
    at = bisect.bisect_left(numbers, number)
    return at < len(numbers) and numbers[at] == number
