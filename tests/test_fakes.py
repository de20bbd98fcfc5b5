"""FakeRunner catches what it is there to catch: plans that were right until one thing was changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from deltaserve.core.plan import Cut, Logits, Row, RowKind, StepPlan
from tests.scheduler.harness import Harness


def prepared(num_steps: int) -> tuple[Harness, StepPlan]:
    """Request 1 decodes behind 127 prompt tokens; request 2 is in the middle of a prompt of 300."""
    harness = Harness(num_pages=16, num_rows=3, budget=130)
    harness.submit(127, max_tokens=50)
    harness.step()
    harness.submit(300, max_tokens=50)
    for _ in range(num_steps):
        harness.step()
    plan = harness.scheduler.schedule()
    assert plan is not None
    return harness, plan


def execute_changed(num_steps: int, index: int, change: Callable[[Row], Row]) -> None:
    harness, plan = prepared(num_steps)
    rows = list(plan.rows)
    rows[index] = change(rows[index])
    harness.runner.execute(dataclasses.replace(plan, rows=tuple(rows)))


def changed(**fields: object) -> Callable[[Row], Row]:
    return lambda row: dataclasses.replace(row, **fields)  # type: ignore[arg-type]


# After one step request 1 has a full ring (folds at 128) and request 2 starts its second chunk.
CHANGES: list[tuple[str, int, Callable[[Row], Row]]] = [
    ("foreign slot", 0, changed(slot_in=2)),
    ("empty slot", 1, changed(slot_in=0)),
    ("fold left out", 0, lambda row: dataclasses.replace(row, slot_out=row.slot_in)),
    ("ring length", 0, changed(num_ring=63)),
    ("start", 0, changed(start=127)),
    ("token", 0, lambda row: dataclasses.replace(row, token_ids=(row.token_ids[0] + 1,))),
    ("row", 0, changed(row=1)),
    ("request", 0, changed(request_id=2)),
    ("page left out", 0, changed(new_pages=())),
    ("page of another", 0, changed(new_pages=(4,))),
    ("dummy page", 0, changed(new_pages=(0,))),
    ("page offset", 0, changed(page_offset=1)),
    ("kind", 1, changed(kind=RowKind.DECODE)),
    ("off the grid", 1, lambda row: dataclasses.replace(row, token_ids=row.token_ids[:-1])),
    ("cut left out", 1, lambda row: dataclasses.replace(row, cuts=(), slot_out=row.slot_in)),
    ("cut elsewhere", 1, lambda row: dataclasses.replace(row, cuts=(Cut(192, row.slot_out),))),
    ("cut into a live slot", 1, lambda row: dataclasses.replace(row, cuts=(Cut(256, 1),), slot_out=1)),
    ("last too early", 1, changed(is_last=True)),
    ("last too late", 0, changed(is_last=False)),
    ("spurious logits", 1, changed(logits=Logits.LAST)),
]


def test_the_unchanged_plan_passes_and_is_the_case_meant() -> None:
    harness, plan = prepared(1)
    decode, prefill = plan.rows
    assert (decode.kind, decode.start, decode.num_ring, len(decode.new_pages)) == (RowKind.DECODE, 128, 64, 1)
    assert (prefill.kind, prefill.start, len(prefill.token_ids), prefill.cuts[0].position) == (
        RowKind.PREFILL,
        128,
        128,
        256,
    )
    harness.runner.execute(plan)


@pytest.mark.parametrize(("index", "change"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_any_change_is_caught(index: int, change: Callable[[Row], Row]) -> None:
    with pytest.raises(AssertionError):
        execute_changed(1, index, change)


@pytest.mark.parametrize("corrupt", ["_pages", "_slots"])
def test_overwritten_memory_is_caught(corrupt: str) -> None:
    harness, plan = prepared(1)
    memory = getattr(harness.runner, corrupt)
    if corrupt == "_pages":
        memory[1][5] += 1
    else:
        memory[plan.rows[0].slot_in] += 1
    with pytest.raises(AssertionError, match="stale"):
        harness.runner.execute(plan)


def test_a_row_is_free_only_after_retirement() -> None:
    harness, plan = prepared(1)
    admitted = harness.runner.steps[0].admitted
    with pytest.raises(AssertionError, match="was not given back"):
        harness.runner.execute(dataclasses.replace(plan, admitted=admitted))


def test_budgets_are_checked() -> None:
    harness, plan = prepared(1)
    config = dataclasses.replace(harness.runner._config, max_num_batched_tokens=64)
    harness.runner._config = config
    with pytest.raises(AssertionError, match="over the token budget"):
        harness.runner.execute(plan)
