"""Rows with drafts: what they may hold, what becomes of them, and that no draft changes a token.

`FakeRunner`'s draft head errs once in four tokens; rejected drafts and the head leave garbage in the pages, which shows
in the tokens of whoever reads it. It checks every row's drafts against its own proposals, boundaries and pages.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from deltaserve.cache.layout import HostSizes
from deltaserve.cache.manager import Holding
from deltaserve.core.config import SpeculativeConfig
from deltaserve.core.plan import Logits, RowKind, StepOutput, StepPlan
from deltaserve.core.request import Request
from deltaserve.core.types import FinishReason, RequestOptions, SamplingParams
from deltaserve.scheduler.policy import PREFILL_PATIENCE
from tests.fakes import FakeRunner, expected_output
from tests.scheduler.harness import VOCAB, Harness, prompt_of


def with_drafts(num_drafts: int, *, is_adaptive: bool = False, **settings: object) -> Harness:
    speculative = SpeculativeConfig(num_drafts, is_adaptive=is_adaptive)
    return Harness(speculative=speculative, **settings)  # type: ignore[arg-type]


class Listener(FakeRunner):
    """Takes the place of a harness's runner and counts the tokens that leave it."""

    def __init__(self, harness: Harness) -> None:
        for name, value in vars(harness.runner).items():
            setattr(self, name, value)
        self.num_given = 0

    def execute(self, plan: StepPlan) -> StepOutput:
        output = super().execute(plan)
        self.num_given += sum(len(row.token_ids) for row in output.rows)
        return output


class Drafter(Listener):
    """Proposes what the one request will say, or always something else."""

    def __init__(self, harness: Harness, truth: tuple[int, ...], is_right: bool) -> None:
        super().__init__(harness)
        self._truth, self._is_right = truth, is_right

    def execute(self, plan: StepPlan) -> StepOutput:
        output = super().execute(plan)
        (row,) = output.rows
        (seat,) = self._seats.values()
        right = self._truth[self.num_given : self.num_given + len(row.draft_ids)]
        seat.draft_ids = right if self._is_right else tuple((token_id + 1) % VOCAB for token_id in right)
        return replace(output, rows=(replace(row, draft_ids=seat.draft_ids),))


def verify_rows(harness: Harness) -> list[int]:
    """Numbers of drafts in all rows that had some."""
    rows = [row for plan in harness.runner.steps for row in plan.rows]
    return [len(row.token_ids) - 1 for row in rows if row.kind == RowKind.VERIFY]


@pytest.mark.parametrize("num_drafts", range(8))
def test_tokens_do_not_depend_on_the_number_of_drafts(num_drafts: int) -> None:
    """Prompts about a block's edge, alone and batched, cold and cached, in small chunks and in a small pool."""
    harness = with_drafts(
        num_drafts, num_pages=14, num_rows=5, budget=100, is_caching=True, num_snapshots=4, host=HostSizes(8, 4)
    )
    for length in (1, 1 + num_drafts, *(64 + rest for rest in range(-1, num_drafts + 3))):
        for salt in (1, 1, 2):
            harness.add(prompt_of(length, salt), SamplingParams(max_tokens=90, logprobs=0))
    harness.run()
    harness.assert_all_finished()
    counts = harness.scheduler.draft_counts
    assert (counts.num_accepted > 100) == (num_drafts > 0)
    assert harness.manager.stats.num_hit > 0
    for chunks in harness.chunks.values():
        for chunk in chunks:
            assert chunk.logprobs is not None
            assert tuple(entry.token_id for entry in chunk.logprobs) == chunk.token_ids


def test_a_prompt_of_one_and_k_tokens_is_a_prefill() -> None:
    harness = with_drafts(3)
    harness.submit(4, 5)
    plan = harness.step()
    assert plan is not None
    (row,) = plan.rows
    assert (row.kind, row.logits, row.num_drafts, len(row.token_ids)) == (RowKind.PREFILL, Logits.LAST, 3, 4)
    plan = harness.step()
    assert plan is not None
    (row,) = plan.rows
    assert (row.kind, row.logits, len(row.token_ids), row.start) == (RowKind.VERIFY, Logits.ALL, 4, 4)
    harness.run()
    harness.assert_all_finished()


def test_only_the_last_chunk_of_a_prompt_proposes() -> None:
    harness = with_drafts(3, budget=64)
    harness.submit(150, 2)
    harness.run()
    prefills = [row for plan in harness.runner.steps for row in plan.rows if row.kind == RowKind.PREFILL]
    assert [(row.is_last, row.num_drafts) for row in prefills] == [(False, 0), (False, 0), (True, 0)]
    harness.submit(150, 40)
    harness.run()
    assert [row.num_drafts for plan in harness.runner.steps for row in plan.rows if row.kind == RowKind.PREFILL][
        -1
    ] == 3
    harness.assert_all_finished()


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_near_the_end_rows_ask_for_what_can_be_said(max_tokens: int) -> None:
    harness = with_drafts(7, num_pages=2, max_model_len=64 + max_tokens)
    harness.submit(64, max_tokens)
    harness.run()
    harness.assert_all_finished()
    assert harness.reason(1) is FinishReason.LENGTH
    for plan in harness.runner.steps:
        for row in plan.rows:
            assert row.start + len(row.token_ids) + row.num_drafts <= 64 + max_tokens - 1 or max_tokens == 1
            assert max_tokens > 2 or row.num_drafts == 0


def test_a_stop_in_the_middle_of_a_step_trims_tokens_and_logprobs() -> None:
    prompt, params = prompt_of(30), SamplingParams(max_tokens=120, logprobs=0)
    free = expected_output(prompt, params, frozenset(), VOCAB)
    num_trimmed = 0
    for stop_id in sorted(set(free)):
        harness = with_drafts(7)
        harness.add(prompt, params, frozenset({stop_id}))
        harness.runner = listener = Listener(harness)
        harness.run()
        harness.assert_all_finished()
        last = harness.chunks[1][-1]
        assert (last.finish_reason, last.stop_token_id, last.token_ids[-1]) == (FinishReason.STOP, stop_id, stop_id)
        assert last.logprobs is not None
        assert len(last.logprobs) == len(last.token_ids)
        num_trimmed += listener.num_given > len(harness.tokens(1))
    assert num_trimmed > 10


def test_what_was_accepted_behind_a_stop_is_not_published() -> None:
    """The client's tokens count, the last of them never computed; a full ring is folded by the next row."""
    prompt, params = prompt_of(40), SamplingParams(max_tokens=200)
    free = expected_output(prompt, params, frozenset(), VOCAB)
    for num_output in range(18, 40):
        if free[num_output - 1] in free[: num_output - 1]:
            continue
        harness = with_drafts(7, is_caching=True, num_snapshots=4)
        harness.add(prompt, params, frozenset({free[num_output - 1]}))
        harness.run()
        said = harness.tokens(1)
        assert len(said) == num_output
        again = harness.add((*prompt, *said, *free[num_output:80]), SamplingParams(max_tokens=1))
        harness.run()
        assert harness.requests[again].num_cached == (40 + num_output - 2) // 64 * 64
        harness.assert_finished(again)


def test_a_request_may_go_without() -> None:
    harness = with_drafts(3, num_rows=2)
    params = SamplingParams(max_tokens=60)
    ids = [harness.add(prompt_of(9), params, options=RequestOptions(use_drafts=use)) for use in (True, False)]
    harness.run()
    harness.assert_all_finished()
    kinds = {
        one: {row.kind for plan in harness.runner.steps for row in plan.rows if row.request_id == one} for one in ids
    }
    assert RowKind.VERIFY in kinds[ids[0]]
    assert kinds[ids[1]] == {RowKind.PREFILL, RowKind.DECODE}
    assert harness.tokens(ids[0]) == harness.tokens(ids[1])
    assert len(harness.chunks[ids[0]]) < 30 < len(harness.chunks[ids[1]]) == 60


@pytest.mark.parametrize("budget", [64, 65, 70, 128])
def test_budget_goes_to_rows_before_drafts_and_to_waiting_prompts_before_drafts(budget: int) -> None:
    harness = with_drafts(3, num_pages=300, num_rows=62, budget=budget)
    for _ in range(60):
        harness.submit(1, 50)
    while any(not request.output_ids for request in harness.requests.values()):
        harness.step()
    plan = harness.step()
    assert plan is not None
    assert len(plan.rows) == 60
    assert plan.num_tokens <= budget
    assert max(verify_rows(harness)[-9:], default=0) > 0
    before = len(harness.runner.steps)
    late = harness.submit(130, 2)
    while not harness.requests[late].output_ids:
        harness.step()
    assert len(harness.runner.steps) - before <= (3 if budget == 128 else 3 * (PREFILL_PATIENCE + 1))
    harness.run()
    harness.assert_all_finished()


def test_no_page_is_taken_from_another_for_a_draft() -> None:
    """Rows that end within their page ask for no other; where a page is wanting, a row goes without drafts."""
    harness = with_drafts(7, num_pages=2, num_rows=2, budget=128)
    first, second = harness.submit(58, 7), harness.submit(58, 7)
    harness.run()
    harness.assert_all_finished()
    assert harness.scheduler.num_preemptions == 0
    assert all(len(row.new_pages) <= 1 for plan in harness.runner.steps for row in plan.rows)
    assert {first, second} == {row.request_id for plan in harness.runner.steps for row in plan.rows}
    harness = with_drafts(3, num_pages=5, num_rows=2, budget=256)
    old, young = harness.submit(60, 29), harness.submit(60, 29)
    harness.step()
    reserve = harness.manager.reserve

    def refuse_drafts(request: Request, num_tokens: int) -> Holding | None:
        return reserve(request, num_tokens) if num_tokens == request.num_known else None

    harness.manager.reserve = refuse_drafts  # type: ignore[method-assign]
    plan = harness.step()
    assert plan is not None
    assert [(row.request_id, row.kind, row.num_drafts) for row in plan.rows] == [
        (old, RowKind.DECODE, 0),
        (young, RowKind.DECODE, 0),
    ]
    harness.manager.reserve = reserve  # type: ignore[method-assign]
    harness.run()
    harness.assert_all_finished()
    assert harness.scheduler.num_preemptions == 0


def test_without_eviction_drafts_need_no_page_that_was_not_counted() -> None:
    harness = with_drafts(7, num_pages=6, num_rows=6, budget=256, no_eviction=True)
    for number in range(30):
        harness.submit(1 + number * 5 % 120, 1 + number * 37 % 190)
    harness.run()
    harness.assert_all_finished()
    assert harness.scheduler.num_preemptions == 0
    assert harness.scheduler.draft_counts.num_accepted > 300


def test_drafts_are_dropped_at_preemption_and_come_again() -> None:
    harness = with_drafts(3, budget=128, is_caching=True, num_snapshots=2)
    request_id = harness.submit(100, 60)
    for _ in range(4):
        harness.step()
    assert harness.scheduler.preempt(request_id)
    plan = harness.step()
    assert plan is not None
    (row,) = plan.rows
    assert (row.kind, row.start, row.num_drafts) == (RowKind.PREFILL, 64, 3)
    assert verify_rows(harness)
    plan = harness.step()
    assert plan is not None
    assert plan.rows[0].kind == RowKind.VERIFY
    harness.run()
    harness.assert_all_finished()


def test_adaptive_drafts_change_no_token_and_follow_what_is_accepted() -> None:
    """A head that is always wrong is soon hardly asked; one that is always right keeps being asked for all."""
    lengths: dict[bool, list[int]] = {}
    for is_right in (True, False):
        harness = with_drafts(7, is_adaptive=True, num_pages=20)
        request_id = harness.submit(10, 400)
        harness.runner = Drafter(harness, harness.lone_output(request_id), is_right)
        harness.run()
        harness.assert_all_finished()
        lengths[is_right] = verify_rows(harness)
    assert sum(lengths[True]) / len(lengths[True]) > 5
    assert len(lengths[True]) < 80
    assert sum(lengths[False]) < 130
    assert max(lengths[False][-5:]) == 1


def test_counts_say_what_rows_held() -> None:
    harness = with_drafts(3, num_pages=30)
    for _ in range(3):
        harness.submit(20, 100)
    harness.run()
    counts, rows = harness.scheduler.draft_counts, verify_rows(harness)
    assert (counts.num_rows, counts.num_verified) == (len(rows), sum(rows))
    assert counts.verified_by_position == [sum(num > position for num in rows) for position in range(3)]
    assert sum(counts.accepted_by_position) == counts.num_accepted
    decodes = [row for plan in harness.runner.steps for row in plan.rows if row.kind != RowKind.PREFILL]
    num_tokens = 3 + len(decodes) + counts.num_accepted  # each row gives a token, each accepted draft one more
    assert num_tokens == 3 * 100


def test_who_waits_for_a_row_takes_no_tokens_from_drafts() -> None:
    harness = with_drafts(3, num_rows=2, budget=64)
    for salt in range(3):
        harness.add(prompt_of(40, salt), SamplingParams(max_tokens=30))
    while harness.scheduler.num_running < 2 or len(harness.chunks[2]) < 3:
        harness.step()
    assert harness.scheduler.num_waiting == 1
    assert verify_rows(harness)
    harness.run()
    harness.assert_all_finished()
