"""What goes first: ranks, conversations that go on, and the heap that is told late."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from deltaserve.cache.boundaries import BoundaryKind
from deltaserve.cache.chances import Chances
from deltaserve.cache.prefix import PrefixIndex, Snapshot
from deltaserve.cache.retention import (
    ByValue,
    Conversation,
    Held,
    LeastRecentlyUsed,
    Sizes,
    VictimHeap,
    describe,
)

HELD = Held(
    key=b"k",
    kind=BoundaryKind.TURN,
    position=4096,
    num_gap_tokens=1024,
    slot_bytes=1 << 20,
    page_bytes=1 << 20,
    chance=0.5,
    num_waiting=0,
    last_use=1000,
    is_old=False,
)
BY_VALUE = ByValue(tau_tokens=10_000)


@pytest.mark.parametrize(
    "better",
    [
        {"num_gap_tokens": 2048},
        {"slot_bytes": 1 << 19},
        {"page_bytes": 1 << 19},
        {"chance": 0.6},
        {"num_waiting": 1},
        {"last_use": 2000},
        {"position": 65_536},
    ],
)
@pytest.mark.parametrize("is_for_pages", [False, True])
def test_what_is_worth_more(better: dict[str, float], is_for_pages: bool) -> None:
    rank = BY_VALUE.rank(replace(HELD, **better), 0, is_for_pages)  # type: ignore[arg-type]
    assert rank > BY_VALUE.rank(HELD, 0, is_for_pages)


def test_a_slot_counts_little_where_pages_are_short() -> None:
    small = replace(HELD, num_gap_tokens=64, page_bytes=1 << 16, position=HELD.position - 480)
    assert BY_VALUE.rank(small, 0) < BY_VALUE.rank(HELD, 0)
    assert BY_VALUE.rank(small, 0, is_for_pages=True) > BY_VALUE.rank(small, 0) + 1
    assert LeastRecentlyUsed().rank(small, 0, is_for_pages=True) == LeastRecentlyUsed().rank(small, 0)


def test_an_old_turn_is_worth_less_and_a_waiting_request_more_than_anything() -> None:
    assert BY_VALUE.rank(replace(HELD, is_old=True), 0) < BY_VALUE.rank(HELD, 0)
    rich = replace(HELD, chance=50.0, num_gap_tokens=4096)
    assert BY_VALUE.rank(replace(HELD, num_waiting=1), 0) > BY_VALUE.rank(rich, 0)


def test_chances_fade_by_tau() -> None:
    """Twice the value is worth as much as ln 2 tau of rest."""
    later = replace(HELD, last_use=HELD.last_use + 6932)
    assert BY_VALUE.rank(replace(HELD, chance=2 * HELD.chance), 0) == pytest.approx(BY_VALUE.rank(later, 0), abs=1e-4)


def test_lru_knows_the_time_alone() -> None:
    lru = LeastRecentlyUsed()
    assert lru.rank(replace(HELD, last_use=1), 9) < lru.rank(replace(HELD, last_use=2, num_gap_tokens=64), 9)
    assert lru.rank(replace(HELD, position=8192), 9) < lru.rank(HELD, 9)


def chain(length: int) -> tuple[PrefixIndex, dict[int, Snapshot]]:
    """Snapshots at 4, and at the ends of two branches that part at 8 and end at `length` and 10."""
    index = PrefixIndex()
    node, nodes = index.root, {}
    for depth in range(1, length + 1):
        node = nodes[depth] = index.insert(node, bytes([depth]), depth)
    fork = nodes[8]
    for depth in (9, 10):
        fork = index.insert(fork, bytes([100 + depth]), 100 + depth)
    snapshots = {}
    for slot, (name, at) in enumerate({4: nodes[4], length: nodes[length], 10: fork}.items(), 1):
        snapshots[name] = Snapshot(at, BoundaryKind.TURN, 0)
        index.add_snapshot(snapshots[name], slot)
    return index, snapshots


def test_describe_measures_the_gap_and_what_would_be_freed() -> None:
    index, snapshots = chain(20)
    sizes, chances = Sizes(page_bytes=1, slot_bytes=1000), Chances()
    trunk, long, short = (describe(snapshots[name], sizes, chances) for name in (4, 20, 10))
    assert (trunk.position, trunk.num_gap_tokens, trunk.slot_bytes, trunk.page_bytes) == (256, 256, 1000, 0)
    assert (long.position, long.num_gap_tokens, long.page_bytes) == (1280, 16 * 64, 12)
    assert (short.num_gap_tokens, short.page_bytes) == (6 * 64, 2)
    index.remove_snapshot(snapshots[10])
    assert describe(snapshots[20], sizes, chances).page_bytes == 16
    index.remove_snapshot(snapshots[20])
    assert describe(snapshots[4], sizes, chances).page_bytes == 4


def test_describe_tells_the_chance_of_its_class() -> None:
    _, snapshots = chain(20)
    sizes, chances = Sizes(page_bytes=1, slot_bytes=1000), Chances()
    assert describe(snapshots[4], sizes, chances).chance == chances.of(BoundaryKind.TURN, False)
    snapshots[4].num_uses = 3
    assert describe(snapshots[4], sizes, chances).chance == chances.of(BoundaryKind.TURN, True)


def test_turns_beyond_those_retained_become_old() -> None:
    _, snapshots = chain(20)
    first, second, third = snapshots.values()
    conversation = Conversation()
    assert conversation.start_turn(2) == []
    conversation.want(first)
    conversation.want(second)
    assert conversation.start_turn(2) == []
    conversation.want(second)
    conversation.want(third)
    assert conversation.start_turn(2) == [first]
    assert (first.is_old, second.is_old) == (True, False)
    conversation.want(first)
    assert not first.is_old
    assert conversation.start_turn(2) == [second, third]


def test_shared_snapshots_belong_to_no_conversation() -> None:
    _, snapshots = chain(20)
    snapshot = snapshots[4]
    snapshot.kind = BoundaryKind.SYSTEM
    conversation = Conversation()
    conversation.start_turn(1)
    conversation.want(snapshot)
    assert conversation.start_turn(1) == [] and not snapshot.is_old


def test_the_heap_against_a_sorted_list() -> None:
    rng = random.Random(5)
    _, snapshots = chain(20)
    index = PrefixIndex()
    all_snapshots = [Snapshot(index.insert(index.root, bytes([n]), n), BoundaryKind.TURN, 0) for n in range(20)]
    heap, ranks, inside = VictimHeap(), dict.fromkeys(all_snapshots, 0.0), set()
    for _ in range(3_000):
        snapshot = rng.choice(all_snapshots)
        choice = rng.random()
        if choice < 0.4:
            ranks[snapshot] = rng.random()
            heap.push(snapshot, ranks[snapshot])
            inside.add(snapshot)
        elif choice < 0.6:
            heap.discard(snapshot)
            inside.discard(snapshot)
        else:
            ranks[snapshot] += rng.random()  # risen, and the heap was not told
        least = heap.least(ranks.__getitem__)
        assert (least is None) == (not inside)
        if least is not None:
            assert least[0] in inside and least[1] == min(ranks[each] for each in inside)
        assert len(heap) == len(inside)
