"""Continuous batching: which tokens of which requests the next step computes.

`schedule` makes a plan, the runner executes it, `update` takes the result; one plan is out at a time. There are no
phases: a request's known tokens run ahead of its computed ones, and every step closes part of the gap
(`scheduler.policy` holds the rules, `scheduler.step` the ranges and who owns them).

    add -> WAITING --admitted: row, pages, slots--> RUNNING --stop, length--> FINISHED
              ^------------- preempted -------------'  (abort and fail: from either)

A preempted request gives everything back, returns to the head of the queue and later computes prompt and accepted
output anew as one known sequence, whose last logits give the next token; nothing is sampled or reported twice.
What a request holds while a plan with it is out is given back only when that plan has come back.

Guaranteed: the token budget and the number of rows are never exceeded; requests are admitted in order of arrival;
a refused reservation makes a request wait or preempts one, and never raises; the oldest request always advances;
a request's tokens do not depend on how its work was divided. Work per step is O(rows + new tokens).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from deltaserve.cache.manager import CacheManager
from deltaserve.core.config import SchedulerConfig
from deltaserve.core.plan import Row, RowOutput, StepOutput, StepPlan
from deltaserve.core.request import Request, RequestStatus
from deltaserve.core.types import BLOCK, FinishReason, TokenChunk
from deltaserve.scheduler import policy
from deltaserve.scheduler.step import RunningRequest, StepInProgress


class Scheduler:
    """Owns every Request from `add` until its last chunk. Not thread-safe."""

    def __init__(self, config: SchedulerConfig, manager: CacheManager, max_model_len: int) -> None:
        self._config = config
        self._manager = manager
        self._max_model_len = max_model_len
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._running: dict[int, RunningRequest] = {}  # in order of admission
        self._free_rows = list(range(config.max_num_seqs))  # a heap
        self._retired_rows: list[int] = []
        self._plan_out: StepPlan | None = None
        self._num_steps = 0
        self._next_ticket = 0
        self._num_passed_over = 0
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        return sum(running.request.status is RequestStatus.RUNNING for running in self._running.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Raises RequestError, naming the field, if it could never run to its end."""
        assert request.id not in self._running and request.id not in self._waiting, request.id
        policy.refuse_impossible(request, self._max_model_len, self._manager.num_usable_pages * BLOCK)
        self._waiting[request.id] = request

    def abort(self, request_id: int) -> bool:
        """Stop a request without another chunk; whether it was alive."""
        return self._stop(request_id)

    def fail(self, request_id: int, message: str) -> TokenChunk | None:
        """Stop a request with an error, a sentence for the client; None if it was not alive."""
        if not self._stop(request_id):
            return None
        return TokenChunk(request_id, finish_reason=FinishReason.ERROR, error=message)

    def preempt(self, request_id: int) -> bool:
        """Push a running request back to the head of the queue, as a missing page would; whether it was running."""
        assert self._plan_out is None, "update() with the plan that is out comes first"
        running = self._running.get(request_id)
        if running is None:
            return False
        self._requeue(running)
        return True

    def schedule(self) -> StepPlan | None:
        """The next step, or None if no request can advance now (nothing to do, or a reservation was refused)."""
        assert self._plan_out is None, "update() with the plan that is out comes first"
        step = StepInProgress(self._num_steps, self._config.max_num_batched_tokens, self._next_ticket)
        decoding = [running for running in self._running.values() if not running.is_prefilling]
        turn_budget = policy.prefill_turn_budget(step.budget, len(decoding), self._num_passed_over)
        if turn_budget:
            self._plan_prefills(step, turn_budget)
        self._plan_decodes(step, decoding)
        if not turn_budget:
            self._plan_prefills(step, step.budget)
        self._num_passed_over = self._num_passed_over + 1 if step.is_prefill_short else 0
        self._next_ticket = step.next_ticket
        return self._send(step)

    def update(self, plan: StepPlan, output: StepOutput) -> list[TokenChunk]:
        """Advance the requests of a plan that has come back; what each of them has to tell, in row order."""
        assert plan is self._plan_out and output.step_id == plan.step_id, (plan.step_id, output.step_id)
        self._plan_out = None
        chunks = []
        for row, row_output in zip(plan.rows, output.rows, strict=True):
            assert row.request_id == row_output.request_id, (row, row_output)
            running = self._running[row.request_id]
            if running.request.status is RequestStatus.FINISHED:
                self._give_back(running)
                continue
            self._advance(running, row)
            chunk = self._accept(running, row, row_output)
            if chunk is not None:
                chunks.append(chunk)
                if chunk.finish_reason is not None:
                    running.request.status = RequestStatus.FINISHED
                    self._give_back(running)
        return chunks

    def check(self) -> None:
        """Recompute the books of scheduler and cache; AssertionError where they differ. Any time between calls."""
        self._manager.check()
        assert self._manager.holders == self._running.keys(), (self._manager.holders, self._running.keys())
        rows = sorted([running.row for running in self._running.values()] + self._free_rows)
        assert rows == list(range(self._config.max_num_seqs)), f"rows held and free: {rows}"
        for request_id, request in self._waiting.items():
            assert request.id == request_id and request.status is RequestStatus.WAITING, request
            assert request.row is None and request.num_computed == 0, request
        planned = {row.request_id: row for row in self._plan_out.rows} if self._plan_out is not None else {}
        assert planned.keys() <= self._running.keys(), f"planned {planned.keys()}, running {self._running.keys()}"
        for request_id, running in self._running.items():
            self._check_running(request_id, running, planned.get(request_id))

    def _check_running(self, request_id: int, running: RunningRequest, planned: Row | None) -> None:
        request, holding = running.request, running.holding
        num_planned = len(planned.token_ids) if planned is not None else 0
        assert request.id == request_id and request.row == running.row, request
        assert request.status is RequestStatus.RUNNING or planned is not None, request
        assert running.num_scheduled == request.num_computed + num_planned <= request.num_known, running
        assert request.num_computed < request.num_known <= self._max_model_len, request
        assert running.num_scheduled <= len(holding.pages) * BLOCK, running
        assert running.num_pages_sent <= len(holding.pages), running
        assert request.num_computed - holding.boundary <= BLOCK, running
        if request.num_computed < running.prefill_end:
            assert request.num_computed == holding.boundary, running

    def _plan_decodes(self, step: StepInProgress, decoding: list[RunningRequest]) -> None:
        for running in policy.choose_decodes(decoding, step.budget):
            if self._make_room(step, running):
                step.add(running, running.decode_row())

    def _plan_prefills(self, step: StepInProgress, budget: int) -> None:
        """First come, first served, until one has to wait: those with a row, then the queue."""
        floor = step.budget - budget
        for running in [running for running in self._running.values() if running.is_prefilling]:
            end = policy.chunk_end(running.num_scheduled, running.prefill_end, step.budget - floor)
            if end is None:
                step.is_prefill_short = not step.prefills
                return
            if self._make_room(step, running):
                step.add(running, running.prefill_row(end))
        while self._waiting and self._free_rows and self._admit(step, step.budget - floor):
            pass

    def _admit(self, step: StepInProgress, budget: int) -> bool:
        """Give the head of the queue a row, the pages of all its known tokens, and a first chunk; or it waits."""
        request = next(iter(self._waiting.values()))
        hit = self._manager.match(request)
        end = policy.chunk_end(hit.num_tokens, request.num_known, budget)
        if end is None:
            step.is_prefill_short = not step.prefills
            return False
        holding = self._manager.reserve(request.id, request.num_known, hit, keep_free=len(self._running))
        if holding is None:
            return False
        del self._waiting[request.id]
        request.status = RequestStatus.RUNNING
        request.num_computed = hit.num_tokens
        request.row = heapq.heappop(self._free_rows)
        if request.num_preemptions == 0:
            request.num_cached = hit.num_tokens
        running = RunningRequest(request, request.row, holding, hit.num_tokens, request.num_known)
        self._running[request.id] = running
        step.admitted[request.id] = running.admission()
        step.add(running, running.prefill_row(end))
        return True

    def _make_room(self, step: StepInProgress, running: RunningRequest) -> bool:
        """Reserve what the request's known tokens need, at the cost of later arrivals; False: it gave way itself."""
        request = running.request
        if request.status is RequestStatus.WAITING:
            return False
        while self._manager.reserve(request.id, request.num_known) is None:
            victim = policy.choose_victim([running.request for running in self._running.values()])
            self._requeue(self._running[victim.id], was_sent=not step.drop(victim.id))
            if victim is request:
                return False
        return True

    def _requeue(self, running: RunningRequest, was_sent: bool = True) -> None:
        """Back to the head of the queue with nothing but its tokens."""
        request = running.request
        self._give_back(running, was_sent)
        request.status = RequestStatus.WAITING
        request.num_computed = 0
        request.num_preemptions += 1
        request.prompt_logprobs.clear()
        self.num_preemptions += 1
        self._waiting[request.id] = request
        self._waiting.move_to_end(request.id, last=False)

    def _send(self, step: StepInProgress) -> StepPlan | None:
        rows = step.rows()
        if not rows:
            return None
        retired, self._retired_rows = tuple(self._retired_rows), []
        self._plan_out = StepPlan(step.step_id, rows, tuple(step.admitted.values()), retired)
        self._num_steps += 1
        return self._plan_out

    def _advance(self, running: RunningRequest, row: Row) -> None:
        """The row's tokens are computed, and a slot it wrote holds the state at its boundary."""
        running.request.num_computed = row.start + len(row.token_ids)
        if row.slot_out != row.slot_in:
            self._manager.commit(row.request_id, row.cuts[-1].position if row.cuts else row.start)

    def _accept(self, running: RunningRequest, row: Row, output: RowOutput) -> TokenChunk | None:
        """Take the row's new token and see whether it ends the request; None if the row stops short of known tokens.

        A row that failed ends its request.
        """
        request = running.request
        if output.error is not None:
            return TokenChunk(request.id, finish_reason=FinishReason.ERROR, error=output.error)
        wants_prompt_logprobs = running.wants_prompt_logprobs
        if wants_prompt_logprobs:
            request.prompt_logprobs += (None, *output.prompt_logprobs) if row.start == 0 else output.prompt_logprobs
        if not row.is_last:
            return None
        (token_id,) = output.token_ids
        request.output_ids.append(token_id)
        reason = policy.finish_reason(request, self._max_model_len)
        return TokenChunk(
            request_id=request.id,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            prompt_logprobs=tuple(request.prompt_logprobs) if wants_prompt_logprobs else None,
            finish_reason=reason,
            stop_token_id=token_id if reason is FinishReason.STOP else None,
            num_cached=request.num_cached,
        )

    def _stop(self, request_id: int) -> bool:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            waiting.status = RequestStatus.FINISHED
            return True
        running = self._running.get(request_id)
        if running is None or running.request.status is RequestStatus.FINISHED:
            return False
        running.request.status = RequestStatus.FINISHED
        if not running.is_in_flight:
            self._give_back(running)
        return True

    def _give_back(self, running: RunningRequest, was_sent: bool = True) -> None:
        """Row, pages and slots. The runner hears of the row unless no plan ever named it."""
        request = running.request
        del self._running[request.id]
        self._manager.release(request.id)
        heapq.heappush(self._free_rows, running.row)
        request.row = None
        if was_sent:
            self._retired_rows.append(running.row)
