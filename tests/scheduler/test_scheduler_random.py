"""The scheduler under random operations and under refused reservations: same tokens, straight books, nothing lost.

The model's state is a hash of its tokens (`tests.fakes`), so a hit on stale or foreign pages or states changes tokens,
and all tokens are compared with those of a lone, cold request.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from deltaserve.cache.blocks import BlockPool
from deltaserve.cache.layout import NO_HOST, HostSizes
from deltaserve.cache.manager import CacheManager, Hit, Holding
from deltaserve.core.config import SpeculativeConfig
from deltaserve.core.request import Request
from deltaserve.core.types import RequestOptions, SamplingParams
from tests.scheduler.harness import VOCAB, Harness

NUM_OPERATIONS = 4_000


class RandomlyRefusing(BlockPool):
    """One reservation in five is refused."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._rng = random.Random(num_blocks)

    def reserve(self, num_blocks: int) -> tuple[int, ...] | None:
        return None if self._rng.random() < 0.2 else super().reserve(num_blocks)


class Heedless(CacheManager):
    """Admits into the last page, so that growing rows push each other out all the time."""

    def open(self, request: Request, hit: Hit, num_tokens: int, keep_free: int = 0) -> Holding | None:
        return super().open(request, hit, num_tokens)


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
        if num_blocks:
            self._countdown.num_reservations += 1
            if self._countdown.num_reservations == self._countdown.refused:
                return None
        return super().reserve(num_blocks)


@dataclass(frozen=True)
class Setup:
    seed: int
    num_pages: int
    num_rows: int
    budget: int
    make_pool: type[BlockPool] = BlockPool
    manager_type: type[CacheManager] = CacheManager
    num_snapshots: int = 0  # 0: no cache
    host: HostSizes = NO_HOST
    speculative: SpeculativeConfig = SpeculativeConfig()  # noqa: RUF009 frozen
    long_share: float = 1.0
    num_operations: int = NUM_OPERATIONS

    def harness(self) -> Harness:
        return Harness(
            self.num_pages,
            self.num_rows,
            self.budget,
            make_pool=self.make_pool,
            manager_type=self.manager_type,
            is_caching=self.num_snapshots > 0,
            num_snapshots=self.num_snapshots,
            host=self.host,
            speculative=self.speculative,
            clock=lambda plan: 0.01 + plan.num_tokens * 1e-4,
            long_prefill_share=self.long_share,
            long_prefill_min_tokens=200,
        )


SETUPS = {
    "plain": Setup(1, 9, 8, 64, manager_type=Heedless),
    "refusing": Setup(3, 7, 4, 127, RandomlyRefusing, Heedless),
    "drafts": Setup(2, 12, 9, 65, manager_type=Heedless, speculative=SpeculativeConfig(3)),
    "cache": Setup(4, 12, 6, 192, manager_type=Heedless, num_snapshots=6, long_share=0.5),
    "cache refusing": Setup(5, 14, 4, 1000, RandomlyRefusing, num_snapshots=5, host=HostSizes(16, 8)),
    "cache, host, drafts": Setup(
        6, 10, 6, 100, manager_type=Heedless, num_snapshots=6, host=HostSizes(12, 6),
        speculative=SpeculativeConfig(3), long_share=0.3, num_operations=10_000,
    ),
    "cache, host, adaptive drafts": Setup(
        7, 11, 5, 256, manager_type=Heedless, num_snapshots=4, host=HostSizes(20, 9),
        speculative=SpeculativeConfig(7, is_adaptive=True),
    ),
}  # fmt: skip


@dataclass
class Walk:
    """Random operations on one harness. `ended` are requests that ended before their last token."""

    harness: Harness
    rng: random.Random
    num_pages: int
    ended: set[int] = field(default_factory=set)
    num_discarded: int = 0

    def operate(self) -> None:
        rng, harness = self.rng, self.harness
        choice = rng.random()
        if harness.scheduler.num_waiting < 4 and choice < 0.1:
            rng.choice((self.submit, self.follow_up, self.branch))()
        elif not harness.requests or choice >= 0.106:
            harness.step(self.abort_any if harness.requests and choice > 0.996 else None)
        elif choice < 0.103:
            self.abort_any()
        elif choice < 0.1045:
            harness.scheduler.preempt(rng.randint(1, len(harness.requests)))
        elif choice < 0.1055:
            self.discard()
        else:
            harness.manager.reset()
        harness.scheduler.check()

    def submit(self, beginning: tuple[int, ...] = (), options: RequestOptions | None = None) -> None:
        rng, max_total = self.rng, self.num_pages * 64 + 1
        num_new = rng.choice((1, 2, 20, 30, 63, 64, 65, 130, rng.randint(1, max_total - 1)))
        beginning = beginning[: max_total - 2]
        prompt = beginning + tuple(rng.randrange(VOCAB) for _ in range(min(num_new, max_total - 1 - len(beginning))))
        max_tokens = rng.randint(1, min(400, max_total - len(prompt)))
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.choice((0, 0, max_tokens // 2)),
            logprobs=rng.choice((None, 1)),
            prompt_logprobs=rng.choice((None, None, None, None, None, 1)),
        )
        stop_ids = frozenset(rng.sample(range(VOCAB), rng.choice((0, 0, 0, 1, 3))))
        if options is None:
            options = RequestOptions(
                priority=rng.choice((0, 0, 0, 1)),
                cache_salt=rng.choice(("", "", "salt")),
                use_drafts=rng.random() < 0.8,
            )
        self.harness.add(prompt, params, stop_ids, options)

    def follow_up(self) -> None:
        """The next turn of a conversation: all that was said and some more. Also of one that still speaks."""
        if self.harness.requests:
            request = self.any_request()
            self.submit(request.known_ids(0, request.num_known), request.options)

    def branch(self) -> None:
        """Something else after the beginning of an earlier prompt."""
        if self.harness.requests:
            request = self.any_request()
            self.submit(request.known_ids(0, self.rng.randint(1, request.num_known)), request.options)

    def any_request(self) -> Request:
        """One of the latest, which are most likely still cached."""
        latest = len(self.harness.requests)
        return self.harness.requests[self.rng.randint(max(1, latest - 6), latest)]

    def abort_any(self) -> None:
        request_id = self.rng.randint(max(1, len(self.harness.requests) - 20), len(self.harness.requests))
        if self.harness.abort(request_id):
            self.ended.add(request_id)

    def discard(self) -> None:
        """A step that was stopped half-way: whatever it wrote, its requests are gone and nothing of it is found."""
        plan = self.harness.scheduler.schedule()
        if plan is not None:
            self.harness.runner.execute(plan)
            self.ended |= set(self.harness.scheduler.discard(plan))
            self.num_discarded += 1

    def drain(self) -> None:
        """With refusals a step may be empty, but not for ever."""
        num_empty = 0
        while self.harness.scheduler.has_work:
            num_empty = num_empty + 1 if self.harness.step() is None else 0
            assert num_empty < 20


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
def test_random_operations(setup: Setup) -> None:
    harness = setup.harness()
    walk = Walk(harness, random.Random(setup.seed), setup.num_pages)
    for _ in range(setup.num_operations):
        walk.operate()
    walk.drain()
    harness.assert_all_finished(but=walk.ended)
    for request_id in walk.ended:
        output = harness.tokens(request_id)
        assert output == harness.lone_output(request_id)[: len(output)]
        assert harness.reason(request_id) is None
    assert len(walk.ended) > 5
    assert walk.num_discarded > 0
    assert harness.scheduler.num_preemptions > 15
    assert_happened(harness, setup)


def assert_happened(harness: Harness, setup: Setup) -> None:
    """That the walk has seen what it is for."""
    stats, drafts = harness.manager.stats, harness.scheduler.draft_counts
    if setup.num_snapshots:
        assert min(stats.num_hit, stats.snapshots_published, stats.snapshots_evicted, stats.pages_evicted) > 60
    if setup.host is not NO_HOST:
        assert min(stats.pages_saved, stats.snapshots_saved, stats.pages_dropped, stats.snapshots_dropped) > 20
        assert min(stats.pages_restored, stats.snapshots_restored, stats.num_restored) > 2
    if setup.speculative.num_drafts:
        assert drafts.num_verified > drafts.num_accepted > 500


def run_script(make_pool: Callable[[int], BlockPool], is_full: bool) -> Harness:
    """Prompts and outputs over several page borders, in a pool too small for them, with joins, leaves and an abort.

    `is_full`: with a cache, its second tier and drafts, and three prompts that begin alike.
    """
    settings = {"is_caching": True, "num_snapshots": 2, "host": HostSizes(4, 2)} if is_full else {}
    speculative = SpeculativeConfig(2 if is_full else 0)
    harness = Harness(6, 3, 96, make_pool=make_pool, speculative=speculative, **settings)  # type: ignore[arg-type]

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
    for num_more in (3, 70) if is_full else ():
        harness.add(harness.requests[5].prompt_ids + (7,) * num_more, SamplingParams(max_tokens=20))
    Walk(harness, random.Random(0), 6).drain()
    return harness


@pytest.mark.parametrize("is_full", [False, True])
def test_any_reservation_may_be_refused(is_full: bool) -> None:
    undisturbed = Countdown(refused=-1)
    reference = run_script(undisturbed, is_full)
    assert undisturbed.num_reservations > 30
    assert reference.scheduler.num_preemptions > 0
    for refused in range(1, undisturbed.num_reservations + 1):
        countdown = Countdown(refused)
        harness = run_script(countdown, is_full)
        assert countdown.num_reservations >= refused
        harness.assert_all_finished(but={6})
        for request_id in reference.requests.keys() - {6}:
            assert harness.tokens(request_id) == reference.tokens(request_id)
            told = [chunk.prompt_logprobs for chunk in harness.chunks[request_id] if chunk.prompt_logprobs is not None]
            assert told == [c.prompt_logprobs for c in reference.chunks[request_id] if c.prompt_logprobs is not None]
