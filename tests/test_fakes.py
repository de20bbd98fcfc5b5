"""FakeRunner catches what it is there to catch: plans that were right until one thing was changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from deltaserve.cache.layout import HostSizes
from deltaserve.core.config import SpeculativeConfig
from deltaserve.core.plan import BlockOp, Cut, Logits, OpKind, Row, RowKind, StepPlan
from tests.fake_memory import FakeMemory
from tests.fakes import make_sizes
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


def behind_a_hit(change: Callable[[Row], Row] = lambda row: row) -> None:
    """The first row of a request that resumes at 128 of a path another one has left; then a step."""
    harness = Harness(num_pages=16, num_rows=2, budget=512, is_caching=True)
    harness.submit(150, max_tokens=1)
    harness.run()
    request = harness.requests[1]
    harness.add(request.prompt_ids, request.params)
    plan = harness.scheduler.schedule()
    assert plan is not None and plan.rows[0].start == 128
    harness.runner.execute(dataclasses.replace(plan, rows=(change(plan.rows[0]),)))


def test_a_hit_that_is_what_its_tokens_say_passes() -> None:
    behind_a_hit()


HITS: list[tuple[str, Callable[[Row], Row], str]] = [
    ("another slot", changed(slot_in=4), "stale|slot"),
    ("pages swapped", lambda row: dataclasses.replace(row, new_pages=(2, 1, *row.new_pages[2:])), "foreign page"),
    ("a page nobody wrote", lambda row: dataclasses.replace(row, new_pages=(1, 9, *row.new_pages[2:])), "foreign page"),
    ("written over what is shared", lambda row: dataclasses.replace(row, new_pages=(1, 2, 2)), "a page twice"),
    ("the empty slot", changed(slot_in=0), "slot_in=0"),
]


@pytest.mark.parametrize(("change", "match"), [h[1:] for h in HITS], ids=[h[0] for h in HITS])
def test_a_wrong_hit_is_caught(change: Callable[[Row], Row], match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        behind_a_hit(change)


def memory() -> FakeMemory:
    """Page 1 and slot 1 are written, sealed and saved as host blocks 1."""
    memory = FakeMemory(make_sizes(4, 1, host=HostSizes(2, 2)))
    for offset in range(64):
        memory.write_kv(1, offset, 5)
    memory.write_state(1, 6)
    for is_slot in (False, True):
        memory.do(BlockOp(OpKind.SEAL, is_slot, 1), set(), set())
        memory.do(BlockOp(OpKind.SAVE, is_slot, 1, 1), set(), set())
    return memory


@pytest.mark.parametrize("is_slot", [False, True])
def test_what_comes_back_is_what_was_sealed(is_slot: bool) -> None:
    fake = memory()
    fake.do(BlockOp(OpKind.POISON, is_slot, 1), set(), set())
    fake.do(BlockOp(OpKind.RESTORE, is_slot, 1, 2), set(), set())
    fake.do(BlockOp(OpKind.PROVE, is_slot, 2), set(), set())
    if is_slot:
        fake.slots.device[2] = 7
    else:
        fake.pages.device[2] = [7] * 64
    with pytest.raises(AssertionError, match="not what was sealed"):
        fake.do(BlockOp(OpKind.PROVE, is_slot, 2), set(), set())


def test_what_is_published_is_not_written() -> None:
    fake = memory()
    with pytest.raises(AssertionError, match="page 1 is published"):
        fake.write_kv(1, 0, 8)
    with pytest.raises(AssertionError, match="slot 1 is published"):
        fake.write_state(1, 8)
    fake.do(BlockOp(OpKind.POISON, True, 1), set(), set())
    fake.write_state(1, 8)


@pytest.mark.parametrize(
    ("op", "match"),
    [
        (BlockOp(OpKind.POISON, False, 1), "while in use"),
        (BlockOp(OpKind.RESTORE, False, 1, 1), "in use"),
        (BlockOp(OpKind.SEAL, False, 2), "nobody wrote"),
        (BlockOp(OpKind.SAVE, True, 2, 1), "nobody wrote"),
        (BlockOp(OpKind.SAVE, False, 1, 3), "outside the host tier"),
        (BlockOp(OpKind.PROVE, True, 0), "outside the pool"),
    ],
)
def test_orders_that_cannot_be_right(op: BlockOp, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        memory().do(op, {1}, {1})


def test_drafts_are_right_often_and_wrong_often() -> None:
    """And what the wrong ones leave is never read: the tokens are those of a request without drafts."""
    harness = Harness(num_pages=16, num_rows=2, budget=64, speculative=SpeculativeConfig(num_drafts=3))
    harness.submit(100, max_tokens=300)
    harness.run()
    harness.assert_all_finished()
    verified = [row for plan in harness.runner.steps for row in plan.rows if row.kind == RowKind.VERIFY]
    assert 100 < len(verified) < 200
