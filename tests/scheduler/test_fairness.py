"""Who gets what when there is not enough: priorities, the queue's limit, no eviction, long prompts' share."""

from __future__ import annotations

import itertools
import random

import pytest

from deltaserve.core.errors import OverloadedError
from deltaserve.core.plan import RowKind, StepPlan
from tests.scheduler.harness import Harness


def admitted(harness: Harness) -> list[int]:
    return [admission.request_id for plan in harness.runner.steps for admission in plan.admitted]


# Priorities


def test_lower_priority_numbers_go_first_and_equal_ones_by_arrival() -> None:
    harness = Harness(num_rows=1)
    for priority in (2, 0, 1, 0, -3, 2):
        harness.submit(10, max_tokens=2, priority=priority)
    harness.run()
    assert admitted(harness) == [5, 2, 4, 3, 1, 6]
    harness.assert_all_finished()


def test_the_least_urgent_gives_way_whenever_it_came() -> None:
    harness = Harness(num_pages=5, num_rows=2, budget=64)
    low, high = harness.submit(60, max_tokens=150, priority=1), harness.submit(60, max_tokens=150)
    harness.run()
    assert harness.requests[low].num_preemptions > 0
    assert harness.requests[high].num_preemptions == 0
    harness.assert_all_finished()


def test_a_preempted_request_waits_at_the_head_of_its_priority() -> None:
    harness = Harness(num_rows=2, budget=256)
    first, second = harness.submit(10, max_tokens=20), harness.submit(10, max_tokens=20)
    harness.step()
    urgent, third = harness.submit(10, max_tokens=20, priority=-1), harness.submit(10, max_tokens=20)
    assert harness.scheduler.preempt(first)
    assert harness.scheduler.preempt(second)
    harness.run()
    assert admitted(harness) == [first, second, urgent, first, second, third]
    harness.assert_all_finished()


def test_chunks_of_running_prompts_follow_priority() -> None:
    harness = Harness(budget=128)
    low, high = harness.submit(300, max_tokens=2, priority=1), harness.submit(300, max_tokens=2)
    harness.run()
    first = {
        request_id: next(i for i, plan in enumerate(harness.runner.steps) if ends(plan, request_id))
        for request_id in (low, high)
    }
    assert first[high] < first[low]
    harness.assert_all_finished()


def ends(plan: StepPlan, request_id: int) -> bool:
    return any(row.request_id == request_id and row.is_last for row in plan.rows)


# The queue's limit


def test_too_many_waiting_are_refused_with_the_number() -> None:
    harness = Harness(num_rows=2, max_queued=3)
    for _ in range(5):
        harness.submit(10, max_tokens=9)
    with pytest.raises(OverloadedError, match=r"3 requests wait .* at most 3 may \(--max-queued-requests\)"):
        harness.submit(10, max_tokens=9)
    assert harness.scheduler.num_waiting == 5
    harness.step()
    with pytest.raises(OverloadedError, match="3 requests wait"):
        harness.submit(10, max_tokens=9)
    harness.abort(5)
    harness.submit(10, max_tokens=9)
    harness.run()
    harness.assert_all_finished(but={5})


def test_preempted_ones_do_not_count_as_queued() -> None:
    harness = Harness(num_rows=2, max_queued=1)
    first = harness.submit(10, max_tokens=9)
    harness.submit(10, max_tokens=9)
    harness.step()
    harness.submit(10, max_tokens=9)
    harness.scheduler.preempt(first)
    assert harness.scheduler.num_waiting == 2
    harness.submit(10, max_tokens=9)  # a row is free for the one that waits
    with pytest.raises(OverloadedError):
        harness.submit(10, max_tokens=9)
    harness.run()
    harness.assert_all_finished()


def test_no_queue_at_all_still_takes_what_has_a_row() -> None:
    harness = Harness(num_rows=2, max_queued=0)
    harness.submit(10, max_tokens=9)
    harness.submit(10, max_tokens=9)
    with pytest.raises(OverloadedError):
        harness.submit(10, max_tokens=9)
    harness.run()
    harness.assert_all_finished()


# Without eviction


@pytest.mark.parametrize("seed", range(3))
def test_without_eviction_nobody_is_preempted(seed: int) -> None:
    rng = random.Random(seed)
    harness = Harness(num_pages=20, num_rows=6, budget=128, no_eviction=True)
    most = 0
    for _ in range(1_500):
        if harness.scheduler.num_waiting < 3 and rng.random() < 0.1:
            num_prompt = rng.randint(1, 400)
            harness.submit(num_prompt, rng.randint(1, 200))
        harness.step()
        most = max(most, harness.scheduler.num_running)
    harness.run()
    assert harness.scheduler.num_preemptions == 0
    assert most > 2
    harness.assert_all_finished()


def test_without_eviction_admission_is_as_tight_as_it_can_be() -> None:
    """Two that need 2 pages each at their end fit 4 pages, and 3 pages do not hold them at once."""
    for num_pages, expected in ((4, 2), (3, 1)):
        harness = Harness(num_pages=num_pages, num_rows=4, budget=256, no_eviction=True)
        harness.submit(10, max_tokens=119)
        harness.submit(128, max_tokens=1)
        harness.step()
        assert len(admitted(harness)) == expected
        harness.run()
        harness.assert_all_finished()
    harness = Harness(num_pages=3, num_rows=4, budget=256)
    harness.submit(10, max_tokens=119)
    harness.submit(64, max_tokens=1)
    harness.step()
    assert len(admitted(harness)) == 2, "with eviction their ends are not looked at"


# Long prompts' share

STEP_S, ROW_S, TOKEN_S = 0.004, 0.001, 1e-4


def clock(plan: StepPlan) -> float:
    """A step of 8 decode rows takes 12 ms, a token of a prompt 0.1 ms."""
    num_decodes = sum(row.kind != RowKind.PREFILL for row in plan.rows)
    num_prefill = plan.num_tokens - sum(len(row.token_ids) for row in plan.rows if row.kind != RowKind.PREFILL)
    return STEP_S + ROW_S * num_decodes + TOKEN_S * num_prefill


class Timed:
    """A harness whose time passes by `clock`; `now_s` after each step, `plans` beside it."""

    def __init__(self, share: float = 0.5, num_pages: int = 2_000, num_rows: int = 16) -> None:
        self.now_s = 0.0
        self.times: list[tuple[float, StepPlan]] = []
        self.harness = Harness(
            num_pages,
            num_rows,
            budget=2_048,
            clock=self._pass,
            long_prefill_share=share,
            long_prefill_min_tokens=1_000,
        )

    def _pass(self, plan: StepPlan) -> float:
        elapsed_s = clock(plan)
        self.now_s += elapsed_s
        self.times.append((self.now_s, plan))
        return elapsed_s

    def decode(self, num_rows: int, max_tokens: int = 30_000) -> list[int]:
        """So many streams that decode for as long as the test lasts."""
        ids = [self.harness.submit(5, max_tokens) for _ in range(num_rows)]
        for _ in range(10):
            self.harness.step()
        return ids

    def run_until_first_token(self, *request_ids: int) -> float:
        """Seconds until all of them have a token."""
        start_s = self.now_s
        while not all(self.harness.requests[request_id].output_ids for request_id in request_ids):
            assert self.harness.step() is not None
        return self.now_s - start_s

    def num_output(self, ids: list[int]) -> int:
        return sum(len(self.harness.requests[request_id].output_ids) for request_id in ids)

    def longest_gap_s(self, since_s: float) -> float:
        times = [now_s for now_s, plan in self.times if any(row.kind == RowKind.DECODE for row in plan.rows)]
        return max(b - a for a, b in itertools.pairwise(times) if b > since_s)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_s3_f15_streams_keep_their_part_while_a_long_prompt_prefills(share: float) -> None:
    """Row S3-F15: without a share, eight streams get one token per chunk of 2048."""
    timed = Timed(share)
    streams = timed.decode(8)
    start_s, before = timed.now_s, timed.num_output(streams)
    took_s = timed.run_until_first_token(timed.harness.submit(16_384, max_tokens=2))
    speed = (timed.num_output(streams) - before) / took_s / 8
    alone = 1 / (STEP_S + 8 * ROW_S)
    assert speed >= (1 - share) * alone * 0.98
    assert took_s <= 16_384 * TOKEN_S / share * 1.1
    assert timed.longest_gap_s(start_s) <= 5.5 * (STEP_S + 8 * ROW_S)
    unlimited = Timed(1.0)
    streams = unlimited.decode(8)
    before = unlimited.num_output(streams)
    took_s = unlimited.run_until_first_token(unlimited.harness.submit(16_384, max_tokens=2))
    assert (unlimited.num_output(streams) - before) / took_s / 8 < 0.08 * alone


def test_a_long_prompt_alone_takes_whole_steps() -> None:
    timed = Timed()
    timed.decode(1)
    timed.harness.abort(1)
    long = timed.harness.submit(16_384, max_tokens=2)
    assert timed.run_until_first_token(long) == pytest.approx(8 * STEP_S + 16_384 * TOKEN_S)


def test_short_prompts_overtake_a_long_one_and_answer_soon() -> None:
    timed = Timed()
    streams = timed.decode(8)
    long = timed.harness.submit(32_768, max_tokens=2)
    waits_s = []
    while not timed.harness.requests[long].output_ids:
        waits_s.append(timed.run_until_first_token(timed.harness.submit(200, max_tokens=3)))
        for _ in range(10):
            timed.harness.step()
    assert len(waits_s) > 10
    assert max(waits_s) < 0.2
    assert timed.num_output(streams) > 0


def test_many_long_prompts_share_one_share_and_all_come_to_their_end() -> None:
    timed = Timed()
    streams = timed.decode(8)
    before, start_s = timed.num_output(streams), timed.now_s
    long = [timed.harness.submit(4_096, max_tokens=2) for _ in range(10)]
    short = timed.harness.submit(100, max_tokens=2)
    assert timed.run_until_first_token(short) < 0.2, "ten long prompts ahead in the queue, and rows for them"
    timed.run_until_first_token(*long)
    took_s = timed.now_s - start_s
    assert took_s <= 10 * 4_096 * TOKEN_S / 0.5 * 1.15
    assert (timed.num_output(streams) - before) / took_s / 8 >= 0.48 / (STEP_S + 8 * ROW_S)
    firsts = [next(i for i, (_, plan) in enumerate(timed.times) if ends(plan, request_id)) for request_id in long]
    assert firsts == sorted(firsts)


def test_a_long_prompt_gets_its_share_of_a_stream_of_short_ones() -> None:
    timed = Timed(num_rows=4)
    timed.decode(1)
    timed.harness.abort(1)
    long = timed.harness.submit(16_384, max_tokens=2)
    start_s = timed.now_s
    while not timed.harness.requests[long].output_ids:
        while timed.harness.scheduler.num_waiting < 4:
            timed.harness.submit(900, max_tokens=1)
        timed.harness.step()
    assert timed.now_s - start_s <= 16_384 * TOKEN_S / 0.5 * 1.3


def test_a_row_is_left_for_a_long_prompt_that_has_paid() -> None:
    """Short prompts that would take every row in every step."""
    timed = Timed(num_rows=2)
    for _ in range(4):
        timed.harness.submit(100, max_tokens=1)
    long = timed.harness.submit(4_096, max_tokens=1)
    start_s = timed.now_s
    while not timed.harness.requests[long].output_ids:
        while timed.harness.scheduler.num_waiting < 5:
            timed.harness.submit(100, max_tokens=1)
        timed.harness.step()
    assert timed.now_s - start_s <= 4_096 * TOKEN_S / 0.5 * 1.5


def test_a_long_prompt_that_waits_for_pages_is_not_overtaken_for_ever() -> None:
    timed = Timed(num_pages=40, num_rows=4)
    timed.decode(1, max_tokens=5)
    short = [timed.harness.submit(600, max_tokens=60) for _ in range(3)]
    timed.harness.step()
    long = timed.harness.submit(2_000, max_tokens=2)
    for _ in range(400):
        while timed.harness.scheduler.num_waiting < 4:
            short.append(timed.harness.submit(600, max_tokens=60))
        timed.harness.step()
        if timed.harness.requests[long].output_ids:
            break
    assert timed.harness.requests[long].output_ids
    for request_id in timed.harness.requests:
        timed.harness.abort(request_id)
    timed.harness.assert_idle()


def test_a_prompt_below_the_limit_is_not_held_back() -> None:
    timed = Timed()
    timed.decode(8)
    timed.harness.submit(999, max_tokens=2)
    plan = timed.harness.step()
    assert plan is not None
    assert plan.num_tokens == 8 + 999
