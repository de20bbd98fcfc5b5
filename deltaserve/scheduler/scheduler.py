"""Continuous batching: which tokens of which requests the next step computes.

`schedule` makes a plan, the runner executes it, `update` takes the result; one plan is out at a time. There are no
phases: a request's known tokens run ahead of its computed ones, and every step closes part of the gap.

    scheduler.policy       the rules, as pure functions          scheduler.queue   who waits, in order
    scheduler.share        what long prompts may take            scheduler.table   who runs, and what for
    scheduler.speculation  how many drafts                       scheduler.step    ranges of tokens, rows planned
    scheduler.planner      fills a step

A preempted request gives everything back, which the cache keeps as far as it can, returns to the head of its priority
and later computes what the cache lost of prompt and accepted output as one known sequence, whose last logits give the
next token; nothing is sampled or reported twice. Its drafts are dropped. What a request holds while a plan with it is
out is given back only when that plan has come back.

Guaranteed: the token budget and the number of rows are never exceeded; requests are admitted in order of priority and
arrival, but for the exceptions that `scheduler.planner` names; a refused reservation makes a request wait or preempts
one, and never raises; the oldest request of the lowest priority number always advances; a request's tokens do not
depend on how its work was divided, on hits or on drafts. Work per step is O(rows + new tokens) and a few look-ups.
"""

from __future__ import annotations

from deltaserve.cache.manager import CacheManager
from deltaserve.core.config import SchedulerConfig, SpeculativeConfig
from deltaserve.core.plan import Row, RowKind, RowOutput, StepOutput, StepPlan
from deltaserve.core.request import Request, RequestStatus
from deltaserve.core.types import BLOCK, FinishReason, TokenChunk
from deltaserve.scheduler import policy
from deltaserve.scheduler.planner import StepPlanner
from deltaserve.scheduler.share import LongPrefillShare, StepMix
from deltaserve.scheduler.speculation import DraftCounts, Speculation
from deltaserve.scheduler.step import RunningRequest, StepInProgress
from deltaserve.scheduler.table import RequestTable

NO_DRAFTS = SpeculativeConfig()
NOTHING = StepMix(num_decode_rows=0, num_short_tokens=0, num_long_tokens=0, is_contended=False, has_long=False)


class Scheduler:
    """Owns every Request from `add` until its last chunk. Not thread-safe."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: CacheManager,
        max_model_len: int,
        speculative: SpeculativeConfig = NO_DRAFTS,
    ) -> None:
        self._config = config
        self._manager = manager
        self._max_model_len = max_model_len
        self._speculation = Speculation(speculative)
        self._share = LongPrefillShare(
            config.long_prefill_share, config.long_prefill_min_tokens, config.max_num_batched_tokens
        )
        self._table = RequestTable(manager, self._share, config.max_num_seqs)
        self._planner = StepPlanner(config, manager, self._table, self._share, self._speculation)
        self._plan_out: StepPlan | None = None
        self._mix_out = NOTHING
        self._num_steps = 0
        self._next_ticket = 0

    @property
    def num_running(self) -> int:
        return sum(running.request.status is RequestStatus.RUNNING for running in self._table.running.values())

    @property
    def num_waiting(self) -> int:
        return len(self._table.waiting)

    @property
    def num_preemptions(self) -> int:
        return self._table.num_preemptions

    @property
    def has_work(self) -> bool:
        return bool(self._table.running or self._table.waiting)

    @property
    def draft_counts(self) -> DraftCounts:
        """Of all drafts that came back. Read only."""
        return self._speculation.counts

    @property
    def long_prefill_s(self) -> tuple[float, float]:
        """Seconds that long prompts took beside others, and of all steps that they shared or had to wait for."""
        return self._share.long_s, self._share.contended_s

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises RequestError, naming the field, if it could never run to its end, and OverloadedError if too many wait.
        """
        assert request.id not in self._table.running and request.id not in self._table.waiting, request.id
        policy.refuse_impossible(request, self._max_model_len, self._manager.num_usable_pages * BLOCK)
        policy.refuse_overload(self._table.waiting.num_new, self._table.num_free_rows, self._config.max_queued)
        self._table.add(request)

    def abort(self, request_id: int) -> bool:
        """Stop a request without another chunk; whether it was alive."""
        return self._stop(request_id, is_sound=True)

    def fail(self, request_id: int, message: str) -> TokenChunk | None:
        """Stop a request with an error, a sentence for the client; None if it was not alive. Nothing of it is kept."""
        if not self._stop(request_id, is_sound=False):
            return None
        return TokenChunk(request_id, finish_reason=FinishReason.ERROR, error=message)

    def preempt(self, request_id: int) -> bool:
        """Push a running request back to the head of the queue, as a missing page would; whether it was running."""
        assert self._plan_out is None, "update() with the plan that is out comes first"
        running = self._table.running.get(request_id)
        if running is None:
            return False
        self._table.requeue(running)
        return True

    def schedule(self) -> StepPlan | None:
        """The next step, or None if no request can advance now (nothing to do, or a reservation was refused)."""
        assert self._plan_out is None, "update() with the plan that is out comes first"
        step = StepInProgress(self._num_steps, self._config.max_num_batched_tokens, self._next_ticket)
        self._planner.fill(step)
        self._next_ticket = step.next_ticket
        rows = step.rows()
        if not rows:
            return None
        self._plan_out = StepPlan(
            step_id=step.step_id,
            rows=rows,
            admitted=tuple(step.admitted.values()),
            retired=self._table.take_retired(),
            block_ops=self._manager.take_block_ops(),
        )
        self._mix_out = step.mix()
        self._num_steps += 1
        return self._plan_out

    def update(self, plan: StepPlan, output: StepOutput, elapsed_s: float | None = None) -> list[TokenChunk]:
        """Advance the requests of a plan that has come back; what each of them has to tell, in row order.

        `elapsed_s` is what the step took, from the start of `schedule`; without it long prompts are not held back.
        """
        assert output.step_id == plan.step_id, (plan.step_id, output.step_id)
        self._take_back(plan)
        self._share.record(self._mix_out, elapsed_s)
        chunks = []
        for row, row_output in zip(plan.rows, output.rows, strict=True):
            assert row.request_id == row_output.request_id, (row, row_output)
            running = self._table.running[row.request_id]
            if running.request.status is RequestStatus.FINISHED:
                self._table.give_back(running)
            elif (chunk := self._accept(running, row, row_output)) is not None:
                chunks.append(chunk)
        return chunks

    def discard(self, plan: StepPlan) -> list[int]:
        """End the requests of a plan that was stopped half-way, without a chunk; the ids of those that were alive.

        Nothing they hold is published. If the plan was to move blocks between the tiers, nobody knows which did move:
        then the whole cache is forgotten.
        """
        self._take_back(plan)
        if plan.block_ops:
            self._manager.reset()
        ended = []
        for row in plan.rows:
            running = self._table.running[row.request_id]
            if running.request.status is RequestStatus.RUNNING:
                ended.append(row.request_id)
            running.is_sound = False
            self._finish(running)
        return ended

    def check(self) -> None:
        """Recompute the books of scheduler and cache; AssertionError where they differ. Any time between calls."""
        self._manager.check()
        planned = {row.request_id: row for row in self._plan_out.rows} if self._plan_out is not None else {}
        self._table.check(planned, self._max_model_len)

    def _take_back(self, plan: StepPlan) -> None:
        assert plan is self._plan_out, plan.step_id
        self._plan_out = None

    def _accept(self, running: RunningRequest, row: Row, output: RowOutput) -> TokenChunk | None:
        """Take what a row gave and see whether it ends the request; None if the row stops short of known tokens.

        A row that failed ends its request, and nothing it wrote counts.
        """
        request = running.request
        if output.error is not None:
            running.is_sound = False
            self._finish(running)
            return TokenChunk(request.id, finish_reason=FinishReason.ERROR, error=output.error)
        wants_prompt_logprobs = running.wants_prompt_logprobs
        if wants_prompt_logprobs:
            request.prompt_logprobs += (None, *output.prompt_logprobs) if row.start == 0 else output.prompt_logprobs
        if not row.is_last:
            self._advance(running, row, row.start + len(row.token_ids))
            return None
        is_first = not request.output_ids
        token_ids, reason = self._take_tokens(running, row, output)
        if reason is not None:
            self._finish(running)
        return TokenChunk(
            request_id=request.id,
            token_ids=token_ids,
            logprobs=None if output.logprobs is None else output.logprobs[: len(token_ids)],
            prompt_logprobs=tuple(request.prompt_logprobs) if wants_prompt_logprobs else None,
            finish_reason=reason,
            stop_token_id=token_ids[-1] if reason is FinishReason.STOP else None,
            num_cached=request.num_cached,
            cache=request.cache_record if is_first else None,
        )

    def _take_tokens(
        self, running: RunningRequest, row: Row, output: RowOutput
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """The row's tokens up to the one that ends the request, and the drafts for its next row."""
        num_verified = len(row.token_ids) - 1 if row.kind == RowKind.VERIFY else 0
        assert 1 <= len(output.token_ids) <= 1 + num_verified, (row, output)
        assert len(output.draft_ids) <= row.num_drafts, (row, output)
        if row.kind != RowKind.PREFILL:
            self._speculation.record(running.acceptance, num_verified, len(output.token_ids) - 1)
        token_ids, reason = policy.take_output(running.request, output.token_ids, self._max_model_len)
        running.draft_ids = output.draft_ids
        self._advance(running, row, running.request.num_known - 1)
        return token_ids, reason

    def _advance(self, running: RunningRequest, row: Row, num_computed: int) -> None:
        """Tokens before `num_computed` are computed and accepted; if the row wrote a slot, it holds a state."""
        running.request.num_computed = running.num_scheduled = num_computed
        if row.slot_out != row.slot_in:
            self._manager.commit(running.request, row.cuts[-1].position if row.cuts else row.start)

    def _finish(self, running: RunningRequest) -> None:
        running.request.status = RequestStatus.FINISHED
        self._table.give_back(running)

    def _stop(self, request_id: int, is_sound: bool) -> bool:
        waiting = self._table.waiting.pop(request_id)
        if waiting is not None:
            waiting.status = RequestStatus.FINISHED
            self._manager.forget(waiting)
            return True
        running = self._table.running.get(request_id)
        if running is None or running.request.status is RequestStatus.FINISHED:
            return False
        running.is_sound = is_sound
        running.request.status = RequestStatus.FINISHED
        if not running.is_in_flight:
            self._table.give_back(running)
        return True
