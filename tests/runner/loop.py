"""Scheduler, cache books and a real runner, stepped by hand, by default in debug mode: what is given back is poisoned
at once, and what a hit borrows must hold the bytes that were published.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deltaserve.cache.layout import plan_pools
from deltaserve.cache.manager import CacheManager
from deltaserve.core.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculativeConfig
from deltaserve.core.plan import StepPlan
from deltaserve.core.request import Request
from deltaserve.core.types import RequestOptions, SamplingParams, TokenChunk
from deltaserve.engine.tokenizer import read_chat_markers
from deltaserve.model.config import ModelConfig
from deltaserve.runner.build import cache_spec, load_runner
from deltaserve.scheduler.scheduler import Scheduler

MAX_MODEL_LEN = 1024


class Loop:
    """`chunks[id]` is all that request id told."""

    def __init__(
        self,
        directory: Path,
        budget: int = 2048,
        num_rows: int = 8,
        num_pages: int = 200,
        num_drafts: int = 0,
        debug: bool = True,
        **cache: str | int | bool,
    ) -> None:
        config = EngineConfig(
            model=directory,
            max_model_len=MAX_MODEL_LEN,
            num_threads=1,
            debug_checks=debug,
            cache=CacheConfig(num_pages=num_pages, **cache),  # type: ignore[arg-type]
            scheduler=SchedulerConfig(num_rows, budget),
            speculative=SpeculativeConfig(num_drafts),
        )
        model_config = ModelConfig.from_directory(directory)
        self.sizes = plan_pools(
            cache_spec(config, model_config), config.cache, config.scheduler, MAX_MODEL_LEN, available_bytes=1 << 32
        )
        self.runner, _ = load_runner(config, model_config, self.sizes)
        self.manager = CacheManager(self.sizes, config.cache, markers=read_chat_markers(directory), debug=debug)
        self.scheduler = Scheduler(config.scheduler, self.manager, MAX_MODEL_LEN, config.speculative)
        self.chunks: dict[int, list[TokenChunk]] = {}
        self.plans: list[StepPlan] = []

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions = RequestOptions(),  # noqa: B008 - frozen
    ) -> int:
        request_id = len(self.chunks)
        self.scheduler.add(Request(request_id, tuple(prompt_ids), params, options=options))
        self.chunks[request_id] = []
        return request_id

    def step(self) -> None:
        plan = self.scheduler.schedule()
        assert plan is not None
        self.plans.append(plan)
        for chunk in self.scheduler.update(plan, self.runner.execute(plan)):
            self.chunks[chunk.request_id].append(chunk)

    def give_up(self) -> None:
        """End the requests of the plan whose step failed, as the engine does."""
        self.scheduler.discard(self.plans[-1])

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
