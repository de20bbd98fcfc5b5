"""Stand-ins for the expensive parts: a runner without tensors that believes nothing it is told.

`FakeRunner` executes a StepPlan on a model whose recurrent state is a hash of the tokens so far and whose KV is a hash
of token, position and state. It keeps pages, slots and rings as plain numbers and reads only those, as a real runner
does; the next token is a function of the state it read and of all the KV it read. So a stale, foreign or missing page
or slot changes the tokens. Besides, it knows what every number should be and checks the plan against `core.plan`'s
tables before it runs it: any breach is an AssertionError in the step that commits it.

`expected_output` is the same model as a pure function: what a lone, uninterrupted request gives.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from deltaserve.cache.layout import PoolSizes
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

MODULUS = (1 << 61) - 1
POISON = -1  # what nobody has written yet

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


def make_sizes(num_usable_pages: int, num_rows: int, max_model_len: int = 1 << 20) -> PoolSizes:
    """Pools of a tiny model; slots as `plan_pools` makes them."""
    return PoolSizes(
        spec=TINY_SPEC,
        num_pages=1 + num_usable_pages,
        num_slots=1 + 2 * num_rows,
        num_rows=num_rows,
        max_model_len=max_model_len,
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
    """One place of the per-request tables, from admission to retirement."""

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

    @property
    def num_known(self) -> int:
        return len(self.truth.token_ids)


class FakeRunner:
    """Pools of `sizes`; budgets of `config`. `steps` remembers every plan executed."""

    def __init__(self, sizes: PoolSizes, config: SchedulerConfig, vocab_size: int = 97) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._pages = [[POISON] * BLOCK for _ in range(sizes.num_pages)]
        self._slots = [POISON] * sizes.num_slots
        self._slots[EMPTY_SLOT] = 0
        self._num_rows = sizes.num_rows
        self._seats: dict[int, Seat] = {}
        self.steps: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        assert not self.steps or plan.step_id > self.steps[-1].step_id, "steps come in order"
        self.steps.append(plan)
        for place in plan.retired:
            del self._seats[place]
        for admission in plan.admitted:
            self._admit(admission)
        self._check_step(plan)
        for row in plan.rows:
            self._seats[row.row].pages += row.new_pages
        self._check_owners(plan)
        return StepOutput(plan.step_id, tuple(self._run(self._seats[row.row], row) for row in plan.rows))

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
        assert StepPlan.decode(plan.encode()).rows == rows, "the other ranks would see another plan"
        for row in rows:
            self._check_tokens(self._seats[row.row], row)
            self._check_slots(self._seats[row.row], row)

    def _check_tokens(self, seat: Seat, row: Row) -> None:
        end = row.start + len(row.token_ids)
        assert row.request_id == seat.request_id, f"row {row.row} belongs to request {seat.request_id}"
        assert row.start == seat.num_computed < end <= seat.num_known, (row, seat)
        assert list(row.token_ids) == seat.truth.token_ids[row.start : end], (row, seat)
        assert row.page_offset == len(seat.pages), (row, seat)
        assert end <= (len(seat.pages) + len(row.new_pages)) * BLOCK, f"no page for position {end - 1}"
        assert row.is_last == (end == seat.num_known), row
        if row.kind == RowKind.PREFILL:
            assert row.start % BLOCK == 0 and row.num_ring == 0 and not seat.ring, (row, seat)
            assert row.is_last or end % BLOCK == 0, f"chunk ends off the grid: {row}"
        else:
            assert len(row.token_ids) == 1 and row.is_last, row
        wants_prompt = seat.params.prompt_logprobs is not None and seat.num_known == seat.num_prompt
        rest = Logits.LAST if row.is_last else Logits.NONE
        assert row.logits == (Logits.ALL if wants_prompt else rest), row

    def _check_slots(self, seat: Seat, row: Row) -> None:
        assert row.slot_in == seat.live_slot, (row, seat)
        assert row.num_ring == row.start - seat.boundary == len(seat.ring) <= BLOCK, (row, seat)
        assert self._slots[row.slot_in] == seat.truth.states[seat.boundary], f"stale state: {row}"
        if row.kind == RowKind.PREFILL:
            boundary = (row.start + len(row.token_ids)) // BLOCK * BLOCK
            assert [cut.position for cut in row.cuts] == ([boundary] if boundary > row.start else []), row
            assert row.slot_out == (row.cuts[-1].slot if row.cuts else row.slot_in), row
        else:
            assert not row.cuts, row
            assert (row.slot_out != row.slot_in) == (row.num_ring == BLOCK), row

    def _check_owners(self, plan: StepPlan) -> None:
        """Nobody writes what another one holds, and nothing is written that this step also reads."""
        owned = Counter(page for seat in self._seats.values() for page in seat.pages)
        assert DUMMY_PAGE not in owned, "the dummy page is handed out"
        assert all(count == 1 for count in owned.values()), f"pages shared: {owned.most_common(3)}"
        assert all(0 < page < len(self._pages) for page in owned), "page ids outside the pool"
        written = [row.slot_out for row in plan.rows if row.slot_out != row.slot_in]
        live = [seat.live_slot for seat in self._seats.values() if seat.live_slot != EMPTY_SLOT]
        assert len(set(written + live)) == len(written) + len(live), f"slots written {written}, live {live}"
        assert all(0 < slot < len(self._slots) for slot in written), f"slots written {written}"

    def _run(self, seat: Seat, row: Row) -> RowOutput:
        state = self._fold(seat, row)
        states = []
        cuts = {cut.position: cut.slot for cut in row.cuts}
        for position, token_id in enumerate(row.token_ids, row.start):
            state = next_state(state, token_id)
            states.append(state)
            self._pages[seat.pages[position // BLOCK]][position % BLOCK] = kv_entry(position, token_id, state)
            seat.ring.append(token_id)
            if position + 1 in cuts:
                self._move(seat, cuts[position + 1], position + 1, state)
        seat.num_computed = row.start + len(row.token_ids)
        assert state == seat.truth.states[seat.num_computed], f"wrong state: {row}"
        return self._output(seat, row, states)

    def _fold(self, seat: Seat, row: Row) -> int:
        """The state before the row's first token, from slot and ring; a full ring goes to `slot_out`."""
        state = self._slots[row.slot_in]
        for token_id in seat.ring:
            state = next_state(state, token_id)
        if row.num_ring == BLOCK:
            self._move(seat, row.slot_out, row.start, state)
        return state

    def _move(self, seat: Seat, slot: int, boundary: int, state: int) -> None:
        self._slots[slot] = state
        seat.live_slot, seat.boundary, seat.ring = slot, boundary, []

    def _output(self, seat: Seat, row: Row, states: list[int]) -> RowOutput:
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if row.logits == Logits.ALL:
            positions = range(row.start, min(seat.num_computed, seat.num_prompt - 1))
            successors = [seat.truth.token_ids[p + 1] for p in positions]
            prompt_logprobs = tuple(logprob_of(t, s) for t, s in zip(successors, states, strict=False))
        if not row.is_last:
            return RowOutput(row.request_id, prompt_logprobs=prompt_logprobs)
        num_output = seat.num_known - seat.num_prompt
        banned = seat.stop_ids if num_output < seat.params.min_tokens else frozenset()
        token_id = choose_token(states[-1], self._read_kv(seat), banned, self._vocab_size)
        seat.truth.append(token_id)
        logprobs = (logprob_of(token_id, states[-1]),) if seat.params.logprobs is not None else None
        return RowOutput(row.request_id, (token_id,), logprobs, prompt_logprobs)

    def _read_kv(self, seat: Seat) -> int:
        num_full, num_rest = divmod(seat.num_computed, BLOCK)
        total = sum(sum(self._pages[page]) for page in seat.pages[:num_full])
        if num_rest:
            total += sum(self._pages[seat.pages[num_full]][:num_rest])
        assert total == seat.truth.kv_sums[seat.num_computed], f"stale or foreign page: {seat}"
        return total
