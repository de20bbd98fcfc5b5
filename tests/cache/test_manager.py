"""The cache manager: who owns what after each call, and that a refusal leaves nothing behind."""

from __future__ import annotations

import random

import pytest

from deltaserve.cache.blocks import BlockPool
from deltaserve.cache.manager import EMPTY_HIT, CacheManager, Hit
from deltaserve.core.plan import EMPTY_SLOT
from deltaserve.core.request import Request
from deltaserve.core.types import SamplingParams
from tests.fakes import make_sizes


def test_a_cold_request_matches_the_empty_prefix() -> None:
    manager = CacheManager(make_sizes(num_usable_pages=4, num_rows=1))
    assert manager.match(Request(1, (5, 6), SamplingParams(max_tokens=1))) == EMPTY_HIT
    assert (EMPTY_HIT.num_tokens, EMPTY_HIT.pages, EMPTY_HIT.slot) == (0, (), EMPTY_SLOT)


def test_life_of_a_holding() -> None:
    manager = CacheManager(make_sizes(num_usable_pages=4, num_rows=1))
    holding = manager.reserve(7, 65)
    assert holding is not None
    assert (holding.pages, holding.boundary, holding.live_slot, holding.spare_slot) == ([1, 2], 0, EMPTY_SLOT, 1)
    manager.commit(7, 64)
    assert (holding.boundary, holding.live_slot, holding.spare_slot) == (64, 1, None)
    assert manager.num_free_slots == 1
    assert manager.reserve(7, 128) is holding
    assert (holding.pages, holding.live_slot, holding.spare_slot) == ([1, 2], 1, 2)
    manager.commit(7, 128)
    assert (holding.boundary, holding.live_slot, holding.spare_slot) == (128, 2, None)
    assert manager.reserve(7, 129) is holding
    assert (holding.pages, holding.live_slot, holding.spare_slot) == ([1, 2, 3], 2, 1)
    manager.check()
    assert set(manager.holders) == {7}
    manager.release(7)
    manager.check()
    assert (manager.num_free_pages, manager.num_free_slots) == (4, 2)


def test_refused_pages_change_nothing() -> None:
    manager = CacheManager(make_sizes(num_usable_pages=4, num_rows=1))
    manager.reserve(1, 128)
    assert manager.reserve(2, 129) is None
    assert manager.reserve(1, 257) is None
    assert manager.reserve(2, 64, keep_free=2) is None
    assert (manager.num_free_pages, manager.num_free_slots) == (2, 1)
    assert set(manager.holders) == {1}
    manager.check()
    assert manager.reserve(2, 64, keep_free=1) is not None


def test_pages_go_back_when_the_slot_is_refused() -> None:
    manager = CacheManager(make_sizes(num_usable_pages=8, num_rows=1))
    manager.reserve(1, 1)
    manager.reserve(2, 1)
    assert (manager.num_free_pages, manager.num_free_slots) == (6, 0)
    assert manager.reserve(3, 200) is None
    manager.commit(2, 64)
    manager.check()
    assert manager.reserve(2, 200) is None
    assert manager.num_free_pages == 6
    assert set(manager.holders) == {1, 2}
    manager.check()


def test_a_hit_is_shared_and_outlives_its_first_owner() -> None:
    manager = CacheManager(make_sizes(num_usable_pages=4, num_rows=3))
    first = manager.reserve(1, 64)
    assert first is not None
    manager.commit(1, 64)
    hit = Hit(num_tokens=64, pages=tuple(first.pages), slot=first.live_slot)
    second = manager.reserve(2, 130, hit)
    assert second is not None
    assert second.pages[0] == first.pages[0]
    assert (second.boundary, second.live_slot) == (64, first.live_slot)
    assert second.spare_slot not in (None, first.live_slot)
    manager.check()
    manager.release(1)
    manager.check()
    assert manager.num_free_pages == 1
    manager.commit(2, 128)
    manager.check()
    manager.release(2)
    assert (manager.num_free_pages, manager.num_free_slots) == (4, 6)


@pytest.mark.parametrize("boundary", [0, 63, 64])
def test_commit_moves_forward_to_a_boundary(boundary: int) -> None:
    manager = CacheManager(make_sizes(num_usable_pages=4, num_rows=1))
    manager.reserve(1, 200)
    manager.commit(1, 64)
    manager.reserve(1, 200)
    with pytest.raises(AssertionError):
        manager.commit(1, boundary)


def test_commit_needs_a_spare_slot() -> None:
    manager = CacheManager(make_sizes(num_usable_pages=4, num_rows=1))
    manager.reserve(1, 200)
    manager.commit(1, 64)
    with pytest.raises(AssertionError):
        manager.commit(1, 128)


class RandomlyRefusing(BlockPool):
    rng = random.Random(3)

    def reserve(self, num_blocks: int) -> tuple[int, ...] | None:
        return None if self.rng.random() < 0.2 else super().reserve(num_blocks)


@pytest.mark.parametrize("make_pool", [BlockPool, RandomlyRefusing])
def test_random_operations(make_pool: type[BlockPool]) -> None:
    rng = random.Random(11)
    manager = CacheManager(make_sizes(num_usable_pages=12, num_rows=4), make_pool)
    tokens: dict[int, int] = {}
    for _ in range(5_000):
        request_id = rng.randint(1, 6)
        if rng.random() < 0.15 and request_id in tokens:
            manager.release(request_id)
            del tokens[request_id]
        else:
            num_tokens = tokens.get(request_id, 0) + rng.randint(1, 100)
            before = (manager.num_free_pages, manager.num_free_slots)
            holding = manager.reserve(request_id, num_tokens)
            if holding is None:
                assert (manager.num_free_pages, manager.num_free_slots) == before
            else:
                tokens[request_id] = num_tokens
                if num_tokens // 64 * 64 > holding.boundary and rng.random() < 0.7:
                    manager.commit(request_id, num_tokens // 64 * 64)
        manager.check()
        assert manager.holders == tokens.keys()
    for request_id in list(tokens):
        manager.release(request_id)
    manager.check()
    assert (manager.num_free_pages, manager.num_free_slots) == (12, 8)
