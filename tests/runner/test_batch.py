"""Batches against a plain reading of the plan, token by token, over random histories of requests and rows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from deltaserve.core.plan import DUMMY_PAGE, Cut, Logits, Row, RowKind, StepPlan
from deltaserve.core.types import BLOCK
from deltaserve.model.inputs import CacheTensors
from deltaserve.runner.batch import Batch, BatchBuilder

MAX_PAGES = 12
EMPTY = torch.empty(0, 1)
CACHES = CacheTensors(*(EMPTY,) * 8)


class Story:
    """Requests that come, prefill, decode or verify, and leave; remembers which pages each holds."""

    def __init__(self, seed: int, num_rows: int = 6) -> None:
        self.random = random.Random(seed)
        self.free_rows = list(range(num_rows))
        self.pages: dict[int, list[int]] = {}
        self.rows: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.num_requests = 0
        self.step_id = 0

    def plan(self) -> StepPlan:
        extend = [self.extend(request) for request in self.rows if self.random.random() < 0.7]
        prefill = []
        while self.free_rows and self.random.random() < 0.5:
            prefill.append(self.admit())
        self.random.shuffle(extend)
        self.step_id += 1
        return StepPlan(self.step_id, (*extend, *prefill))

    def admit(self) -> Row:
        self.num_requests += 1
        request = self.num_requests
        self.rows[request] = self.free_rows.pop(self.random.randrange(len(self.free_rows)))
        start = BLOCK * self.random.choice((0, 0, 1, 3))
        count = self.random.choice((1, 5, 63, 64, 65, 130, 200))
        self.pages[request], self.computed[request] = [], start
        cuts = tuple(
            Cut(position, self.random.randrange(1, 99))
            for position in range(start + BLOCK, start + count + 1, BLOCK)
            if self.random.random() < 0.6
        )
        logits = self.random.choice((Logits.ALL, Logits.LAST, Logits.NONE))
        return self.row(request, RowKind.PREFILL, count, 0, cuts, logits)

    def extend(self, request: int) -> Row:
        start = self.computed[request]
        num_ring = start % BLOCK or self.random.choice((0, BLOCK))
        room = BLOCK - num_ring % BLOCK
        count = self.random.choice((1, 1, min(3, room), min(4, room)))
        kind = RowKind.DECODE if count == 1 else RowKind.VERIFY
        return self.row(request, kind, count, num_ring, (), Logits.LAST)

    def row(self, request: int, kind: RowKind, count: int, num_ring: int, cuts: tuple[Cut, ...], logits: Logits) -> Row:
        start, pages = self.computed[request], self.pages[request]
        offset = len(pages)
        while len(pages) * BLOCK < start + count:
            pages.append(self.random.randrange(1, 10_000))
        self.computed[request] = start + count
        slot_in, slot_out = self.random.sample(range(1, 99), 2)
        return Row(
            request_id=request,
            row=self.rows[request],
            kind=kind,
            start=start,
            token_ids=tuple(self.random.randrange(50_000) for _ in range(count)),
            page_offset=offset,
            new_pages=tuple(pages[offset:]),
            slot_in=slot_in,
            slot_out=slot_out,
            num_ring=num_ring,
            cuts=cuts,
            logits=logits,
            is_last=logits != Logits.NONE,
        )

    def leave(self) -> None:
        for request in list(self.rows):
            if self.random.random() < 0.2 or self.computed[request] > (MAX_PAGES - 1) * BLOCK:
                self.free_rows.append(self.rows.pop(request))


@pytest.mark.parametrize("seed", range(30))
def test_batches_say_what_the_plans_say(seed: int) -> None:
    story, builder = Story(seed), BatchBuilder(6, MAX_PAGES, CACHES)
    for _ in range(25):
        plan = story.plan()
        if plan.rows:
            check_batch(builder.build(plan), plan, story)
        story.leave()


def check_batch(batch: Batch, plan: StepPlan, story: Story) -> None:
    extend = [row for row in plan.rows if row.kind != RowKind.PREFILL]
    prefill = [row for row in plan.rows if row.kind == RowKind.PREFILL]
    width = max((len(row.token_ids) for row in extend), default=0)
    firsts = {row.request_id: place * width for place, row in enumerate(extend)}
    num_tokens = len(extend) * width
    for row in prefill:
        firsts[row.request_id] = num_tokens
        num_tokens += len(row.token_ids)
    inputs = batch.inputs
    assert inputs.token_ids_T.shape == inputs.positions_T.shape == inputs.kv_slots_T.shape == (num_tokens,)
    for row in plan.rows:
        check_tokens(batch, row, firsts[row.request_id], story.pages[row.request_id])
    check_extend(batch, extend, width, story)
    check_prefill(batch, prefill, story)
    assert batch.sampled == tuple(row for row in plan.rows if row.is_last)
    ends = {row.request_id: firsts[row.request_id] + len(row.token_ids) for row in plan.rows}
    expected = []
    for row in batch.sampled:
        num_logits = len(row.token_ids) if row.kind == RowKind.VERIFY else 1
        expected += range(ends[row.request_id] - num_logits, ends[row.request_id])
    assert batch.sampled_tokens_N.tolist() == expected
    assert batch.firsts == tuple(firsts[row.request_id] for row in plan.rows)
    scored = [row for row in plan.rows if row.logits == Logits.ALL]
    assert [(s.row, s.first, s.stop) for s in batch.scored] == [
        (row, firsts[row.request_id], firsts[row.request_id] + len(row.token_ids)) for row in scored
    ]


def check_tokens(batch: Batch, row: Row, first: int, pages: list[int]) -> None:
    inputs, tokens = batch.inputs, slice(first, first + len(row.token_ids))
    positions = range(row.start, row.start + len(row.token_ids))
    assert tuple(inputs.token_ids_T[tokens].tolist()) == row.token_ids
    assert inputs.positions_T[tokens].tolist() == list(positions)
    assert inputs.kv_slots_T[tokens].tolist() == [pages[p // BLOCK] * BLOCK + p % BLOCK for p in positions]


def check_extend(batch: Batch, rows: Sequence[Row], width: int, story: Story) -> None:
    extend, inputs = batch.inputs.extend, batch.inputs
    if not rows:
        assert extend is None
        return
    assert extend is not None
    folding = [row for row in rows if row.num_ring == BLOCK]
    assert extend.width == width
    assert extend.rows_R.tolist() == [row.row for row in rows]
    assert extend.slots_R.tolist() == [row.slot_out if row in folding else row.slot_in for row in rows]
    assert extend.starts_R.tolist() == [row.start for row in rows]
    assert extend.num_ring_R.tolist() == [row.num_ring % BLOCK for row in rows]
    assert extend.num_new == tuple(len(row.token_ids) for row in rows)
    assert extend.contexts == tuple(row.start + len(row.token_ids) for row in rows)
    assert extend.fold_rows_F.tolist() == [row.row for row in folding]
    assert extend.fold_in_F.tolist() == [row.slot_in for row in folding]
    assert extend.fold_out_F.tolist() == [row.slot_out for row in folding]
    assert extend.fold_ends == tuple(row.start for row in folding)
    check_page_table(extend.page_table_RP, rows, story)
    for place, row in enumerate(rows):
        padding = slice(place * width + len(row.token_ids), (place + 1) * width)
        count = width - len(row.token_ids)
        end = row.start + len(row.token_ids)
        assert inputs.positions_T[padding].tolist() == list(range(end, end + count))
        assert [slot // BLOCK for slot in inputs.kv_slots_T[padding].tolist()] == [DUMMY_PAGE] * count


def check_prefill(batch: Batch, rows: Sequence[Row], story: Story) -> None:
    prefill = batch.inputs.prefill
    if not rows:
        assert prefill is None
        return
    assert prefill is not None
    assert [b - a for a, b in zip(prefill.offsets, prefill.offsets[1:], strict=False)] == [
        len(row.token_ids) for row in rows
    ]
    assert prefill.starts == tuple(row.start for row in rows)
    assert prefill.rows_R.tolist() == [row.row for row in rows]
    assert prefill.slots_in_R.tolist() == [row.slot_in for row in rows]
    cuts = [(place, cut.position - row.start, cut.slot) for place, row in enumerate(rows) for cut in row.cuts]
    assert list(prefill.cuts) == cuts
    check_page_table(prefill.page_table_RP, rows, story)


def check_page_table(table_RP: torch.Tensor, rows: Sequence[Row], story: Story) -> None:
    """A row's pages, then the dummy page; no wider than the longest row needs."""
    needed = max(-(-(row.start + len(row.token_ids)) // BLOCK) for row in rows)
    expected = [(story.pages[row.request_id] + [DUMMY_PAGE] * needed)[:needed] for row in rows]
    assert table_RP.tolist() == expected


def test_a_verify_row_at_the_end_of_its_last_page_pads_beyond_the_table() -> None:
    """The padding's positions have no page; they must not read past the table."""
    builder = BatchBuilder(2, 1, CACHES)
    rows = [
        Row(place, place, RowKind.VERIFY, start, (7,) * count, 0, (place + 3,), 1, 1, start, (), Logits.LAST, True)
        for place, start, count in ((0, 62, 2), (1, 10, 4))
    ]
    batch = builder.build(StepPlan(0, tuple(rows)))
    assert batch.inputs.positions_T.tolist() == [62, 63, 64, 65, 10, 11, 12, 13]
    assert batch.inputs.kv_slots_T.tolist() == [3 * 64 + 62, 3 * 64 + 63, 0, 1, *range(4 * 64 + 10, 4 * 64 + 14)]


def test_a_prefill_row_off_the_grid_is_our_own_mistake() -> None:
    row = Row(1, 0, RowKind.PREFILL, 7, (1,), 0, (1,), 0, 0, 0, (), Logits.LAST, True)
    with pytest.raises(AssertionError):
        BatchBuilder(1, 2, CACHES).build(StepPlan(0, (row,)))
