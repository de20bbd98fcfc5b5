"""Who owns what after each call, and that a refusal leaves nothing behind; without prefix cache."""

from __future__ import annotations

import random

import pytest

from deltaserve.cache.blocks import BlockPool
from deltaserve.cache.manager import EMPTY_HIT, CacheManager, Holding
from deltaserve.core.config import CacheConfig
from deltaserve.core.plan import EMPTY_SLOT, Cut
from deltaserve.core.request import Request
from deltaserve.core.types import CacheNote, CacheRecord, SamplingParams
from tests.fakes import make_sizes

OFF = CacheConfig(enable_prefix_caching=False)


def manager_of(num_pages: int, num_rows: int, make_pool: type[BlockPool] = BlockPool) -> CacheManager:
    return CacheManager(make_sizes(num_pages, num_rows), OFF, make_pool=make_pool)


def make_request(request_id: int, num_prompt: int = 1000) -> Request:
    return Request(request_id, tuple(range(num_prompt)), SamplingParams(max_tokens=1))


def opened(manager: CacheManager, request: Request, num_tokens: int, keep_free: int = 0) -> Holding | None:
    return manager.open(request, manager.match(request), num_tokens, keep_free)


def commit(manager: CacheManager, request: Request, boundary: int) -> None:
    request.num_computed = boundary
    manager.commit(request, boundary)


def test_switched_off_every_request_is_cold() -> None:
    manager, request = manager_of(4, 1), make_request(1, 2)
    assert manager.match(request) is EMPTY_HIT
    assert (EMPTY_HIT.num_tokens, EMPTY_HIT.awaits, EMPTY_HIT.note) == (0, 0, CacheNote.OFF)
    assert opened(manager, request, 2) is not None
    assert request.cache_record == CacheRecord(2, 0, 0, 0, CacheNote.OFF)
    assert request.block_hashes == []


def test_life_of_a_holding() -> None:
    manager, request = manager_of(4, 1), make_request(7)
    holding = opened(manager, request, 65)
    assert holding is not None
    assert (holding.pages, holding.boundary, holding.live_slot, holding.spare_slot) == ([1, 2], 0, EMPTY_SLOT, 1)
    assert manager.cuts(request, 0, 63) == ()
    assert manager.cuts(request, 0, 65) == (Cut(64, 1),)
    commit(manager, request, 64)
    assert (holding.boundary, holding.live_slot, holding.spare_slot) == (64, 1, None)
    assert manager.num_free_slots == 1
    assert manager.reserve(request, 128) is holding
    assert (holding.pages, holding.live_slot, holding.spare_slot) == ([1, 2], 1, 2)
    commit(manager, request, 128)
    assert (holding.boundary, holding.live_slot, holding.spare_slot) == (128, 2, None)
    assert manager.reserve(request, 129) is holding
    assert (holding.pages, holding.live_slot, holding.spare_slot) == ([1, 2, 3], 2, 1)
    manager.check()
    assert set(manager.holders) == {7}
    manager.release(request)
    manager.check()
    assert (manager.num_free_pages, manager.num_free_slots) == (4, 2)
    assert manager.take_block_ops() == () and manager.take_events() == ()


def test_refused_pages_change_nothing() -> None:
    manager, one, two = manager_of(4, 1), make_request(1), make_request(2)
    opened(manager, one, 128)
    assert opened(manager, two, 129) is None
    assert manager.reserve(one, 257) is None
    assert opened(manager, two, 64, keep_free=2) is None
    assert (manager.num_free_pages, manager.num_free_slots) == (2, 1)
    assert set(manager.holders) == {1}
    assert two.cache_record is None
    manager.check()
    assert opened(manager, two, 64, keep_free=1) is not None


def test_pages_go_back_when_the_slot_is_refused() -> None:
    manager, requests = manager_of(8, 1), [make_request(n) for n in range(3)]
    opened(manager, requests[0], 1)
    opened(manager, requests[1], 1)
    assert (manager.num_free_pages, manager.num_free_slots) == (6, 0)
    assert opened(manager, requests[2], 200) is None
    commit(manager, requests[1], 64)
    manager.check()
    assert manager.reserve(requests[1], 200) is None
    assert manager.num_free_pages == 6
    assert set(manager.holders) == {0, 1}
    manager.check()


@pytest.mark.parametrize("boundary", [0, 63, 64])
def test_commit_moves_forward_to_a_boundary(boundary: int) -> None:
    manager, request = manager_of(4, 1), make_request(1)
    opened(manager, request, 200)
    commit(manager, request, 64)
    manager.reserve(request, 200)
    with pytest.raises(AssertionError):
        commit(manager, request, boundary)


def test_commit_needs_a_spare_slot_and_accepted_tokens() -> None:
    manager, request = manager_of(4, 1), make_request(1)
    opened(manager, request, 200)
    request.num_computed = 63
    with pytest.raises(AssertionError):
        manager.commit(request, 64)
    commit(manager, request, 64)
    with pytest.raises(AssertionError):
        commit(manager, request, 128)


class RandomlyRefusing(BlockPool):
    rng = random.Random(3)

    def reserve(self, num_blocks: int) -> tuple[int, ...] | None:
        return None if self.rng.random() < 0.2 else super().reserve(num_blocks)


@pytest.mark.parametrize("make_pool", [BlockPool, RandomlyRefusing])
def test_random_operations_without_a_prefix_cache(make_pool: type[BlockPool]) -> None:
    rng = random.Random(11)
    manager = manager_of(12, 4, make_pool)
    tokens: dict[int, int] = {}
    requests = {n: make_request(n) for n in range(1, 7)}
    for _ in range(3_000):
        request = rng.choice(list(requests.values()))
        if rng.random() < 0.15 and request.id in tokens:
            manager.release(request)
            del tokens[request.id]
        else:
            num_tokens = tokens.get(request.id, 0) + rng.randint(1, 100)
            before = (manager.num_free_pages, manager.num_free_slots)
            is_open = request.id in tokens
            holding = manager.reserve(request, num_tokens) if is_open else opened(manager, request, num_tokens)
            if holding is None:
                assert (manager.num_free_pages, manager.num_free_slots) == before
            else:
                tokens[request.id] = num_tokens
                if num_tokens // 64 * 64 > holding.boundary and rng.random() < 0.7:
                    commit(manager, request, num_tokens // 64 * 64)
        manager.check()
        assert manager.holders == tokens.keys()
    for request_id in list(tokens):
        manager.release(requests[request_id])
    manager.check()
    assert (manager.num_free_pages, manager.num_free_slots) == (12, 8)
