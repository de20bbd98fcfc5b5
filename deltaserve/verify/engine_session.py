"""One engine in this process, driven step by step: arrivals, preemption and a look at the counters between steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from random import Random

from deltaserve.core.errors import DeltaserveError, RequestError
from deltaserve.core.types import RequestOptions, TokenChunk
from deltaserve.engine.loop import Engine
from deltaserve.engine.text import TextDelta, TextStream, Vocabulary
from deltaserve.verify.ask import Answer, Ask
from deltaserve.verify.target import TOGETHER, Counters, Traffic, flatten

STALL_S = 60.0
PREEMPT_CHANCE = 0.5
MOST_PREEMPTIONS = 3


class EngineSession:
    """See verify.target.Session. An engine that dies raises EngineDeadError from `ask`."""

    def __init__(self, engine: Engine, vocabulary: Vocabulary) -> None:
        self.engine = engine
        self._vocabulary = vocabulary

    def ask(self, asks: Sequence[Ask], traffic: Traffic = TOGETHER) -> list[Answer]:
        arrivals = traffic.arrivals or [0] * len(asks)
        waiting = sorted(range(len(asks)), key=lambda index: arrivals[index])
        runs = [_Run(ask, TextStream(self._vocabulary, ask.params)) for ask in asks]
        open_runs: dict[int, _Run] = {}
        step, moved_s = 0, time.monotonic()
        while waiting or open_runs:
            while waiting and arrivals[waiting[0]] <= step:
                self._submit(runs[waiting.pop(0)], open_runs)
            if self._step(open_runs):
                moved_s = time.monotonic()
            _refuse_stall(moved_s, len(open_runs))
            self._disturb(traffic, open_runs)
            step += 1
        return [run.answer() for run in runs]

    def counters(self) -> Counters:
        return flatten(asdict(self.engine.stats()))

    def reset_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def check(self) -> None:
        """Every owner recomputes its books; AssertionError where they differ."""
        self.engine.check()

    def _submit(self, run: _Run, open_runs: dict[int, _Run]) -> None:
        options = RequestOptions(cache_salt=run.ask.salt, use_drafts=run.ask.use_drafts)
        try:
            open_runs[self.engine.submit(run.ask.prompt_ids, run.ask.params, options=options)] = run
        except RequestError as error:
            run.error = str(error)

    def _step(self, open_runs: dict[int, _Run]) -> bool:
        """Whether anything was computed."""
        chunks = self.engine.step()
        for chunk in chunks:
            run = open_runs.get(chunk.request_id)
            if run is not None and run.feed(chunk):
                del open_runs[chunk.request_id]
                self.engine.abort(chunk.request_id)  # a stop string ends it before the engine does
        return not self.engine.is_stalled

    def _disturb(self, traffic: Traffic, open_runs: dict[int, _Run]) -> None:
        if traffic.watch is not None:
            traffic.watch(self.counters())
        if traffic.preempt is not None and traffic.preempt.random() < PREEMPT_CHANCE:
            self._preempt_one(traffic.preempt, open_runs)

    def _preempt_one(self, draw: Random, open_runs: dict[int, _Run]) -> None:
        """Any that runs. Each only so often: one that always comes back to nothing would never end."""
        for request_id in draw.sample(list(open_runs), len(open_runs)):
            run = open_runs[request_id]
            if run.num_preempted < MOST_PREEMPTIONS and self.engine.preempt(request_id):
                run.num_preempted += 1
                return


@dataclass(slots=True)
class _Run:
    ask: Ask
    stream: TextStream
    deltas: list[TextDelta] = field(default_factory=list)
    num_cached: int = 0
    num_prompt_logprobs: int = 0
    num_preempted: int = 0
    error: str | None = None

    def feed(self, chunk: TokenChunk) -> bool:
        """Whether this was the end."""
        delta = self.stream.feed(chunk)
        self.deltas.append(delta)
        self.num_cached = max(self.num_cached, chunk.num_cached)
        self.num_prompt_logprobs = max(self.num_prompt_logprobs, len(chunk.prompt_logprobs or ()))
        self.error = chunk.error or self.error
        return delta.finish_reason is not None

    def answer(self) -> Answer:
        return Answer(
            token_ids=tuple(token_id for delta in self.deltas for token_id in delta.token_ids),
            tops=tuple(entry.top for delta in self.deltas for entry in delta.logprobs or ()),
            text="".join(delta.text for delta in self.deltas),
            finish_reason=str(self.deltas[-1].finish_reason) if self.deltas else "",
            num_cached=self.num_cached,
            num_prompt_logprobs=self.num_prompt_logprobs,
            error=self.error,
        )


def _refuse_stall(moved_s: float, num_open: int) -> None:
    if num_open and time.monotonic() - moved_s > STALL_S:
        raise DeltaserveError(f"the engine has computed nothing for {STALL_S:g} s while {num_open} requests wait")
