"""Who waits and who runs: every request alive is in exactly one of the two, and a running one has a row and a holding.

    add -> WAITING --admit: row, pages, slots--> RUNNING --give_back--> gone
              ^------------- requeue ---------------'

Row numbers are handed out lowest first. The runner hears of a row given back with the next plan, unless no plan ever
named it. All operations are O(1) or O(rows), but for finding a place in the queue.
"""

from __future__ import annotations

import heapq

from deltaserve.cache.manager import CacheManager, Hit
from deltaserve.core.plan import Row
from deltaserve.core.request import Request, RequestStatus
from deltaserve.core.types import BLOCK
from deltaserve.scheduler import policy
from deltaserve.scheduler.queue import WaitingQueue
from deltaserve.scheduler.share import LongPrefillShare
from deltaserve.scheduler.step import RunningRequest, StepInProgress


class RequestTable:
    """`running` is in order of admission. Only this class opens and releases what requests hold."""

    def __init__(self, manager: CacheManager, share: LongPrefillShare, num_rows: int) -> None:
        self.waiting = WaitingQueue()
        self.running: dict[int, RunningRequest] = {}
        self.num_preemptions = 0
        self._manager = manager
        self._share = share
        self._num_rows = num_rows
        self._free_rows = list(range(num_rows))  # a heap
        self._retired_rows: list[int] = []

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def add(self, request: Request) -> None:
        """Queue a request. Only one that could be long is looked up, to learn how much of it there is to compute."""
        is_long = self._share.is_long(request.num_known)
        if is_long:
            is_long = self._share.is_long(request.num_known - self._manager.match(request).num_tokens)
        self.waiting.push(request, is_long)

    def admit(self, request: Request, hit: Hit, keep_free: int) -> RunningRequest | None:
        """Give a waiting request a row and what its known tokens need; None, and nothing changed, if refused."""
        holding = self._manager.open(request, hit, request.num_known, keep_free)
        if holding is None:
            return None
        self.waiting.pop(request.id)
        request.status = RequestStatus.RUNNING
        request.num_computed = hit.num_tokens
        request.row = heapq.heappop(self._free_rows)
        if request.num_preemptions == 0:
            request.num_cached = hit.num_tokens
        is_long = self._share.is_long(request.num_known - hit.num_tokens)
        running = RunningRequest(request, request.row, holding, hit.num_tokens, request.num_known, is_long)
        self.running[request.id] = running
        return running

    def holds(self, running: RunningRequest) -> bool:
        """False once it has given way, though its request may be running anew."""
        return self.running.get(running.request.id) is running

    def make_room(self, step: StepInProgress, running: RunningRequest) -> bool:
        """Reserve what the request's known tokens need, at the cost of those behind it; False: it gave way itself."""
        request = running.request
        if not self.holds(running):
            return False
        num_tokens = request.num_known
        while not running.has_room(num_tokens) and self._manager.reserve(request, num_tokens) is None:
            victim = policy.choose_victim([running.request for running in self.running.values()])
            self.requeue(self.running[victim.id], was_sent=not step.drop(victim.id))
            if victim is request:
                return False
        return True

    def requeue(self, running: RunningRequest, was_sent: bool = True) -> None:
        """Back to the head of its priority with nothing but its tokens; the cache keeps what it can of the rest."""
        request = running.request
        num_left = request.num_known - running.holding.boundary
        self.give_back(running, was_sent)
        request.status = RequestStatus.WAITING
        request.num_computed = 0
        request.num_preemptions += 1
        request.prompt_logprobs.clear()
        self.num_preemptions += 1
        self.waiting.push(request, self._share.is_long(num_left))

    def give_back(self, running: RunningRequest, was_sent: bool = True) -> None:
        """Row, pages and slots. The request's status tells the cache whether it will come back."""
        request = running.request
        del self.running[request.id]
        self._manager.release(request, running.is_sound)
        heapq.heappush(self._free_rows, running.row)
        request.row = None
        if was_sent:
            self._retired_rows.append(running.row)

    def take_retired(self) -> tuple[int, ...]:
        retired, self._retired_rows = tuple(self._retired_rows), []
        return retired

    def check(self, planned: dict[int, Row], max_model_len: int) -> None:
        """`planned` are the rows of a plan not yet back."""
        assert self._manager.holders == self.running.keys(), (self._manager.holders, self.running.keys())
        rows = sorted([running.row for running in self.running.values()] + self._free_rows)
        assert rows == list(range(self._num_rows)), f"rows held and free: {rows}"
        for request in self.waiting:
            assert request.status is RequestStatus.WAITING and request.id not in self.running, request
            assert request.row is None and request.num_computed == 0, request
        assert planned.keys() <= self.running.keys(), f"planned {planned.keys()}, running {self.running.keys()}"
        for request_id, running in self.running.items():
            assert running.request.id == request_id, (request_id, running)
            assert running.request.num_known <= max_model_len, running
            _check_running(running, planned.get(request_id))


def _check_running(running: RunningRequest, planned: Row | None) -> None:
    request, holding = running.request, running.holding
    assert request.row == running.row, request
    assert request.status is RequestStatus.RUNNING or planned is not None, request
    end = request.num_computed if planned is None else planned.start + len(planned.token_ids)
    assert running.num_scheduled == min(end, request.num_known), (running, planned)
    assert request.num_computed < request.num_known, request
    assert max(end, running.num_scheduled) <= len(holding.pages) * BLOCK, running
    assert running.num_pages_sent <= len(holding.pages), running
    assert request.num_computed - holding.boundary <= BLOCK, running
    if request.num_computed < running.prefill_end:
        assert request.num_computed == holding.boundary, running
