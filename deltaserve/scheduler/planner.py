"""Fills one step: decode rows, then prompts that run, then prompts that wait, long ones last.

`scheduler.policy` holds the rules, `scheduler.share` the long prompts' account, `scheduler.table` the requests.

Waiting prompts are tried in order until one is refused a row, a page or budget, so that nobody overtakes who could use
what it takes away. Passed over, and overtaken, is only

    a long prompt that its share holds back: short ones behind it may go;
    a prompt of which a running request is about to publish more in the cache: it would compute the same once more.

The first ends with its share's next chunk, for which short ones leave budget and a row, the second when that request
has written, finished or left, and as every running request advances, neither lasts for ever. But a short prompt does
not wait for a long one, whose share would hold both back. A long prompt that could pay for a chunk but found no pages
is not overtaken any more. At most MAX_LOOKS prompts of a list are looked up in a step.
"""

from __future__ import annotations

import enum

from deltaserve.cache.layout import num_pages_for
from deltaserve.cache.manager import CacheManager
from deltaserve.core.config import SchedulerConfig
from deltaserve.core.request import Request
from deltaserve.core.types import BLOCK
from deltaserve.scheduler import policy
from deltaserve.scheduler.queue import Place, place_of
from deltaserve.scheduler.share import LongPrefillShare
from deltaserve.scheduler.speculation import Speculation, num_to_propose, num_to_verify
from deltaserve.scheduler.step import RunningRequest, StepInProgress
from deltaserve.scheduler.table import RequestTable

MAX_LOOKS = 16
FIRST_PLACE: Place = (-(1 << 63), False, 0.0, 0)  # nobody stands before it


class Outcome(enum.Enum):
    ADMITTED = "admitted"
    PASSED = "passed over"
    REFUSED = "refused"  # nobody behind it may go


class StepPlanner:
    """What it remembers from step to step: how long prefill has waited, and who waits for pages."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: CacheManager,
        table: RequestTable,
        share: LongPrefillShare,
        speculation: Speculation,
    ) -> None:
        self._config = config
        self._manager = manager
        self._table = table
        self._share = share
        self._speculation = speculation
        self._num_passed_over = 0
        self._starved_id: int | None = None  # a long prompt that waits for pages
        self._num_published = 0  # snapshots, when long prompts were last looked up

    def fill(self, step: StepInProgress) -> None:
        decoding = [running for running in self._table.running.values() if not running.is_prefilling]
        turn_budget = policy.prefill_turn_budget(step.budget, len(decoding), self._num_passed_over)
        if turn_budget:
            step.floor = step.budget - turn_budget
            self._plan_prefills(step, len(decoding))
        self._plan_decodes(step, decoding, is_prefill_due=not turn_budget)
        if not turn_budget:
            self._plan_prefills(step, len(step.decodes))
        is_passed_over = step.is_short_of_budget and not step.prefills
        self._num_passed_over = self._num_passed_over + 1 if is_passed_over else 0
        step.has_long = self._table.waiting.has_long or any(
            running.is_long and running.is_prefilling for running in self._table.running.values()
        )

    def _plan_decodes(self, step: StepInProgress, decoding: list[RunningRequest], is_prefill_due: bool) -> None:
        chosen = policy.choose_decodes(decoding, step.budget)
        num_spare = step.budget - len(chosen)
        can_admit = self._table.waiting and self._table.num_free_rows
        if is_prefill_due and (can_admit or len(decoding) < len(self._table.running)):
            num_spare -= BLOCK
        for running in chosen:
            num_verified, num_proposed = self._plan_drafts(running, num_spare)
            if self._table.make_room(step, running):
                step.add(running, running.decode_row(num_verified, num_proposed))
                num_spare -= num_verified

    def _plan_drafts(self, running: RunningRequest, num_spare: int) -> tuple[int, int]:
        """How many drafts the row verifies and proposes, their pages reserved; none if the pages are not there."""
        request, wanted = running.request, self._speculation.num_wanted(running.acceptance)
        if not (wanted or running.draft_ids) or not self._table.holds(running):
            return 0, 0
        num_known, num_left = request.num_known, policy.num_tokens_at_most(request) - request.num_known
        num_verified = num_to_verify(num_known, num_left, len(running.draft_ids), num_spare)
        num_proposed = num_to_propose(num_known, num_left, num_verified, wanted)
        num_tokens = num_known + num_verified + num_proposed
        if running.has_room(num_tokens) or self._manager.reserve(request, num_tokens) is not None:
            return num_verified, num_proposed
        return 0, 0

    def _plan_prefills(self, step: StepInProgress, num_decode_rows: int) -> None:
        """Short prompts, which leave what long ones have paid for; long ones; then what these could not use."""
        running = [running for running in self._table.running.values() if running.is_prefilling]
        running.sort(key=lambda running: running.request.options.priority)
        short, long = [one for one in running if not one.is_long], [one for one in running if one.is_long]
        allowance = 0
        if long or self._table.waiting.has_long:
            allowance = self._share.allowance(num_decode_rows)
        step.reserved = min(allowance, step.budget - step.floor)
        step.kept_rows = int(allowance > 0 and not long)
        stopped_at = self._plan_short(step, short)
        step.reserved = step.kept_rows = 0
        step.is_contended = bool(num_decode_rows or step.prefills or step.is_blocked)
        step.long_budget = allowance if step.is_contended else step.budget
        self._plan_long(step, long, None if step.is_blocked else stopped_at)
        if step.is_blocked:
            self._plan_short(step, [one for one in short if one.request.id not in step.prefills])

    def _plan_short(self, step: StepInProgress, running: list[RunningRequest]) -> Place | None:
        """The place in the queue behind which nobody may go any more; None: everybody may."""
        if not self._continue(step, running):
            return FIRST_PLACE
        starved = self._table.waiting.get(self._starved_id) if self._starved_id is not None else None
        limit = place_of(starved) if starved is not None else None
        for request in self._table.waiting.head(is_long=False, limit=MAX_LOOKS):
            if limit is not None and place_of(request) > limit:
                break
            if self._try_to_admit(step, request) is Outcome.REFUSED:
                return place_of(request)
        return limit

    def _plan_long(self, step: StepInProgress, running: list[RunningRequest], stopped_at: Place | None) -> None:
        """Those that run, then those that wait, and among these such as are short by now, their beginning cached.

        Where none may have a chunk, those that wait are only looked up again when something was published.
        """
        if running:
            self._starved_id = None
        if not self._continue(step, running) or not self._table.waiting.has_long:
            return
        num_published = self._manager.stats.snapshots_published
        if step.long_budget < BLOCK and num_published == self._num_published:
            return
        self._num_published = num_published
        for request in self._table.waiting.head(is_long=True, limit=MAX_LOOKS):
            if stopped_at is not None and place_of(request) > stopped_at:
                return
            if self._try_to_admit(step, request) is Outcome.REFUSED:
                return

    def _continue(self, step: StepInProgress, prefilling: list[RunningRequest]) -> bool:
        """The next chunk of each, in order, until one has to wait; False if for want of budget, so that all must."""
        for running in prefilling:
            end = policy.chunk_end(running.num_scheduled, running.prefill_end, step.room(running.is_long))
            if end is None:
                return not step.wait_for_budget(running.is_long)
            if self._table.make_room(step, running):
                self._add_chunk(step, running, end)
        return True

    def _add_chunk(self, step: StepInProgress, running: RunningRequest, end: int) -> None:
        cuts = self._manager.cuts(running.request, running.num_scheduled, end)
        num_proposed = self._plan_drafts(running, 0)[1] if end == running.prefill_end else 0
        step.add(running, running.prefill_row(end, cuts, num_proposed))

    def _try_to_admit(self, step: StepInProgress, request: Request) -> Outcome:
        """Give a waiting request a row, the pages of all its known tokens, and a first chunk."""
        num_free_rows = self._table.num_free_rows
        if num_free_rows <= step.kept_rows:
            step.is_blocked |= num_free_rows > 0
            return Outcome.REFUSED
        hit = self._manager.match(request)
        is_long = self._share.is_long(request.num_known - hit.num_tokens)
        self._table.waiting.move(request, is_long)
        if hit.awaits > hit.num_tokens and (is_long or not self._is_held_back(request, hit.awaits)):
            if self._starved_id == request.id:
                self._starved_id = None
            return Outcome.PASSED
        end = policy.chunk_end(hit.num_tokens, request.num_known, step.room(is_long))
        if end is None:
            return Outcome.REFUSED if step.wait_for_budget(is_long) else Outcome.PASSED
        running = self._table.admit(request, hit, self._pages_to_keep(request))
        if running is None:
            self._starved_id = request.id if is_long else self._starved_id
            return Outcome.REFUSED
        running.acceptance = self._speculation.acceptance_for(request)
        step.admitted[request.id] = running.admission()
        self._add_chunk(step, running, end)
        return Outcome.ADMITTED

    def _is_held_back(self, request: Request, boundary: int) -> bool:
        """Whether long prompts alone are about to publish `boundary` of the request's path."""
        block = slice(boundary // BLOCK - 1, boundary // BLOCK)
        hashes = request.block_hashes[block]
        ahead = [one for one in self._table.running.values() if one.holding.boundary < boundary]
        return all(one.is_long for one in ahead if one.request.block_hashes[block] == hashes)

    def _pages_to_keep(self, request: Request) -> int:
        """Pages that must stay available beside those of the newcomer's known tokens."""
        running = self._table.running.values()
        if not self._config.no_eviction:
            return len(running)
        growth = sum(policy.num_pages_at_most(one.request) - len(one.holding.pages) for one in running)
        return growth + policy.num_pages_at_most(request) - num_pages_for(request.num_known)
