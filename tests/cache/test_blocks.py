"""The block pool: what it hands out, refuses, and proves of itself."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from deltaserve.cache.blocks import BlockPool


def test_reserve_hands_out_every_block_but_zero_once() -> None:
    pool = BlockPool(6)
    assert pool.num_usable == pool.num_free == 5
    assert pool.reserve(2) == (1, 2)
    assert pool.reserve(3) == (3, 4, 5)
    assert pool.num_free == 0
    pool.check([1, 2, 3, 4, 5])


def test_refusal_changes_nothing() -> None:
    pool = BlockPool(4)
    assert pool.reserve(4) is None
    assert pool.num_free == 3
    assert pool.reserve(0) == ()
    pool.check([])
    assert pool.reserve(3) == (1, 2, 3)
    assert pool.reserve(1) is None


def test_last_in_first_out() -> None:
    pool = BlockPool(10)
    pool.reserve(6)
    pool.release((2, 5))
    pool.release((4,))
    assert pool.reserve(4) == (4, 2, 5, 7)


def test_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(3)
    pool.reserve(2)
    pool.share((1,))
    pool.release((1, 2))
    pool.check([1])
    assert pool.num_free == 1
    pool.release((1,))
    pool.check([])
    assert pool.num_free == 2


@pytest.mark.parametrize("misuse", ["share", "release"])
def test_free_blocks_cannot_be_shared_or_released(misuse: str) -> None:
    pool = BlockPool(3)
    pool.reserve(1)
    with pytest.raises(AssertionError, match="block 2 is free"):
        getattr(pool, misuse)((2,))
    with pytest.raises(AssertionError, match="block 0 is free"):
        getattr(pool, misuse)((0,))


@pytest.mark.parametrize("held", [[], [1], [1, 2, 2], [1, 2, 3], [0, 1, 2], [1, 2, 99]])
def test_check_sees_every_difference(held: list[int]) -> None:
    pool = BlockPool(5)
    pool.reserve(2)
    pool.check([1, 2])
    with pytest.raises(AssertionError):
        pool.check(held)


def test_random_operations_against_a_naive_pool() -> None:
    rng = random.Random(7)
    pool = BlockPool(9)
    held: Counter[int] = Counter()
    for _ in range(10_000):
        choice = rng.random()
        if choice < 0.45:
            num_blocks = rng.randint(0, 5)
            taken = pool.reserve(num_blocks)
            assert (taken is None) == (num_blocks > 8 - len(held))
            if taken is not None:
                assert len(taken) == num_blocks
                assert not set(taken) & set(held)
                held.update(taken)
        elif held:
            block = rng.choice(sorted(held))
            if choice < 0.6:
                pool.share((block,))
                held[block] += 1
            else:
                pool.release((block,))
                held -= Counter([block])
        pool.check(held.elements())
        assert pool.num_free == 8 - len(held)


def test_a_kept_block_is_evictable_when_the_cache_alone_holds_it() -> None:
    pool = BlockPool(4)
    pool.reserve(2)
    pool.keep((1,))
    assert (pool.num_evictable, pool.num_kept, pool.num_available) == (0, 1, 1)
    pool.release((1, 2))
    assert (pool.num_free, pool.num_evictable, pool.num_available) == (2, 1, 3)
    assert pool.is_evictable(1) and not pool.is_free(1)
    pool.check([], [1])
    pool.share((1,))
    assert (pool.num_evictable, pool.num_available) == (0, 2)
    pool.drop(1)
    pool.check([1])
    pool.release((1,))
    assert pool.num_free == 3


def test_dropping_what_nobody_else_holds_frees_it() -> None:
    pool = BlockPool(3)
    pool.reserve(2)
    pool.keep((2,))
    pool.release((1, 2))
    pool.drop(2)
    pool.check([])
    assert (pool.num_free, pool.num_evictable) == (2, 0)


def test_the_caches_own_hold_is_dropped_not_released() -> None:
    pool = BlockPool(3)
    pool.reserve(1)
    pool.keep((1,))
    pool.release((1,))
    with pytest.raises(AssertionError, match="the cache alone"):
        pool.release((1,))
    with pytest.raises(AssertionError, match="kept already"):
        pool.keep((1,))
    with pytest.raises(AssertionError, match="is free"):
        pool.keep((2,))


@pytest.mark.parametrize(("held", "kept"), [([1], []), ([], [1]), ([1, 2], [1]), ([1], [1, 1]), ([2], [1])])
def test_check_sees_who_holds(held: list[int], kept: list[int]) -> None:
    pool = BlockPool(4)
    pool.reserve(1)
    pool.keep((1,))
    pool.check([1], [1])
    with pytest.raises(AssertionError):
        pool.check(held, kept)
