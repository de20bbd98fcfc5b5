"""The scheduler's behaviour: order, shares, abort, failure, preemption, endings, prompt logprobs."""

from __future__ import annotations

from collections import Counter

import pytest

from deltaserve.cache.manager import Holding
from deltaserve.core.errors import ContextLengthError
from deltaserve.core.plan import Logits, RowKind, StepPlan
from deltaserve.core.request import Request, RequestStatus
from deltaserve.core.types import FinishReason, SamplingParams
from deltaserve.scheduler.policy import PREFILL_PATIENCE
from tests.fakes import expected_output, expected_prompt_logprobs
from tests.scheduler.harness import VOCAB, Harness, prompt_of


def refuse_once(harness: Harness, request_id: int) -> None:
    """The next reservation of this request is refused."""
    reserve = harness.manager.reserve

    def refuse(request: Request, num_tokens: int) -> Holding | None:
        if request.id != request_id:
            return reserve(request, num_tokens)
        harness.manager.reserve = reserve  # type: ignore[method-assign]
        return None

    harness.manager.reserve = refuse  # type: ignore[method-assign]


def kinds(plan: StepPlan | None) -> list[tuple[int, str]]:
    assert plan is not None
    return [(row.request_id, row.kind.name) for row in plan.rows]


# Order and shares


def test_requests_are_admitted_in_order_of_arrival() -> None:
    harness = Harness(num_pages=8, num_rows=3, budget=64)
    for num_prompt in (200, 3, 150, 70, 5, 64, 1):
        harness.submit(num_prompt, max_tokens=20)
    harness.run()
    admitted = [admission.request_id for plan in harness.runner.steps for admission in plan.admitted]
    first_admissions = list(dict.fromkeys(admitted))
    assert first_admissions == [1, 2, 3, 4, 5, 6, 7]
    harness.assert_all_finished()


def test_a_small_request_does_not_overtake_one_that_waits_for_pages() -> None:
    harness = Harness(num_pages=8, num_rows=4, budget=512)
    harness.submit(200, max_tokens=30)
    harness.step()
    large, small = harness.submit(320, max_tokens=2), harness.submit(5, max_tokens=2)
    assert kinds(harness.step()) == [(1, "DECODE")]
    harness.run()
    order = [admission.request_id for plan in harness.runner.steps for admission in plan.admitted]
    assert order.index(large) < order.index(small)
    harness.assert_all_finished()


def test_admission_leaves_a_page_for_each_running_row() -> None:
    harness = Harness(num_pages=4, num_rows=3, budget=512)
    harness.submit(64, max_tokens=3)
    harness.submit(64, max_tokens=3)
    harness.submit(64, max_tokens=3)
    assert kinds(harness.step()) == [(1, "PREFILL"), (2, "PREFILL")]
    harness.run()
    assert harness.scheduler.num_preemptions == 0
    harness.assert_all_finished()


@pytest.mark.parametrize("num_decodes", [1, 32, 64])
def test_prefill_does_not_starve_behind_decode_rows(num_decodes: int) -> None:
    harness = Harness(num_pages=400, num_rows=65, budget=64)
    for _ in range(num_decodes):
        harness.submit(1, max_tokens=400)
    while harness.scheduler.num_waiting or any(not r.output_ids for r in harness.requests.values()):
        harness.step()
    late = harness.submit(1000, max_tokens=2)
    first_step = len(harness.runner.steps)
    before = {request_id: len(request.output_ids) for request_id, request in harness.requests.items()}
    while not harness.requests[late].output_ids:
        harness.step()
    num_steps = len(harness.runner.steps) - first_step
    assert num_steps <= -(-1000 // 64) * (PREFILL_PATIENCE + 1)
    for request_id in range(1, num_decodes + 1):
        gained = len(harness.requests[request_id].output_ids) - before[request_id]
        assert gained >= num_steps * PREFILL_PATIENCE // (PREFILL_PATIENCE + 1)
    for request_id in harness.requests:
        harness.abort(request_id)
    harness.assert_idle()


def test_short_prompts_do_not_starve_a_long_one() -> None:
    """Those that fit into what one decode row leaves keep coming; the long one still gets its turns."""
    harness = Harness(num_pages=400, num_rows=8, budget=64)
    harness.submit(1, max_tokens=1_000)
    harness.step()
    long = harness.submit(640, max_tokens=1)
    for _ in range(10 * (PREFILL_PATIENCE + 1)):
        harness.submit(20, max_tokens=2)
        harness.step()
    harness.assert_finished(long)


def test_decode_rows_beyond_the_budget_take_turns() -> None:
    harness = Harness(num_pages=400, num_rows=100, budget=64)
    for _ in range(100):
        harness.submit(1, max_tokens=40)
    while any(len(request.output_ids) < 2 for request in harness.requests.values()):
        harness.step()
    before = {request_id: len(request.output_ids) for request_id, request in harness.requests.items()}
    for _ in range(25):
        harness.step()
    gains = [len(request.output_ids) - before[request_id] for request_id, request in harness.requests.items()]
    assert sum(gains) == 25 * 64
    assert max(gains) - min(gains) <= 1
    harness.run()
    harness.assert_all_finished()


# Abort and failure


def test_abort_in_every_state() -> None:
    harness = Harness(num_pages=8, num_rows=1, budget=64)
    running, waiting = harness.submit(100, max_tokens=5), harness.submit(10, max_tokens=5)
    last = harness.submit(70, max_tokens=5)
    harness.step()
    assert harness.abort(waiting)
    assert harness.abort(running)
    assert (harness.scheduler.num_running, harness.scheduler.num_waiting) == (0, 1)
    assert not harness.abort(running)
    assert not harness.abort(waiting)
    assert not harness.abort(12345)
    harness.run()
    assert harness.chunks[running] == harness.chunks[waiting] == []
    harness.assert_finished(last)
    assert not harness.abort(last)
    harness.assert_idle()


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_abort_while_the_plan_is_out_frees_when_it_is_back(num_steps: int) -> None:
    harness = Harness(num_pages=8, num_rows=2, budget=128)
    gone, stays = harness.submit(100, max_tokens=9), harness.submit(90, max_tokens=9)
    for _ in range(num_steps):
        harness.step()
    told = len(harness.chunks[gone])

    def meanwhile() -> None:
        free = harness.manager.num_available_pages
        assert harness.abort(gone)
        assert not harness.abort(gone)
        assert harness.manager.num_available_pages == free
        assert harness.requests[gone].status is RequestStatus.FINISHED

    harness.step(meanwhile)
    assert gone not in harness.manager.holders
    assert len(harness.chunks[gone]) == told
    harness.run()
    harness.assert_finished(stays)
    harness.assert_idle()


def test_fail_tells_the_client_once() -> None:
    harness = Harness(num_rows=1)
    first, second = harness.submit(10, max_tokens=5), harness.submit(10, max_tokens=5)
    harness.step()
    for request_id in (first, second):
        chunk = harness.scheduler.fail(request_id, "no such luck")
        assert chunk is not None
        assert (chunk.request_id, chunk.finish_reason, chunk.error) == (request_id, FinishReason.ERROR, "no such luck")
        assert harness.scheduler.fail(request_id, "again") is None
    harness.assert_idle()


def test_a_request_that_can_never_fit_is_refused_and_leaves_no_trace() -> None:
    harness = Harness(num_pages=3, max_model_len=150)
    for num_prompt, max_tokens, param in ((150, 1, "prompt"), (100, 51, "max_tokens")):
        with pytest.raises(ContextLengthError) as error:
            harness.submit(num_prompt, max_tokens)
        assert error.value.param == param
    harness.assert_idle()
    harness.submit(100, max_tokens=50)
    harness.run()
    harness.assert_all_finished()


# Preemption


def test_preemption_recomputes_prompt_and_output_as_one_sequence() -> None:
    harness = Harness(num_pages=5, num_rows=2, budget=64)
    older, newer = harness.submit(60, max_tokens=150), harness.submit(60, max_tokens=150)
    harness.run()
    assert harness.requests[older].num_preemptions == 0
    assert harness.requests[newer].num_preemptions > 0
    assert harness.scheduler.num_preemptions == harness.requests[newer].num_preemptions
    first, *resumed = [a for plan in harness.runner.steps for a in plan.admitted if a.request_id == newer]
    output = harness.tokens(newer)
    assert first.output_ids == ()
    assert len(resumed) == harness.requests[newer].num_preemptions
    for admission in resumed:
        assert 0 < len(admission.output_ids) < len(output)
        assert admission.output_ids == output[: len(admission.output_ids)]
    harness.assert_all_finished()


def test_as_many_tokens_are_sampled_as_returned() -> None:
    harness = Harness(num_pages=5, num_rows=3, budget=65)
    for _ in range(5):
        harness.submit(70, max_tokens=180)
    harness.run()
    assert harness.scheduler.num_preemptions > 1
    sampled = Counter(row.request_id for plan in harness.runner.steps for row in plan.rows if row.is_last)
    assert sampled == {request_id: len(harness.tokens(request_id)) for request_id in harness.requests}
    harness.assert_all_finished()


def test_the_victim_keeps_its_place_in_the_queue() -> None:
    harness = Harness(num_pages=5, num_rows=2, budget=64)
    harness.submit(60, max_tokens=150)
    victim, late = harness.submit(60, max_tokens=150), harness.submit(1, max_tokens=1)
    while not harness.requests[victim].num_preemptions:
        harness.step()
    assert harness.requests[victim].status is RequestStatus.WAITING
    harness.run()
    order = [admission.request_id for plan in harness.runner.steps for admission in plan.admitted]
    assert order.index(late) > max(i for i, request_id in enumerate(order) if request_id == victim)
    harness.assert_all_finished()


def test_rows_that_all_need_a_page_do_not_deadlock() -> None:
    """Four rows grow over a page border in the same step, with no page free: the oldest goes on."""
    harness = Harness(num_pages=7, num_rows=4, budget=256)
    for _ in range(4):
        harness.submit(63, max_tokens=200)
    harness.run()
    finished = [chunk for chunks in harness.chunks.values() for chunk in chunks if chunk.finish_reason]
    assert len(finished) == 4
    assert harness.requests[1].num_preemptions == 0
    assert harness.scheduler.num_preemptions > 0
    harness.assert_all_finished()


def test_a_victim_already_in_the_plan_is_taken_out_of_it() -> None:
    """An old prompt that lost its spare slot's page takes them from a decode row planned before it."""
    harness = Harness(num_pages=64, num_rows=2, budget=66)
    old = harness.submit(64 * 6, max_tokens=1)
    harness.step()
    young = harness.submit(2, max_tokens=50)
    while not harness.requests[young].output_ids:
        harness.step()
    refuse_once(harness, old)
    plan = harness.step()
    assert kinds(plan) == [(old, "PREFILL")]
    assert plan is not None
    assert plan.retired == (1,)
    assert harness.requests[young].num_preemptions == 1
    harness.run()
    harness.assert_all_finished()


def test_a_newcomer_dropped_in_the_step_that_admits_it_was_never_there() -> None:
    """A prefill turn admits it ahead of the decode rows, one of which then is refused and makes it give way."""
    harness = Harness(num_rows=4, budget=66)
    old = [harness.submit(num_prompt, max_tokens=50) for num_prompt in (61, 1, 1)]  # the first needs a page then
    harness.step()
    young = harness.submit(100, max_tokens=5)
    for _ in range(PREFILL_PATIENCE):
        assert kinds(harness.step()) == [(request_id, "DECODE") for request_id in old]
    refuse_once(harness, old[0])
    plan = harness.step()
    assert kinds(plan) == [(old[0], "DECODE"), (old[1], "DECODE")]
    assert plan is not None
    assert (plan.admitted, plan.retired) == ((), ())
    assert harness.requests[young].num_preemptions == 1
    harness.run()
    harness.assert_all_finished()


# Endings


def test_a_stop_id_ends_the_request_and_is_kept() -> None:
    free = expected_output(prompt_of(30), SamplingParams(max_tokens=40), frozenset(), VOCAB)
    stop_id = free[17]
    harness = Harness()
    harness.add(prompt_of(30), SamplingParams(max_tokens=40), frozenset({stop_id, VOCAB + 5}))
    harness.run()
    last = harness.chunks[1][-1]
    assert (last.finish_reason, last.stop_token_id, last.token_ids) == (FinishReason.STOP, stop_id, (stop_id,))
    assert harness.tokens(1) == free[: free.index(stop_id) + 1]
    harness.assert_all_finished()


def test_stop_ids_wait_for_min_tokens() -> None:
    stop_ids = frozenset(range(0, VOCAB, 2))
    harness = Harness()
    harness.add(prompt_of(30), SamplingParams(max_tokens=60, min_tokens=20), stop_ids)
    harness.run()
    assert len(harness.tokens(1)) > 20
    assert not set(harness.tokens(1)[:20]) & stop_ids
    assert harness.reason(1) is FinishReason.STOP
    harness.assert_all_finished()


@pytest.mark.parametrize("max_tokens", [1, 2, 64, 65])
def test_max_tokens_ends_with_length(max_tokens: int) -> None:
    harness = Harness()
    harness.submit(40, max_tokens)
    harness.run()
    assert len(harness.tokens(1)) == max_tokens
    assert harness.reason(1) is FinishReason.LENGTH
    assert harness.chunks[1][-1].stop_token_id is None
    harness.assert_all_finished()


def test_a_request_may_fill_the_context_and_the_pool_to_the_last_token() -> None:
    harness = Harness(num_pages=3, num_rows=2, max_model_len=193)
    harness.submit(100, max_tokens=93)
    harness.submit(192, max_tokens=1)
    harness.run()
    assert [len(harness.tokens(request_id)) for request_id in (1, 2)] == [93, 1]
    harness.assert_all_finished()


# Logprobs


def test_logprobs_come_with_each_token_where_asked_for() -> None:
    harness = Harness(num_rows=2)
    asked, unasked = harness.submit(70, 5, logprobs=0), harness.submit(70, 5)
    harness.run()
    assert all(chunk.logprobs is None and chunk.prompt_logprobs is None for chunk in harness.chunks[unasked])
    for chunk in harness.chunks[asked]:
        assert chunk.logprobs is not None
        assert tuple(entry.token_id for entry in chunk.logprobs) == chunk.token_ids


@pytest.mark.parametrize("num_prompt", [1, 2, 63, 64, 65, 130, 200])
@pytest.mark.parametrize("budget", [64, 65, 192])
def test_prompt_logprobs_come_once_whatever_the_chunks(num_prompt: int, budget: int) -> None:
    harness = Harness(budget=budget)
    harness.submit(num_prompt, 3, prompt_logprobs=1)
    harness.run()
    first, *rest = harness.chunks[1]
    assert first.prompt_logprobs == expected_prompt_logprobs(prompt_of(num_prompt))
    assert all(chunk.prompt_logprobs is None for chunk in rest)
    harness.assert_all_finished()


@pytest.mark.parametrize("num_steps", range(1, 8))
def test_prompt_logprobs_survive_preemption_and_are_not_repeated(num_steps: int) -> None:
    """Preempted after any number of its steps: in the middle of the prompt, and after output."""
    harness = Harness(budget=64)
    request_id = harness.submit(200, 20, prompt_logprobs=1)
    for _ in range(num_steps):
        harness.step()
    assert harness.scheduler.preempt(request_id)
    assert harness.requests[request_id].num_preemptions == 1
    had_output = bool(harness.requests[request_id].output_ids)
    num_before = len(harness.runner.steps)
    harness.run()
    first, *rest = harness.chunks[request_id]
    assert first.prompt_logprobs == expected_prompt_logprobs(prompt_of(200))
    assert all(chunk.prompt_logprobs is None for chunk in rest)
    recomputed = [row for plan in harness.runner.steps[num_before:] for row in plan.rows if row.kind == RowKind.PREFILL]
    assert all((row.logits == Logits.ALL) != had_output for row in recomputed)
    harness.assert_all_finished()
