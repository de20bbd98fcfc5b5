"""Scheduler, cache books and a real runner, stepped by hand; what is given back is poisoned at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deltaserve.cache.blocks import BlockPool
from deltaserve.cache.layout import plan_pools
from deltaserve.cache.manager import CacheManager
from deltaserve.core.config import CacheConfig, EngineConfig, SchedulerConfig
from deltaserve.core.plan import RowOutput, StepOutput, StepPlan
from deltaserve.core.request import Request
from deltaserve.core.types import SamplingParams, TokenChunk
from deltaserve.model.config import ModelConfig
from deltaserve.runner.build import cache_spec, load_runner
from deltaserve.scheduler.scheduler import Scheduler

MAX_MODEL_LEN = 1024


class RecordingPool(BlockPool):
    """Remembers which blocks lost their last holder."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.freed: list[int] = []

    def release(self, block_ids: Sequence[int]) -> None:
        num_free = self.num_free
        super().release(block_ids)
        self.freed += self._free[num_free:]


class Loop:
    """`chunks[id]` is all that request id told."""

    def __init__(
        self,
        directory: Path,
        budget: int = 2048,
        num_rows: int = 8,
        num_pages: int = 200,
        **cache: str,
    ) -> None:
        config = EngineConfig(
            model=directory,
            max_model_len=MAX_MODEL_LEN,
            num_threads=1,
            debug_checks=True,
            cache=CacheConfig(num_pages=num_pages, **cache),  # type: ignore[arg-type]
            scheduler=SchedulerConfig(num_rows, budget),
        )
        model_config = ModelConfig.from_directory(directory)
        self.sizes = plan_pools(
            cache_spec(config, model_config), config.cache, config.scheduler, MAX_MODEL_LEN, available_bytes=1 << 32
        )
        self.runner, _ = load_runner(config, model_config, self.sizes)
        self.pools: list[RecordingPool] = []
        self.scheduler = Scheduler(config.scheduler, CacheManager(self.sizes, self._make_pool), MAX_MODEL_LEN)
        self.chunks: dict[int, list[TokenChunk]] = {}
        self.plans: list[StepPlan] = []

    def _make_pool(self, num_blocks: int) -> RecordingPool:
        self.pools.append(RecordingPool(num_blocks))
        return self.pools[-1]

    def add(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        request_id = len(self.chunks)
        self.scheduler.add(Request(request_id, tuple(prompt_ids), params))
        self.chunks[request_id] = []
        return request_id

    def step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.plans.append(plan)
        pages, slots = self.pools
        self.runner.poison(pages.freed, slots.freed)
        pages.freed, slots.freed = [], []
        for chunk in self.scheduler.update(plan, self.runner.execute(plan)):
            self.chunks[chunk.request_id].append(chunk)

    def give_up(self) -> None:
        """End the requests of the plan whose step failed, as the engine does."""
        plan = self.plans[-1]
        for row in plan.rows:
            self.scheduler.abort(row.request_id)
        nothing = tuple(RowOutput(row.request_id) for row in plan.rows)
        assert self.scheduler.update(plan, StepOutput(plan.step_id, nothing)) == []

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def tokens(self, request_id: int) -> list[int]:
        return [token_id for chunk in self.chunks[request_id] for token_id in chunk.token_ids]


def answers(loop: Loop, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
    """All prompts at once, to their ends."""
    ids = [loop.add(prompt, params) for prompt in prompts]
    loop.run()
    return [loop.tokens(request_id) for request_id in ids]
