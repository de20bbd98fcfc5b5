"""A step in the making: what the scheduler knows of each running request, and the rows planned so far.

A running request's tokens fall into ranges, each with one owner:

    0 ............ num_computed ............ num_scheduled ............ num_known ...... + draft_ids
    |  in the cache       |  in a plan not yet back |  next in line           |  guesses of the last row
    |  (CacheManager)     |  (runner)               |  (scheduler)            |  (scheduler)

`num_known` and `num_computed` are the Request's. Below `prefill_end` (the tokens known when the request took its row)
its rows are PREFILL, from there on DECODE, or VERIFY with drafts. A row planned may be dropped again while the step is
in the making: its request was preempted to make room for another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from deltaserve.cache.manager import Holding
from deltaserve.core.plan import Admission, Cut, Logits, Row, RowKind
from deltaserve.core.request import Request
from deltaserve.core.types import BLOCK
from deltaserve.scheduler.share import StepMix
from deltaserve.scheduler.speculation import Acceptance

NO_CUTS: tuple[Cut, ...] = ()


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request with a row. `holding` is the cache manager's and only read here.

    `is_long`: its prefill is held to the long prompts' share. `is_sound` False: what it holds may not be published.
    """

    request: Request
    row: int
    holding: Holding
    num_scheduled: int
    prefill_end: int
    is_long: bool = False
    acceptance: Acceptance | None = None
    draft_ids: tuple[int, ...] = ()
    num_pages_sent: int = 0
    ticket: int = -1
    is_sound: bool = True

    @property
    def is_prefilling(self) -> bool:
        return self.num_scheduled < self.prefill_end

    @property
    def is_in_flight(self) -> bool:
        return self.num_scheduled > self.request.num_computed

    def has_room(self, num_tokens: int) -> bool:
        """Whether it holds all that its first `num_tokens` tokens need, a slot for the next boundary included."""
        holding = self.holding
        return holding.spare_slot is not None and num_tokens <= len(holding.pages) * BLOCK

    def decode_row(self, num_verified: int = 0, num_proposed: int = 0) -> Row:
        """The last known token and `num_verified` drafts; a full ring is folded into the spare slot first."""
        holding, start = self.holding, self.num_scheduled
        num_ring = start - holding.boundary
        slot_out = holding.live_slot
        if num_ring == BLOCK:
            assert holding.spare_slot is not None
            slot_out = holding.spare_slot
        return Row(
            request_id=self.request.id,
            row=self.row,
            kind=RowKind.VERIFY if num_verified else RowKind.DECODE,
            start=start,
            token_ids=self.request.known_ids(start, start + 1) + self.draft_ids[:num_verified],
            page_offset=self.num_pages_sent,
            new_pages=tuple(holding.pages[self.num_pages_sent :]),
            slot_in=holding.live_slot,
            slot_out=slot_out,
            num_ring=num_ring,
            cuts=NO_CUTS,
            logits=Logits.ALL if num_verified else Logits.LAST,
            is_last=True,
            num_drafts=num_proposed,
        )

    def prefill_row(self, end: int, cuts: tuple[Cut, ...], num_proposed: int = 0) -> Row:
        """Known tokens up to `end`; states go to the slots of `cuts`, the last of which is the spare one, the rest to
        the ring."""
        holding, start = self.holding, self.num_scheduled
        assert start == holding.boundary, (start, holding)
        is_last = end == self.prefill_end
        rest = Logits.LAST if is_last else Logits.NONE
        return Row(
            request_id=self.request.id,
            row=self.row,
            kind=RowKind.PREFILL,
            start=start,
            token_ids=self.request.known_ids(start, end),
            page_offset=self.num_pages_sent,
            new_pages=tuple(holding.pages[self.num_pages_sent :]),
            slot_in=holding.live_slot,
            slot_out=cuts[-1].slot if cuts else holding.live_slot,
            num_ring=0,
            cuts=cuts,
            logits=Logits.ALL if self.wants_prompt_logprobs else rest,
            is_last=is_last,
            num_drafts=num_proposed,
        )

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


@dataclass(slots=True)
class StepInProgress:
    """Rows by request id, in the order in which they were planned. `budget` is what tokens are left.

    Of it prefill leaves `floor` to decode rows, long prompts take at most `long_budget`, and short ones leave them
    `reserved` and `kept_rows`. `next_ticket` numbers rows over all steps, so that the least recently served can be
    told.
    """

    step_id: int
    budget: int
    next_ticket: int
    floor: int = 0
    long_budget: int = 0
    reserved: int = 0
    kept_rows: int = 0
    decodes: dict[int, Row] = field(default_factory=dict)
    prefills: dict[int, Row] = field(default_factory=dict)
    admitted: dict[int, Admission] = field(default_factory=dict)
    long_ids: set[int] = field(default_factory=set)
    is_short_of_budget: bool = False  # a prompt did not get the tokens that it could have had in an empty step
    is_blocked: bool = False  # short prompts left what long ones were to have
    is_contended: bool = False  # long prompts shared it with others
    has_long: bool = False  # a long prompt runs or waits

    def room(self, is_long: bool) -> int:
        """Tokens for the next chunk of a prompt."""
        num_left = self.budget - self.floor
        return min(num_left, self.long_budget) if is_long else num_left - self.reserved

    def wait_for_budget(self, is_long: bool) -> bool:
        """A prompt's next chunk does not fit; whether that is for want of the step's budget, not of its share."""
        if is_long and self.long_budget < BLOCK:
            return False
        self.is_short_of_budget = True
        self.is_blocked |= self.reserved > 0
        return True

    def add(self, running: RunningRequest, row: Row) -> None:
        """Plan the row: its known tokens and pages count as scheduled and sent."""
        is_prefill = row.kind == RowKind.PREFILL
        (self.prefills if is_prefill else self.decodes)[row.request_id] = row
        self.budget -= len(row.token_ids)
        if is_prefill and running.is_long:
            self.long_ids.add(row.request_id)
            self.long_budget -= len(row.token_ids)
        running.num_scheduled += len(row.token_ids) if is_prefill else 1
        running.num_pages_sent += len(row.new_pages)
        running.ticket = self.next_ticket
        self.next_ticket += 1

    def drop(self, request_id: int) -> bool:
        """Forget what was planned for a preempted request; whether it was to be admitted in this very step."""
        row = self.decodes.pop(request_id, None) or self.prefills.pop(request_id, None)
        if row is not None:
            self.budget += len(row.token_ids)
        self.long_ids.discard(request_id)
        return self.admitted.pop(request_id, None) is not None

    def rows(self) -> tuple[Row, ...]:
        return (*self.decodes.values(), *self.prefills.values())

    def mix(self) -> StepMix:
        num_long = _num_tokens(self.prefills[request_id] for request_id in self.long_ids)
        return StepMix(
            num_decode_rows=len(self.decodes),
            num_short_tokens=_num_tokens(self.prefills.values()) - num_long,
            num_long_tokens=num_long,
            is_contended=self.is_contended or len(self.decodes) + len(self.prefills) > len(self.long_ids),
            has_long=self.has_long,
        )


def _num_tokens(rows: Iterable[Row]) -> int:
    return sum(len(row.token_ids) for row in rows)
