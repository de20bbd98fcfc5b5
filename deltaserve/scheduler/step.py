"""A step in the making: what the scheduler knows of each running request, and the rows planned so far.

A running request's tokens fall into ranges, each with one owner:

    0 ............ num_computed ............ num_scheduled ............ num_known
    |  in the cache       |  in a plan not yet back |  next in line           |
    |  (CacheManager)     |  (runner)               |  (scheduler)            |

`num_known` and `num_computed` are the Request's. Below `prefill_end` (the tokens known when the request took its row)
its rows are PREFILL, from there on DECODE. A row planned may be dropped again while the step is in the making: its
request was preempted to make room for another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deltaserve.cache.manager import Holding
from deltaserve.core.plan import Admission, Cut, Logits, Row, RowKind
from deltaserve.core.request import Request
from deltaserve.core.types import BLOCK
from deltaserve.scheduler.policy import cut_position

NO_CUTS: tuple[Cut, ...] = ()


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request with a row. `holding` is the cache manager's and only read here."""

    request: Request
    row: int
    holding: Holding
    num_scheduled: int
    prefill_end: int
    num_pages_sent: int = 0
    ticket: int = -1

    @property
    def is_prefilling(self) -> bool:
        return self.num_scheduled < self.prefill_end

    @property
    def is_in_flight(self) -> bool:
        return self.num_scheduled > self.request.num_computed

    def decode_row(self) -> Row:
        """The last known token; a full ring is folded into the spare slot first."""
        holding, start = self.holding, self.num_scheduled
        num_ring = start - holding.boundary
        if num_ring == BLOCK:
            assert holding.spare_slot is not None
            slot_out = holding.spare_slot
        else:
            slot_out = holding.live_slot
        return self._row(RowKind.DECODE, start + 1, slot_out, num_ring, NO_CUTS, Logits.LAST)

    def prefill_row(self, end: int) -> Row:
        """Known tokens up to `end`; the state at the last boundary goes to the spare slot, later tokens to the ring."""
        holding = self.holding
        assert self.num_scheduled == holding.boundary, (self.num_scheduled, holding)
        slot_out, cuts = holding.live_slot, NO_CUTS
        position = cut_position(self.num_scheduled, end)
        if position is not None:
            assert holding.spare_slot is not None
            slot_out, cuts = holding.spare_slot, (Cut(position, holding.spare_slot),)
        if self.wants_prompt_logprobs:
            logits = Logits.ALL
        else:
            logits = Logits.LAST if end == self.prefill_end else Logits.NONE
        return self._row(RowKind.PREFILL, end, slot_out, 0, cuts, logits)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """They go out with the first output token; a request that has one already reported them."""
        return self.request.params.prompt_logprobs is not None and not self.request.output_ids

    def admission(self) -> Admission:
        request = self.request
        return Admission(
            request_id=request.id,
            row=self.row,
            prompt_ids=request.prompt_ids,
            output_ids=tuple(request.output_ids),
            params=request.params,
            stop_ids=tuple(sorted(request.stop_ids)),
        )

    def _row(self, kind: RowKind, end: int, slot_out: int, num_ring: int, cuts: tuple[Cut, ...], logits: Logits) -> Row:
        request, pages = self.request, self.holding.pages
        return Row(
            request_id=request.id,
            row=self.row,
            kind=kind,
            start=self.num_scheduled,
            token_ids=request.known_ids(self.num_scheduled, end),
            page_offset=self.num_pages_sent,
            new_pages=tuple(pages[self.num_pages_sent :]),
            slot_in=self.holding.live_slot,
            slot_out=slot_out,
            num_ring=num_ring,
            cuts=cuts,
            logits=logits,
            is_last=end == request.num_known,
        )


@dataclass(slots=True)
class StepInProgress:
    """Rows by request id, in the order in which they were planned. `budget` is what tokens are left.

    `next_ticket` numbers rows over all steps, so that the least recently served can be told.
    """

    step_id: int
    budget: int
    next_ticket: int
    decodes: dict[int, Row] = field(default_factory=dict)
    prefills: dict[int, Row] = field(default_factory=dict)
    admitted: dict[int, Admission] = field(default_factory=dict)
    is_prefill_short: bool = False  # the first prefill found too little budget

    def add(self, running: RunningRequest, row: Row) -> None:
        """Plan the row: its tokens and pages count as scheduled and sent."""
        rows = self.prefills if row.kind == RowKind.PREFILL else self.decodes
        rows[row.request_id] = row
        self.budget -= len(row.token_ids)
        running.num_scheduled += len(row.token_ids)
        running.num_pages_sent += len(row.new_pages)
        running.ticket = self.next_ticket
        self.next_ticket += 1

    def drop(self, request_id: int) -> bool:
        """Forget what was planned for a preempted request; whether it was to be admitted in this very step."""
        row = self.decodes.pop(request_id, None) or self.prefills.pop(request_id, None)
        if row is not None:
            self.budget += len(row.token_ids)
        return self.admitted.pop(request_id, None) is not None

    def rows(self) -> tuple[Row, ...]:
        return (*self.decodes.values(), *self.prefills.values())
