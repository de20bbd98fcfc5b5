"""The scheduler under random operations and under refused reservations: same tokens, straight books, nothing lost."""

from __future__ import annotations

import random

import pytest

from deltaserve.cache.blocks import BlockPool
from deltaserve.cache.manager import EMPTY_HIT, CacheManager, Hit, Holding
from deltaserve.core.types import SamplingParams
from tests.scheduler.harness import VOCAB, Harness

NUM_OPERATIONS = 10_000


class RandomlyRefusing(BlockPool):
    """One reservation in five is refused."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._rng = random.Random(num_blocks)

    def reserve(self, num_blocks: int) -> tuple[int, ...] | None:
        return None if self._rng.random() < 0.2 else super().reserve(num_blocks)


class Heedless(CacheManager):
    """Admits into the last page, so that growing rows push each other out all the time."""

    def reserve(self, request_id: int, num_tokens: int, hit: Hit = EMPTY_HIT, keep_free: int = 0) -> Holding | None:
        return super().reserve(request_id, num_tokens, hit)


class Countdown:
    """Makes pools whose `refused`-th reservation, counted over both of them, is refused."""

    def __init__(self, refused: int) -> None:
        self.refused = refused
        self.num_reservations = 0

    def __call__(self, num_blocks: int) -> BlockPool:
        return CountedPool(num_blocks, self)


class CountedPool(BlockPool):
    def __init__(self, num_blocks: int, countdown: Countdown) -> None:
        super().__init__(num_blocks)
        self._countdown = countdown

    def reserve(self, num_blocks: int) -> tuple[int, ...] | None:
        self._countdown.num_reservations += 1
        if self._countdown.num_reservations == self._countdown.refused:
            return None
        return super().reserve(num_blocks)


def submit_random(harness: Harness, rng: random.Random, max_total: int) -> None:
    num_prompt = rng.choice((1, 2, 20, 30, 63, 64, 65, 130, rng.randint(1, max_total - 1)))
    num_prompt = min(num_prompt, max_total - 1)
    max_tokens = rng.randint(1, min(400, max_total - num_prompt))
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, max_tokens // 2)),
        logprobs=rng.choice((None, 1)),
        prompt_logprobs=rng.choice((None, None, None, 1)),
    )
    stop_ids = frozenset(rng.sample(range(VOCAB), rng.choice((0, 0, 0, 1, 3))))
    harness.add(tuple(rng.randrange(VOCAB) for _ in range(num_prompt)), params, stop_ids)


def drain(harness: Harness) -> None:
    """With refusals a step may be empty, but not for ever."""
    num_empty = 0
    while harness.scheduler.has_work:
        num_empty = num_empty + 1 if harness.step() is None else 0
        assert num_empty < 20


@pytest.mark.parametrize(
    ("seed", "num_pages", "num_rows", "budget", "make_pool", "manager_type"),
    [
        (1, 9, 8, 64, BlockPool, Heedless),
        (2, 12, 9, 65, BlockPool, Heedless),
        (3, 7, 4, 127, RandomlyRefusing, Heedless),
        (4, 9, 6, 192, RandomlyRefusing, CacheManager),
        (5, 8, 3, 1000, RandomlyRefusing, CacheManager),
    ],
)
def test_random_operations(
    seed: int, num_pages: int, num_rows: int, budget: int, make_pool: type[BlockPool], manager_type: type[CacheManager]
) -> None:
    rng = random.Random(seed)
    harness = Harness(num_pages, num_rows, budget, make_pool=make_pool, manager_type=manager_type)
    aborted: set[int] = set()

    def abort_any() -> None:
        request_id = rng.randint(1, len(harness.requests))
        if harness.abort(request_id):
            aborted.add(request_id)

    for _ in range(NUM_OPERATIONS):
        choice = rng.random()
        if harness.scheduler.num_waiting < 4 and choice < 0.1:
            submit_random(harness, rng, num_pages * 64 + 1)
        elif harness.requests and choice < 0.103:
            abort_any()
        else:
            harness.step(abort_any if harness.requests and choice > 0.995 else None)
    drain(harness)
    assert len(aborted) > 10
    assert harness.scheduler.num_preemptions > 100
    harness.assert_all_finished(but=aborted)
    for request_id in aborted:
        output = harness.tokens(request_id)
        assert output == harness.lone_output(request_id)[: len(output)]
        assert harness.reason(request_id) is None


def run_script(countdown: Countdown) -> Harness:
    """Prompts and outputs over several page borders, in a pool too small for them, with joins, leaves and an abort."""
    harness = Harness(num_pages=6, num_rows=3, budget=96, make_pool=countdown)

    def meanwhile() -> None:
        harness.abort(6)

    for num_prompt, max_tokens, prompt_logprobs in ((60, 170, None), (130, 90, 1), (1, 150, None)):
        harness.submit(num_prompt, max_tokens, **({"prompt_logprobs": prompt_logprobs} if prompt_logprobs else {}))
    for _ in range(60):
        harness.step()
    for num_prompt, max_tokens in ((64, 200), (200, 10)):
        harness.submit(num_prompt, max_tokens)
    for _ in range(60):
        harness.step()
    harness.submit(30, 100)
    harness.step(meanwhile)
    drain(harness)
    return harness


def test_any_reservation_may_be_refused() -> None:
    undisturbed = Countdown(refused=-1)
    reference = run_script(undisturbed)
    assert undisturbed.num_reservations > 30
    assert reference.scheduler.num_preemptions > 0
    for refused in range(1, undisturbed.num_reservations + 1):
        countdown = Countdown(refused)
        harness = run_script(countdown)
        assert countdown.num_reservations >= refused
        harness.assert_all_finished(but={6})
        for request_id in reference.requests.keys() - {6}:
            assert harness.tokens(request_id) == reference.tokens(request_id)
            told = [chunk.prompt_logprobs for chunk in harness.chunks[request_id] if chunk.prompt_logprobs is not None]
            assert told == [c.prompt_logprobs for c in reference.chunks[request_id] if c.prompt_logprobs is not None]
