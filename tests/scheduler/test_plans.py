"""Exact plans of small cases: chunks, pages, slots, cuts and folds, as the tables of `core.plan` want them."""

from __future__ import annotations

import dataclasses

import pytest

from deltaserve.cache.manager import EMPTY_HIT
from deltaserve.core.plan import Cut, Logits, Row, RowKind, StepPlan
from deltaserve.core.request import Request
from deltaserve.core.types import SamplingParams
from deltaserve.scheduler.step import RunningRequest, StepInProgress
from tests.scheduler.harness import Harness, prompt_of

# prompt, budgets -> chunks as (start, end, position of the cut)
Chunk = tuple[int, int, int | None]
CHUNKS: list[tuple[int, tuple[int, ...], list[Chunk]]] = [
    (1, (64, 65, 127, 192), [(0, 1, None)]),
    (63, (64, 65, 127, 192), [(0, 63, None)]),
    (64, (64, 65, 127, 192), [(0, 64, 64)]),
    (65, (64,), [(0, 64, 64), (64, 65, None)]),
    (65, (65, 127, 192), [(0, 65, 64)]),
    (128, (64, 65, 127), [(0, 64, 64), (64, 128, 128)]),
    (128, (192,), [(0, 128, 128)]),
    (130, (64, 65), [(0, 64, 64), (64, 128, 128), (128, 130, None)]),
    (130, (127,), [(0, 64, 64), (64, 130, 128)]),
    (130, (192,), [(0, 130, 128)]),
]
PAGES = {1: (1,), 63: (1,), 64: (1,), 65: (1, 2), 128: (1, 2), 130: (1, 2, 3)}


@pytest.mark.parametrize(
    ("num_prompt", "budget", "chunks"), [(n, budget, chunks) for n, budgets, chunks in CHUNKS for budget in budgets]
)
def test_prefill_rows(num_prompt: int, budget: int, chunks: list[Chunk]) -> None:
    harness = Harness(budget=budget)
    harness.submit(num_prompt, max_tokens=1)
    live_slot = 0
    for index, (start, end, position) in enumerate(chunks):
        plan = harness.step()
        assert plan is not None
        is_last = index == len(chunks) - 1
        spare_slot = 2 if live_slot == 1 else 1
        assert plan.rows == (
            Row(
                request_id=1,
                row=0,
                kind=RowKind.PREFILL,
                start=start,
                token_ids=prompt_of(num_prompt)[start:end],
                page_offset=0 if index == 0 else len(PAGES[num_prompt]),
                new_pages=PAGES[num_prompt] if index == 0 else (),
                slot_in=live_slot,
                slot_out=live_slot if position is None else spare_slot,
                num_ring=0,
                cuts=() if position is None else (Cut(position, spare_slot),),
                logits=Logits.LAST if is_last else Logits.NONE,
                is_last=is_last,
            ),
        )
        assert len(plan.admitted) == (index == 0)
        live_slot = plan.rows[0].slot_out
    assert harness.step() is None
    harness.assert_all_finished()


# prompt, boundary after it, then the decode positions that fold first and those that bring a page
@pytest.mark.parametrize(
    ("num_prompt", "boundary", "folds", "page_positions"),
    [
        (1, 0, [64], [64]),
        (63, 0, [64, 128], [64, 128]),
        (64, 64, [128], [64, 128]),
        (65, 64, [128], [128]),
        (128, 128, [192], [128, 192]),
        (130, 128, [192], [192]),
    ],
)
def test_decode_rows(num_prompt: int, boundary: int, folds: list[int], page_positions: list[int]) -> None:
    harness = Harness(budget=192)
    num_decodes = 100
    harness.submit(num_prompt, max_tokens=1 + num_decodes)
    plan = harness.step()
    assert plan is not None
    live_slot = plan.rows[0].slot_out
    num_pages = len(PAGES[num_prompt])
    for start in range(num_prompt, num_prompt + num_decodes):
        plan = harness.step()
        assert plan is not None
        (row,) = plan.rows
        assert (row.kind, row.start, len(row.token_ids), row.cuts) == (RowKind.DECODE, start, 1, ())
        assert (row.logits, row.is_last) == (Logits.LAST, True)
        assert (row.slot_in, row.num_ring) == (live_slot, start - boundary)
        assert (row.num_ring == 64) == (start in folds)
        assert (row.slot_out != row.slot_in) == (start in folds)
        assert (row.page_offset, row.new_pages) == (num_pages, (num_pages + 1,) if start in page_positions else ())
        num_pages += len(row.new_pages)
        if start in folds:
            live_slot, boundary = row.slot_out, start
    harness.assert_all_finished()


def test_admission_comes_once_with_everything_the_sampler_needs() -> None:
    harness = Harness(budget=64)
    params = SamplingParams(max_tokens=3, temperature=0.5, seed=4)
    harness.add(prompt_of(100), params, frozenset({98, 97}))
    plans = [harness.step() for _ in range(4)]
    first, *rest = [plan for plan in plans if plan is not None]
    (admission,) = first.admitted
    assert (admission.request_id, admission.row) == (1, 0)
    assert (admission.prompt_ids, admission.output_ids) == (prompt_of(100), ())
    assert (admission.params, admission.stop_ids) == (params, (97, 98))
    assert len(rest) == 3
    assert all(not plan.admitted for plan in rest)


def test_rows_are_handed_out_lowest_first_and_reused_after_retirement() -> None:
    harness = Harness(num_rows=3, budget=192)
    for max_tokens in (5, 1, 5, 5):
        harness.submit(10, max_tokens)
    first, second = harness.step(), harness.step()
    assert first is not None
    assert second is not None
    assert [(a.request_id, a.row) for a in first.admitted] == [(1, 0), (2, 1), (3, 2)]
    assert first.retired == ()
    assert second.retired == (1,)
    assert [(a.request_id, a.row) for a in second.admitted] == [(4, 1)]
    harness.run()
    harness.assert_all_finished()


def test_decode_rows_stand_first_and_several_prompts_share_a_step() -> None:
    harness = Harness(num_rows=5, budget=192)
    harness.submit(30, 9)
    harness.step()
    harness.submit(20, 3)
    harness.submit(130, 3)
    harness.submit(50, 3)
    plan = harness.step()
    assert plan is not None
    assert [(row.request_id, row.kind.name, len(row.token_ids)) for row in plan.rows] == [
        (1, "DECODE", 1),
        (2, "PREFILL", 20),
        (3, "PREFILL", 130),
    ]
    plan = harness.step()
    assert plan is not None
    assert [(row.request_id, row.kind.name, len(row.token_ids)) for row in plan.rows] == [
        (1, "DECODE", 1),
        (2, "DECODE", 1),
        (3, "DECODE", 1),
        (4, "PREFILL", 50),
    ]
    harness.run()
    harness.assert_all_finished()


def test_the_last_token_of_a_chunked_prompt_is_a_prefill() -> None:
    harness = Harness(budget=64)
    harness.submit(65, 2)
    plans = [harness.step() for _ in range(3)]
    assert [plan.rows[0].kind.name for plan in plans if plan is not None] == ["PREFILL", "PREFILL", "DECODE"]


def test_nothing_to_do_is_no_plan() -> None:
    assert Harness().step() is None


def test_a_dropped_row_gives_its_tokens_back() -> None:
    harness = Harness(budget=192)
    request = Request(1, prompt_of(100), SamplingParams(max_tokens=1))
    holding = harness.manager.open(request, EMPTY_HIT, 100)
    assert holding is not None
    running = RunningRequest(request, 0, holding, num_scheduled=0, prefill_end=100)
    step = StepInProgress(step_id=0, budget=192, next_ticket=0)
    step.admitted[1] = running.admission()
    step.add(running, running.prefill_row(100, harness.manager.cuts(request, 0, 100)))
    assert (step.budget, len(step.rows())) == (92, 1)
    assert step.drop(1)
    assert (step.budget, step.rows(), step.admitted) == (192, (), {})
    assert not step.drop(1)


def test_a_plan_reaches_the_other_ranks_however_long_the_engine_has_run() -> None:
    """Steps and requests are counted without end; what is sent has 32 bits a number."""
    harness = Harness(budget=192)
    harness.submit(65, max_tokens=3)
    early = harness.step()
    assert early is not None
    rows = tuple(dataclasses.replace(row, request_id=row.request_id + (1 << 40)) for row in early.rows)
    late = StepPlan(early.step_id + (1 << 40), rows)
    assert StepPlan.decode(late.encode()) == StepPlan.decode(early.encode()) == StepPlan(early.step_id, early.rows)
