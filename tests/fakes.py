"""Stand-ins for the expensive parts: a runner without tensors that believes nothing it is told.

`FakeRunner` executes a StepPlan on a model whose recurrent state is a hash of the tokens so far and whose KV is a hash
of token, position and state. It keeps pages, slots and rings as plain numbers and reads only those, as a real runner
does; the next token is a function of the state it read and of all the KV it read. So a stale, foreign or missing page
or slot changes the tokens. Besides, it knows what every number should be and checks the plan against `core.plan`'s
tables before it runs it: any breach is an AssertionError in the step that commits it. A request that starts behind a
hit must find, in the pages and the slot it is given, what its own tokens would have written; nobody may write what
another one uses.

Its draft head knows the model and errs once in four tokens; what rejected drafts and the head itself leave in the pages
is garbage, which whoever reads it finds in his tokens.

`expected_output` is the same model as a pure function: what a lone, uninterrupted request gives.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from deltaserve.cache.layout import NO_HOST, HostSizes, PoolSizes
from deltaserve.core.config import CacheSpec, SchedulerConfig
from deltaserve.core.plan import (
    DUMMY_PAGE,
    EMPTY_SLOT,
    Admission,
    Logits,
    Row,
    RowKind,
    RowOutput,
    StepOutput,
    StepPlan,
)
from deltaserve.core.types import BLOCK, SamplingParams, TokenLogprob
from tests.fake_memory import FakeMemory

MODULUS = (1 << 61) - 1
GARBAGE = -2  # what a rejected draft has left

TINY_SPEC = CacheSpec(
    num_attention_layers=1,
    num_draft_layers=0,
    num_kv_heads=1,
    head_dim=8,
    num_gdn_layers=3,
    num_key_heads=1,
    num_value_heads=2,
    key_head_dim=8,
    value_head_dim=4,
    conv_width=4,
    hidden_size=16,
    kv_dtype="float32",
    state_dtype="float32",
    compute_dtype="float32",
)


def make_sizes(
    num_usable_pages: int,
    num_rows: int,
    max_model_len: int = 1 << 20,
    num_snapshots: int = 0,
    host: HostSizes = NO_HOST,
) -> PoolSizes:
    """Pools of a tiny model; slots as `plan_pools` makes them."""
    return PoolSizes(
        spec=TINY_SPEC,
        num_pages=1 + num_usable_pages,
        num_slots=1 + 2 * num_rows + num_snapshots,
        num_rows=num_rows,
        max_model_len=max_model_len,
        num_snapshots=num_snapshots,
        host=host,
    )


def next_state(state: int, token_id: int) -> int:
    return (state * 1_000_003 + token_id + 1) % MODULUS


def kv_entry(position: int, token_id: int, state: int) -> int:
    """`state` is the one after this token."""
    return (state * 31 + position * 7_919 + token_id) % MODULUS


def choose_token(state: int, kv_sum: int, banned: frozenset[int], vocab_size: int) -> int:
    token_id = (state * 48_271 + kv_sum) % MODULUS % vocab_size
    while token_id in banned:
        token_id = (token_id + 1) % vocab_size
    return token_id


def logprob_of(token_id: int, state: int) -> TokenLogprob:
    """What the model says of `token_id` after `state`."""
    return TokenLogprob(token_id, logprob=-((state + token_id) % 9_973) / 100, rank=1 + state % 7)


@dataclass(slots=True)
class Truth:
    """The model along one sequence: states[p] and kv_sums[p] after the first p tokens."""

    token_ids: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=lambda: [0])
    kv_sums: list[int] = field(default_factory=lambda: [0])

    def append(self, token_id: int) -> None:
        state = next_state(self.states[-1], token_id)
        self.kv_sums.append(self.kv_sums[-1] + kv_entry(len(self.token_ids), token_id, state))
        self.token_ids.append(token_id)
        self.states.append(state)

    @classmethod
    def of(cls, token_ids: tuple[int, ...]) -> Truth:
        truth = cls()
        for token_id in token_ids:
            truth.append(token_id)
        return truth


def expected_output(
    prompt_ids: tuple[int, ...], params: SamplingParams, stop_ids: frozenset[int], vocab_size: int
) -> tuple[int, ...]:
    """The tokens of this request alone, from the definition."""
    assert params.max_tokens is not None
    truth = Truth.of(prompt_ids)
    for num_output in range(params.max_tokens):
        banned = stop_ids if num_output < params.min_tokens else frozenset()
        truth.append(choose_token(truth.states[-1], truth.kv_sums[-1], banned, vocab_size))
        if truth.token_ids[-1] in stop_ids:
            break
    return tuple(truth.token_ids[len(prompt_ids) :])


def expected_prompt_logprobs(prompt_ids: tuple[int, ...]) -> tuple[TokenLogprob | None, ...]:
    truth = Truth.of(prompt_ids)
    rest = [logprob_of(prompt_ids[p], truth.states[p]) for p in range(1, len(prompt_ids))]
    return (None, *rest)


@dataclass(slots=True)
class Seat:
    """One place of the per-request tables, from admission to retirement. `draft_ids` are its last row's proposals."""

    request_id: int
    params: SamplingParams
    stop_ids: frozenset[int]
    num_prompt: int
    truth: Truth
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    live_slot: int = EMPTY_SLOT
    boundary: int = 0
    ring: list[int] = field(default_factory=list)
    draft_ids: tuple[int, ...] = ()
    has_started: bool = False

    @property
    def num_known(self) -> int:
        return len(self.truth.token_ids)


class FakeRunner:
    """Pools of `sizes`; budgets of `config`. `steps` remembers every plan executed."""

    def __init__(self, sizes: PoolSizes, config: SchedulerConfig, vocab_size: int = 97) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self.memory = FakeMemory(sizes)
        self._pages = self.memory.pages.device
        self._slots = self.memory.slots.device
        self._num_rows = sizes.num_rows
        self._seats: dict[int, Seat] = {}
        self.steps: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        assert not self.steps or plan.step_id > self.steps[-1].step_id, "steps come in order"
        self.steps.append(plan)
        for place in plan.retired:
            del self._seats[place]
        self._do_ops(plan)
        for admission in plan.admitted:
            self._admit(admission)
        self._check_step(plan)
        for row in plan.rows:
            self._seats[row.row].pages += row.new_pages
        self._check_owners(plan)
        return StepOutput(plan.step_id, tuple(self._run(self._seats[row.row], row) for row in plan.rows))

    def _do_ops(self, plan: StepPlan) -> None:
        pages = {page for seat in self._seats.values() for page in seat.pages}
        slots = {seat.live_slot for seat in self._seats.values()}
        for op in plan.block_ops:
            self.memory.do(op, pages, slots)

    def _admit(self, admission: Admission) -> None:
        assert 0 <= admission.row < self._num_rows, admission
        assert admission.row not in self._seats, f"row {admission.row} was not given back"
        truth = Truth.of(admission.prompt_ids + admission.output_ids)
        stop_ids, num_prompt = frozenset(admission.stop_ids), len(admission.prompt_ids)
        self._seats[admission.row] = Seat(admission.request_id, admission.params, stop_ids, num_prompt, truth)

    def _check_step(self, plan: StepPlan) -> None:
        rows = plan.rows
        assert rows, "an empty step"
        assert len(rows) <= self._config.max_num_seqs
        assert plan.num_tokens <= self._config.max_num_batched_tokens, "over the token budget"
        assert len({row.row for row in rows}) == len(rows), "a row twice in one step"
        assert sorted(rows, key=lambda row: row.kind == RowKind.PREFILL) == list(rows), "decode rows come first"
        assert {admission.row for admission in plan.admitted} <= {row.row for row in rows}, "admitted without a row"
        decoded = StepPlan.decode(plan.encode())
        assert (decoded.rows, decoded.block_ops) == (rows, plan.block_ops), "the other ranks would see another plan"
        for row in rows:
            seat = self._seats[row.row]
            if not seat.has_started:
                self._start(seat, row)
            self._check_tokens(seat, row)
            self._check_slots(seat, row)

    def _start(self, seat: Seat, row: Row) -> None:
        """The first row of an admission says what hit it starts from: pages and slot hold what its tokens are."""
        assert row.kind == RowKind.PREFILL and row.start % BLOCK == 0 and row.page_offset == 0, row
        assert (row.slot_in == EMPTY_SLOT) == (row.start == 0), row
        assert row.start // BLOCK <= len(row.new_pages), row
        seat.has_started = True
        seat.num_computed = seat.boundary = row.start
        seat.live_slot = row.slot_in
        for position in range(row.start):
            entry = self._pages[row.new_pages[position // BLOCK]][position % BLOCK]
            expected = kv_entry(position, seat.truth.token_ids[position], seat.truth.states[position + 1])
            assert entry == expected, f"stale or foreign page in a hit, position {position}: {row}"

    def _check_tokens(self, seat: Seat, row: Row) -> None:
        num_verified = len(row.token_ids) - 1 if row.kind == RowKind.VERIFY else 0
        end = row.start + len(row.token_ids) - num_verified
        assert row.request_id == seat.request_id, f"row {row.row} belongs to request {seat.request_id}"
        assert row.start == seat.num_computed < end <= seat.num_known, (row, seat)
        assert list(row.token_ids[: end - row.start]) == seat.truth.token_ids[row.start : end], (row, seat)
        assert row.page_offset == len(seat.pages), (row, seat)
        last = end + num_verified + row.num_drafts
        assert last <= (len(seat.pages) + len(row.new_pages)) * BLOCK, f"no page for position {last - 1}"
        assert row.is_last == (end == seat.num_known), row
        assert row.is_last or not row.num_drafts, f"drafts in the middle of a prompt: {row}"
        if row.kind == RowKind.PREFILL:
            assert row.start % BLOCK == 0 and row.num_ring == 0 and not seat.ring, (row, seat)
            assert row.is_last or end % BLOCK == 0, f"chunk ends off the grid: {row}"
        else:
            assert end == row.start + 1 and row.is_last, row
        if row.kind == RowKind.VERIFY:
            drafts = row.token_ids[1:]
            assert drafts and drafts == seat.draft_ids[:num_verified], f"drafts {drafts}, not of {seat.draft_ids}"
            assert row.start % BLOCK + num_verified < BLOCK, f"drafts behind a boundary: {row}"
            assert row.logits == Logits.ALL, row
            return
        wants_prompt = seat.params.prompt_logprobs is not None and seat.num_known == seat.num_prompt
        rest = Logits.LAST if row.is_last else Logits.NONE
        assert row.logits == (Logits.ALL if wants_prompt else rest), row

    def _check_slots(self, seat: Seat, row: Row) -> None:
        assert row.slot_in == seat.live_slot, (row, seat)
        assert row.num_ring == row.start - seat.boundary == len(seat.ring) <= BLOCK, (row, seat)
        assert self._slots[row.slot_in] == seat.truth.states[seat.boundary], f"stale state: {row}"
        if row.kind == RowKind.PREFILL:
            end = row.start + len(row.token_ids)
            boundary = end // BLOCK * BLOCK
            positions = [cut.position for cut in row.cuts]
            assert positions == sorted(set(positions)), row
            assert all(row.start < position <= end and position % BLOCK == 0 for position in positions), row
            assert positions[-1:] == ([boundary] if boundary > row.start else []), row
            assert row.slot_out == (row.cuts[-1].slot if row.cuts else row.slot_in), row
        else:
            assert not row.cuts, row
            assert (row.slot_out != row.slot_in) == (row.num_ring == BLOCK), row

    def _check_owners(self, plan: StepPlan) -> None:
        """Nobody writes what another one holds, and nothing is written that this step also reads."""
        used = Counter(page for seat in self._seats.values() for page in seat.pages)
        assert DUMMY_PAGE not in used, "the dummy page is handed out"
        assert all(0 < page < len(self._pages) for page in used), "page ids outside the pool"
        for row in plan.rows:
            seat = self._seats[row.row]
            written_pages = seat.pages[row.start // BLOCK :]
            assert len(set(seat.pages)) == len(seat.pages), f"a page twice: {seat}"
            assert all(used[page] == 1 for page in written_pages), f"written, but in another's use too: {row}"
        written = [slot for row in plan.rows for slot in _slots_written(row)]
        live = {seat.live_slot for seat in self._seats.values()}
        assert len(set(written)) == len(written) and not live & set(written), f"slots written {written}, live {live}"
        assert all(0 < slot < len(self._slots) for slot in written), f"slots written {written}"

    def _run(self, seat: Seat, row: Row) -> RowOutput:
        if row.kind == RowKind.VERIFY:
            return self._verify(seat, row)
        state, states = self._fold(seat, row), []
        cuts = {cut.position: cut.slot for cut in row.cuts}
        for position, token_id in enumerate(row.token_ids, row.start):
            state = self._compute(seat, position, token_id, state)
            states.append(state)
            if position + 1 in cuts:
                self._move(seat, cuts[position + 1], position + 1, state)
        seat.num_computed = row.start + len(row.token_ids)
        assert state == seat.truth.states[seat.num_computed], f"wrong state: {row}"
        return self._output(seat, row, states)

    def _verify(self, seat: Seat, row: Row) -> RowOutput:
        """Token after token, as long as the drafts are what the model says; the rest of them leave garbage."""
        state = self._fold(seat, row)
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        for position, token_id in enumerate(row.token_ids, row.start):
            if token_ids and token_id != token_ids[-1]:
                for rejected in range(position, row.start + len(row.token_ids)):
                    self._write_garbage(seat, rejected)
                break
            state = self._compute(seat, position, token_id, state)
            seat.num_computed = position + 1
            token_ids.append(self._sample(seat, state))
            logprobs.append(logprob_of(token_ids[-1], state))
        drafts = self._propose(seat, row.num_drafts)
        asked = tuple(logprobs) if seat.params.logprobs is not None else None
        return RowOutput(row.request_id, tuple(token_ids), asked, draft_ids=drafts)

    def _compute(self, seat: Seat, position: int, token_id: int, state: int) -> int:
        """One token through the model: its KV, its ring entry, and the state after it."""
        state = next_state(state, token_id)
        page = seat.pages[position // BLOCK]
        self.memory.write_kv(page, position % BLOCK, kv_entry(position, token_id, state))
        seat.ring.append(token_id)
        return state

    def _write_garbage(self, seat: Seat, position: int) -> None:
        self.memory.write_kv(seat.pages[position // BLOCK], position % BLOCK, GARBAGE)

    def _fold(self, seat: Seat, row: Row) -> int:
        """The state before the row's first token, from slot and ring; a full ring goes to `slot_out`."""
        state = self._slots[row.slot_in]
        for token_id in seat.ring:
            state = next_state(state, token_id)
        if row.num_ring == BLOCK:
            self._move(seat, row.slot_out, row.start, state)
        return state

    def _move(self, seat: Seat, slot: int, boundary: int, state: int) -> None:
        self.memory.write_state(slot, state)
        seat.live_slot, seat.boundary, seat.ring = slot, boundary, []

    def _output(self, seat: Seat, row: Row, states: list[int]) -> RowOutput:
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if row.logits == Logits.ALL:
            positions = range(row.start, min(seat.num_computed, seat.num_prompt - 1))
            successors = [seat.truth.token_ids[p + 1] for p in positions]
            prompt_logprobs = tuple(logprob_of(t, s) for t, s in zip(successors, states, strict=False))
        if not row.is_last:
            return RowOutput(row.request_id, prompt_logprobs=prompt_logprobs)
        token_id = self._sample(seat, states[-1])
        logprobs = (logprob_of(token_id, states[-1]),) if seat.params.logprobs is not None else None
        drafts = self._propose(seat, row.num_drafts)
        return RowOutput(row.request_id, (token_id,), logprobs, prompt_logprobs, draft_ids=drafts)

    def _sample(self, seat: Seat, state: int) -> int:
        """The next token, which is known from now on."""
        num_output = seat.num_known - seat.num_prompt
        banned = seat.stop_ids if num_output < seat.params.min_tokens else frozenset()
        token_id = choose_token(state, self._read_kv(seat), banned, self._vocab_size)
        seat.truth.append(token_id)
        return token_id

    def _propose(self, seat: Seat, num_drafts: int) -> tuple[int, ...]:
        """What the model would say next, but for one token in four. The head leaves garbage where it went ahead."""
        ahead = Truth(seat.truth.token_ids[-1:], seat.truth.states[-1:], seat.truth.kv_sums[-1:])
        drafts: list[int] = []
        for number in range(num_drafts):
            self._write_garbage(seat, seat.num_computed + number)
            state = ahead.states[-1]
            token_id = choose_token(state, ahead.kv_sums[-1], frozenset(), self._vocab_size)
            drafts.append((token_id + (state % 4 == 0)) % self._vocab_size)
            ahead.states.append(next_state(state, drafts[-1]))
            entry = kv_entry(seat.num_known + number, drafts[-1], ahead.states[-1])
            ahead.kv_sums.append(ahead.kv_sums[-1] + entry)
        seat.draft_ids = tuple(drafts)
        return seat.draft_ids

    def _read_kv(self, seat: Seat) -> int:
        num_full, num_rest = divmod(seat.num_computed, BLOCK)
        total = sum(sum(self._pages[page]) for page in seat.pages[:num_full])
        if num_rest:
            total += sum(self._pages[seat.pages[num_full]][:num_rest])
        assert total == seat.truth.kv_sums[seat.num_computed], f"stale or foreign page: {seat}"
        return total


def _slots_written(row: Row) -> list[int]:
    if row.cuts:
        return [cut.slot for cut in row.cuts]
    return [row.slot_out] if row.slot_out != row.slot_in else []
