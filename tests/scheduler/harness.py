"""Scheduler, cache manager and FakeRunner together, stepped by hand, with every book checked after every call."""

from __future__ import annotations

from collections.abc import Callable

from deltaserve.cache.blocks import BlockPool
from deltaserve.cache.manager import CacheManager
from deltaserve.core.config import SchedulerConfig
from deltaserve.core.plan import StepPlan
from deltaserve.core.request import Request
from deltaserve.core.types import FinishReason, SamplingParams, TokenChunk
from deltaserve.scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner, expected_output, make_sizes

VOCAB = 97


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    """Tokens that differ from position to position and from salt to salt."""
    return tuple((salt * 7_919 + position * position + 3 * position) % VOCAB for position in range(length))


class Harness:
    """`chunks[id]` is all that a request told, in order; `requests[id]` the scheduler's own value."""

    def __init__(
        self,
        num_pages: int = 64,
        num_rows: int = 4,
        budget: int = 64,
        max_model_len: int = 1 << 20,
        make_pool: Callable[[int], BlockPool] = BlockPool,
        manager_type: type[CacheManager] = CacheManager,
    ) -> None:
        sizes, config = make_sizes(num_pages, num_rows), SchedulerConfig(num_rows, budget)
        self.manager = manager_type(sizes, make_pool)
        self.scheduler = Scheduler(config, self.manager, max_model_len)
        self.runner = FakeRunner(sizes, config, VOCAB)
        self.requests: dict[int, Request] = {}
        self.chunks: dict[int, list[TokenChunk]] = {}
        self._free = (self.manager.num_free_pages, self.manager.num_free_slots)

    def add(self, prompt_ids: tuple[int, ...], params: SamplingParams, stop_ids: frozenset[int] = frozenset()) -> int:
        request_id = len(self.requests) + 1
        request = Request(request_id, prompt_ids, params, stop_ids, arrival_s=float(request_id))
        self.scheduler.add(request)
        self.requests[request_id] = request
        self.chunks[request_id] = []
        self.scheduler.check()
        return request_id

    def submit(self, num_prompt: int, max_tokens: int, **params: int) -> int:
        """A request whose prompt differs from all others'."""
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        return self.add(prompt_of(num_prompt, salt=len(self.requests)), sampling)

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
        for chunk in self.scheduler.update(plan, output):
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
        return expected_output(request.prompt_ids, request.params, request.stop_ids, VOCAB)

    def assert_finished(self, request_id: int) -> None:
        assert self.tokens(request_id) == self.lone_output(request_id) == tuple(self.requests[request_id].output_ids)
        assert self.reason(request_id) in (FinishReason.STOP, FinishReason.LENGTH)

    def assert_all_finished(self, but: set[int] | frozenset[int] = frozenset()) -> None:
        for request_id in self.requests.keys() - but:
            self.assert_finished(request_id)
        self.assert_idle()

    def assert_idle(self) -> None:
        """Every page, slot and row is back."""
        assert not self.scheduler.has_work
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert (self.manager.num_free_pages, self.manager.num_free_slots) == self._free
        self.scheduler.check()
