"""Scheduler, cache manager and FakeRunner together, stepped by hand, with every book checked after every call."""

from __future__ import annotations

from collections.abc import Callable

from deltaserve.cache.blocks import BlockPool
from deltaserve.cache.layout import NO_HOST, HostSizes
from deltaserve.cache.manager import CacheManager
from deltaserve.core.chat import ChatMarkers
from deltaserve.core.config import CacheConfig, SchedulerConfig, SpeculativeConfig
from deltaserve.core.plan import StepPlan
from deltaserve.core.request import Request
from deltaserve.core.types import FinishReason, RequestOptions, SamplingParams, TokenChunk
from deltaserve.scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner, expected_output, make_sizes

VOCAB = 97
PLAIN = RequestOptions()


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    """Tokens that differ from position to position and from salt to salt."""
    return tuple((salt * 7_919 + position * position + 3 * position) % VOCAB for position in range(length))


class Harness:
    """`chunks[id]` is all that a request told, in order; `requests[id]` the scheduler's own value.

    `num_drafts` and `is_caching` switch the two on. `clock` says how many seconds a plan takes; None: nobody looks.
    """

    def __init__(
        self,
        num_pages: int = 64,
        num_rows: int = 4,
        budget: int = 64,
        max_model_len: int = 1 << 20,
        make_pool: Callable[[int], BlockPool] = BlockPool,
        manager_type: type[CacheManager] = CacheManager,
        *,
        is_caching: bool = False,
        num_snapshots: int = 0,
        host: HostSizes = NO_HOST,
        markers: ChatMarkers | None = None,
        speculative: SpeculativeConfig = SpeculativeConfig(),  # noqa: B008 frozen
        clock: Callable[[StepPlan], float] | None = None,
        vocab_size: int = VOCAB,
        **settings: float | bool | None,
    ) -> None:
        sizes = make_sizes(num_pages, num_rows, num_snapshots=num_snapshots, host=host)
        config = SchedulerConfig(num_rows, budget, **settings)  # type: ignore[arg-type]
        cache = CacheConfig(enable_prefix_caching=is_caching)
        self.manager = manager_type(sizes, cache, markers=markers, debug=is_caching, make_pool=make_pool)
        self.scheduler = Scheduler(config, self.manager, max_model_len, speculative)
        self.runner = FakeRunner(sizes, config, vocab_size)
        self._vocab_size = vocab_size
        self.requests: dict[int, Request] = {}
        self.chunks: dict[int, list[TokenChunk]] = {}
        self._clock = clock
        self._available = (self.manager.num_available_pages, self.manager.num_available_slots)

    def add(
        self,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        stop_ids: frozenset[int] = frozenset(),
        options: RequestOptions = PLAIN,
    ) -> int:
        request_id = len(self.requests) + 1
        request = Request(request_id, prompt_ids, params, stop_ids, arrival_s=float(request_id), options=options)
        self.scheduler.add(request)
        self.requests[request_id] = request
        self.chunks[request_id] = []
        self.scheduler.check()
        return request_id

    def submit(self, num_prompt: int, max_tokens: int, priority: int = 0, **params: int) -> int:
        """A request whose prompt differs from all others'."""
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        prompt = prompt_of(num_prompt, salt=len(self.requests))
        return self.add(prompt, sampling, options=RequestOptions(priority=priority))

    def abort(self, request_id: int) -> bool:
        was_alive = self.scheduler.abort(request_id)
        self.scheduler.check()
        return was_alive

    def step(self, meanwhile: Callable[[], None] | None = None) -> StepPlan | None:
        """One step; `meanwhile` happens while the plan is out."""
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if plan is None:
            return None
        output = self.runner.execute(plan)
        if meanwhile is not None:
            meanwhile()
            self.scheduler.check()
        elapsed_s = self._clock(plan) if self._clock is not None else None
        for chunk in self.scheduler.update(plan, output, elapsed_s):
            self.chunks[chunk.request_id].append(chunk)
        self.scheduler.check()
        return plan

    def run(self, max_steps: int = 20_000) -> None:
        """Until nothing is left; every step must bring somebody forward."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            assert self.step() is not None, "work, but no step"
        raise AssertionError(f"not finished after {max_steps} steps")

    def tokens(self, request_id: int) -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks[request_id] for token in chunk.token_ids)

    def reason(self, request_id: int) -> FinishReason | None:
        chunks = self.chunks[request_id]
        assert all(chunk.finish_reason is None for chunk in chunks[:-1])
        return chunks[-1].finish_reason if chunks else None

    def lone_output(self, request_id: int) -> tuple[int, ...]:
        request = self.requests[request_id]
        return expected_output(request.prompt_ids, request.params, request.stop_ids, self._vocab_size)

    def assert_finished(self, request_id: int) -> None:
        assert self.tokens(request_id) == self.lone_output(request_id) == tuple(self.requests[request_id].output_ids)
        assert self.reason(request_id) in (FinishReason.STOP, FinishReason.LENGTH)

    def assert_all_finished(self, but: set[int] | frozenset[int] = frozenset()) -> None:
        for request_id in self.requests.keys() - but:
            self.assert_finished(request_id)
        self.assert_idle()

    def assert_idle(self) -> None:
        """Every page, slot and row is back, or kept by the cache alone."""
        assert not self.scheduler.has_work
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert (self.manager.num_available_pages, self.manager.num_available_slots) == self._available
        self.scheduler.check()
