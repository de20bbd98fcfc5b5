"""The engine's loop, one step at a time, in whatever process it lives: admit, schedule, execute, update.

    engine.submit(prompt_ids, params)     a wrong request raises RequestError here, and only here
    while engine.has_work:
        for chunk in engine.step(): ...

Failures. What is wrong with a request is found by `submit`, before it can touch another one; the scheduler itself
may end one request with an error chunk. An exception inside a step is different: the pools may hold half of a step,
and on several ranks the others no longer agree, so no request can go on. The engine is then dead: `step` raises
EngineDeadError with the cause, as does every later call, and whoever drives the loop tells the requests. Ctrl-C while
a step runs is milder: on one rank it ends the requests of that step and nothing else. In the moments between, when
the books are half written, it is the end of the engine too.

No torch here: scheduler, cache books and runner are arguments. `engine.build` makes the real ones.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Protocol

from deltaserve.cache.manager import CacheStats
from deltaserve.core.errors import EngineDeadError, OverloadedError, RequestError
from deltaserve.core.events import CacheEvent
from deltaserve.core.plan import StepOutput, StepPlan
from deltaserve.core.request import Request
from deltaserve.core.types import RequestOptions, SamplingParams, TokenChunk
from deltaserve.engine.admission import admit, check_options
from deltaserve.engine.info import EngineInfo, EngineStats, RequestRecord
from deltaserve.grammar.compiler import GrammarError, Grammars
from deltaserve.scheduler.speculation import DraftCounts

NUM_RECORDS = 256


class Runner(Protocol):
    """Obeys plans."""

    def execute(self, plan: StepPlan) -> StepOutput: ...


class Scheduler(Protocol):
    """Decides; see scheduler.scheduler.Scheduler."""

    @property
    def num_preemptions(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def draft_counts(self) -> DraftCounts: ...
    @property
    def long_prefill_s(self) -> tuple[float, float]: ...
    def add(self, request: Request) -> None: ...
    def abort(self, request_id: int) -> bool: ...
    def preempt(self, request_id: int) -> bool: ...
    def schedule(self) -> StepPlan | None: ...
    def update(self, plan: StepPlan, output: StepOutput, elapsed_s: float | None = None) -> list[TokenChunk]: ...
    def discard(self, plan: StepPlan) -> list[int]: ...
    def check(self) -> None: ...


class Cache(Protocol):
    """What is asked of cache.manager.CacheManager between steps."""

    @property
    def stats(self) -> CacheStats: ...
    @property
    def num_free_pages(self) -> int: ...
    @property
    def num_free_slots(self) -> int: ...
    @property
    def num_available_pages(self) -> int: ...
    @property
    def num_available_slots(self) -> int: ...
    def take_events(self) -> tuple[CacheEvent, ...]: ...
    def reset(self) -> None: ...


class Engine:
    """Not thread-safe. `close` is called once; it releases what `on_close` stands for (other ranks).

    `records` says how the latest requests met the prefix cache, oldest first.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: Cache,
        runner: Runner,
        info: EngineInfo,
        *,
        seed: int = 0,
        debug_checks: bool = False,
        on_close: Callable[[], None] | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.info = info
        self.dead_reason: str | None = None
        self.is_stalled = False  # there is work, but the last step could not plan any of it
        self._scheduler = scheduler
        self._cache = cache
        self._runner = runner
        self._debug_checks = debug_checks
        self._is_dropped = False  # the last step was interrupted, and its requests are ended
        self._on_close = on_close
        self._grammars = grammars
        self._seeds = random.Random(seed)
        self.records: deque[RequestRecord] = deque(maxlen=NUM_RECORDS)
        self._num_requests = 0
        self._num_refused = 0
        self._last_id = 0
        self._unreported: dict[int, int] = {}  # prompt lengths of requests without a chunk so far
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_output_tokens = 0
        self._num_computed_tokens = 0
        self._num_steps = 0
        self._steps_s = 0.0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: int | None = None,
        options: RequestOptions = RequestOptions(),  # noqa: B008 - frozen
    ) -> int:
        """Queue a request and return its id, which no request may have had before (None: above all before).

        Raises RequestError (or ContextLengthError) if it cannot be served, OverloadedError if the queue is full; then
        nothing has changed.
        """
        self._refuse_if_dead()
        params = admit(prompt_ids, params, self.info.limits)
        options = check_options(options)
        self._check_grammar(params)
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(63))
        request_id = self._last_id + 1 if request_id is None else request_id
        eos_ids = () if params.ignore_eos else self.info.eos_ids
        request = Request(
            id=request_id,
            prompt_ids=tuple(prompt_ids),
            params=params,
            stop_ids=frozenset((*params.stop_token_ids, *eos_ids)),
            arrival_s=time.monotonic(),
            options=options,
        )
        try:
            self._scheduler.add(request)
        except OverloadedError:
            self._num_refused += 1
            raise
        self._last_id = max(self._last_id, request_id)
        self._num_requests += 1
        self._unreported[request_id] = len(prompt_ids)
        return request_id

    def _check_grammar(self, params: SamplingParams) -> None:
        """Compiles it, so that nothing can fail once the request runs."""
        if params.grammar is None:
            return
        if self._grammars is None:
            raise RequestError("this engine has no tokenizer, which grammars need", "grammar")
        try:
            self._grammars.check(params.grammar.text)
        except GrammarError as error:
            raise RequestError(f"the grammar cannot be used: {error}", "grammar") from None

    def abort(self, request_id: int) -> bool:
        """Stop a request; it gives no further chunk. Whether it was alive."""
        self._unreported.pop(request_id, None)
        return self._scheduler.abort(request_id)

    def preempt(self, request_id: int) -> bool:
        """Make a running request give back what it holds and come again; changes no tokens. Gates and tests use it."""
        return self._scheduler.preempt(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running requests keep what they use."""
        self._refuse_if_dead()
        self._cache.reset()

    def cache_events(self) -> tuple[CacheEvent, ...]:
        """What has happened in the prefix cache since the last call; a gap in the numbers means that some were lost."""
        return self._cache.take_events()

    def step(self) -> list[TokenChunk]:
        """Plan and run one step; the chunks of the requests that got something. Empty if nothing could be planned."""
        self._refuse_if_dead()
        try:
            return self._step()
        except KeyboardInterrupt:
            if not self._is_dropped:
                self.dead_reason = "a step was interrupted where it cannot be taken back"
            raise
        except EngineDeadError as error:
            self.dead_reason = str(error)
            raise
        except Exception as error:
            self.dead_reason = f"a step of the engine failed: {type(error).__name__}: {error}"
            raise EngineDeadError(self.dead_reason) from error

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_free_pages=self._cache.num_free_pages,
            num_pages=self.info.num_pages,
            num_free_slots=self._cache.num_free_slots,
            num_slots=self.info.num_slots,
            num_preemptions=self._scheduler.num_preemptions,
            num_requests=self._num_requests,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            num_computed_tokens=self._num_computed_tokens,
            num_steps=self._num_steps,
            steps_s=self._steps_s,
            num_available_pages=self._cache.num_available_pages,
            num_available_slots=self._cache.num_available_slots,
            num_snapshots=self.info.num_snapshots,
            num_host_pages=self.info.num_host_pages,
            num_host_slots=self.info.num_host_slots,
            num_refused=self._num_refused,
            cache=replace(self._cache.stats),
            long_prefill_s=self._scheduler.long_prefill_s[0],
            contended_s=self._scheduler.long_prefill_s[1],
            drafts=deepcopy(self._scheduler.draft_counts),
        )

    def check(self) -> None:
        """Every owner recomputes its books; AssertionError where they differ."""
        self._scheduler.check()

    def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        self.dead_reason = self.dead_reason or "the engine is closed"
        if on_close is not None:
            on_close()

    def _step(self) -> list[TokenChunk]:
        started_s = time.perf_counter()
        self._is_dropped = False
        plan = self._scheduler.schedule()
        self.is_stalled = plan is None
        if plan is None:
            return []
        try:
            output = self._runner.execute(plan)
        except KeyboardInterrupt:
            self._drop(plan)
            raise
        chunks = self._scheduler.update(plan, output, time.perf_counter() - started_s)
        if self._debug_checks:
            self.check()
        self._num_steps += 1
        self._num_computed_tokens += plan.num_tokens
        self._count(chunks)
        self._steps_s += time.perf_counter() - started_s
        return chunks

    def _drop(self, plan: StepPlan) -> None:
        """End the requests of a plan that was stopped half-way; what they hold is free again, the others go on.

        Nothing that the plan wrote is published. With several ranks nothing is taken back: they no longer agree.
        """
        if self.info.num_ranks > 1:
            return
        for request_id in self._scheduler.discard(plan):
            self._unreported.pop(request_id, None)
        self._is_dropped = True

    def _count(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            self._num_output_tokens += len(chunk.token_ids)
            if (num_prompt := self._unreported.pop(chunk.request_id, None)) is not None:
                self._num_prompt_tokens += num_prompt
                self._num_cached_tokens += chunk.num_cached
            if chunk.cache is not None:
                self.records.append(RequestRecord(chunk.request_id, chunk.cache))

    def _refuse_if_dead(self) -> None:
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
