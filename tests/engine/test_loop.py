"""The loop on a fake model: what it admits, counts and survives."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest

from deltaserve.cache.manager import CacheManager
from deltaserve.core.config import SchedulerConfig
from deltaserve.core.errors import ContextLengthError, EngineDeadError, OverloadedError, RequestError
from deltaserve.core.events import CacheCleared
from deltaserve.core.plan import StepOutput, StepPlan
from deltaserve.core.request import Request
from deltaserve.core.types import FinishReason, RequestOptions, SamplingParams, TokenChunk
from deltaserve.engine.info import EngineInfo, RequestRecord
from deltaserve.engine.loop import NUM_RECORDS, Engine, Runner
from deltaserve.scheduler.scheduler import Scheduler
from tests.fakes import FakeRunner, expected_output, make_sizes

VOCAB = 97
EOS = (11, 12)


class FailingRunner:
    """Obeys until step `fail_at`, where it raises: Ctrl-C after the work is done, other errors before."""

    def __init__(self, runner: Runner, fail_at: int, error: BaseException) -> None:
        self.runner, self.fail_at, self.error = runner, fail_at, error

    def execute(self, plan: StepPlan) -> StepOutput:
        if plan.step_id == self.fail_at and isinstance(self.error, Exception):
            raise self.error
        output = self.runner.execute(plan)
        if plan.step_id == self.fail_at:
            raise self.error
        return output


def make_engine(
    wrap: Callable[[Runner], Runner] = lambda runner: runner,
    *,
    num_pages: int = 64,
    num_rows: int = 4,
    max_model_len: int = 1024,
    num_ranks: int = 1,
    max_queued: int | None = None,
    on_close: Callable[[], None] | None = None,
) -> Engine:
    config = SchedulerConfig(max_num_seqs=num_rows, max_num_batched_tokens=128, max_queued=max_queued)
    sizes = make_sizes(num_pages, num_rows, max_model_len, num_snapshots=4)
    manager = CacheManager(sizes, debug=True)
    info = EngineInfo("fake", max_model_len, VOCAB, EOS, num_pages, 2 * num_rows + 4, num_rows, num_ranks)
    scheduler = Scheduler(config, manager, max_model_len)
    runner = wrap(FakeRunner(sizes, config, VOCAB))
    return Engine(scheduler, manager, runner, info, debug_checks=True, on_close=on_close)


def drain(engine: Engine) -> dict[int, list[TokenChunk]]:
    """Every chunk by request, until there is no work."""
    chunks: dict[int, list[TokenChunk]] = {}
    while engine.has_work:
        for chunk in engine.step():
            chunks.setdefault(chunk.request_id, []).append(chunk)
    return chunks


def ids_of(chunks: list[TokenChunk]) -> tuple[int, ...]:
    return tuple(token_id for chunk in chunks for token_id in chunk.token_ids)


def is_all_free(engine: Engine) -> bool:
    stats = engine.stats()
    pools = (stats.num_available_pages, stats.num_available_slots) == (stats.num_pages, stats.num_slots)
    return pools and not stats.num_running and not stats.num_waiting


@pytest.mark.parametrize("num_pages", [64, 6])
def test_requests_get_their_own_tokens_and_everything_is_free_after(num_pages: int) -> None:
    engine = make_engine(num_pages=num_pages, max_model_len=6 * 64)
    params = SamplingParams(max_tokens=150, seed=1, ignore_eos=True)
    prompts = {engine.submit(tuple(range(1, n)), params): tuple(range(1, n)) for n in (2, 65, 90, 40, 70, 3)}
    chunks = drain(engine)
    for request_id, prompt_ids in prompts.items():
        assert ids_of(chunks[request_id]) == expected_output(prompt_ids, params, frozenset(), VOCAB)
        assert chunks[request_id][-1].finish_reason is FinishReason.LENGTH
    assert is_all_free(engine)
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == (num_pages == 6)
    assert stats.num_requests == 6 and stats.num_output_tokens == 6 * 150
    assert stats.num_prompt_tokens == sum(map(len, prompts.values()))
    if not stats.num_preemptions:
        assert stats.num_computed_tokens == stats.num_prompt_tokens - stats.num_cached_tokens + 6 * 149
    assert stats.num_steps > 0 and stats.steps_s > 0


def test_the_checkpoints_eos_ends_a_request_unless_it_is_ignored() -> None:
    prompt_ids = (5, 6, 7)
    for stop_token_ids in ((), (3, 4)):
        engine = make_engine()
        params = SamplingParams(max_tokens=500, seed=1, stop_token_ids=stop_token_ids)
        request_id = engine.submit(prompt_ids, params)
        chunks = drain(engine)[request_id]
        stop_ids = frozenset((*EOS, *stop_token_ids))
        assert ids_of(chunks) == expected_output(prompt_ids, params, stop_ids, VOCAB)
        assert chunks[-1].stop_token_id in stop_ids
    engine = make_engine()
    request_id = engine.submit(prompt_ids, SamplingParams(max_tokens=500, ignore_eos=True))
    assert len(ids_of(drain(engine)[request_id])) == 500


def test_open_max_tokens_runs_to_the_end_of_the_context() -> None:
    engine = make_engine(max_model_len=200)
    request_id = engine.submit((1,) * 150, SamplingParams(ignore_eos=True))
    chunks = drain(engine)[request_id]
    assert len(ids_of(chunks)) == 50 and chunks[-1].finish_reason is FinishReason.LENGTH


def test_a_wrong_request_changes_nothing() -> None:
    engine = make_engine(max_model_len=200)
    kept = engine.submit((1, 2), SamplingParams(max_tokens=5, ignore_eos=True))
    before = engine.stats()
    for prompt_ids, params, kind in (
        ((), SamplingParams(), RequestError),
        ((VOCAB,), SamplingParams(), RequestError),
        ((1,) * 200, SamplingParams(), ContextLengthError),
        ((1,), SamplingParams(max_tokens=200), ContextLengthError),
        ((1,), SamplingParams(temperature=float("nan")), RequestError),
    ):
        with pytest.raises(kind):
            engine.submit(prompt_ids, params)
    assert engine.stats() == before
    assert len(ids_of(drain(engine)[kept])) == 5


def test_ids_may_come_in_any_order() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    given = [engine.submit((1,), params, request_id) for request_id in (7, 3, None, 5)]
    assert given == [7, 3, 8, 5] and drain(engine).keys() == set(given)


def test_unseeded_requests_get_different_seeds_and_the_same_ones_after_a_restart() -> None:
    def seeds() -> list[int | None]:
        plans: list[StepPlan] = []

        class Spy:
            def __init__(self, runner: Runner) -> None:
                self.runner = runner

            def execute(self, plan: StepPlan) -> StepOutput:
                plans.append(plan)
                return self.runner.execute(plan)

        engine = make_engine(Spy)
        for seed in (None, None, 7):
            engine.submit((1,), SamplingParams(max_tokens=1, seed=seed))
        drain(engine)
        return [admission.params.seed for plan in plans for admission in plan.admitted]

    first = seeds()
    assert len(set(first)) == 3 and None not in first and first[2] == 7
    assert seeds() == first


def test_abort_in_any_state_frees_everything() -> None:
    engine = make_engine(num_rows=2)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    running, prefilling, waiting = (engine.submit((1,) * n, params) for n in (3, 300, 5))
    engine.step()
    assert (engine.stats().num_running, engine.stats().num_waiting) == (2, 1)
    for request_id in (prefilling, waiting, running):
        assert engine.abort(request_id)
        assert not engine.abort(request_id)
    assert not drain(engine) and is_all_free(engine)
    assert not engine.abort(12345)


def test_an_exception_in_a_step_kills_the_engine() -> None:
    engine = make_engine(lambda runner: FailingRunner(runner, 3, ValueError("the weights melted")))
    engine.submit((1, 2), SamplingParams(max_tokens=50, ignore_eos=True))
    with pytest.raises(EngineDeadError, match="ValueError: the weights melted") as caught:
        drain(engine)
    assert isinstance(caught.value.__cause__, ValueError)
    for call in (engine.step, lambda: engine.submit((1,), SamplingParams())):
        with pytest.raises(EngineDeadError, match="the weights melted"):
            call()


def test_a_dead_rank_is_named_as_it_is() -> None:
    engine = make_engine(lambda runner: FailingRunner(runner, 0, EngineDeadError("rank 1 exited with code 1")))
    engine.submit((1, 2), SamplingParams())
    with pytest.raises(EngineDeadError, match=r"^rank 1 exited with code 1$"):
        engine.step()
    assert engine.dead_reason == "rank 1 exited with code 1"


@pytest.mark.parametrize("fail_at", range(6))
def test_ctrl_c_in_a_step_ends_that_steps_requests_only(fail_at: int) -> None:
    engine = make_engine(lambda runner: FailingRunner(runner, fail_at, KeyboardInterrupt()), num_rows=2)
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
    submitted = [engine.submit((n,) * 70, params) for n in range(4)]
    chunks: dict[int, list[TokenChunk]] = {}
    num_interrupts = 0
    while engine.has_work:
        try:
            for chunk in engine.step():
                chunks.setdefault(chunk.request_id, []).append(chunk)
        except KeyboardInterrupt:
            num_interrupts += 1
    finished = {request_id for request_id, got in chunks.items() if got[-1].finish_reason is not None}
    assert num_interrupts == 1 and 2 <= len(finished) < 4
    for request_id in finished:
        prompt_ids = (submitted.index(request_id),) * 70
        assert ids_of(chunks[request_id]) == expected_output(prompt_ids, params, frozenset(), VOCAB)
    assert is_all_free(engine)


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_what_an_interrupted_step_wrote_is_never_found_again(fail_at: int) -> None:
    """Two chunks of the prompt, then decoding; nothing of them may be a hit."""
    engine = make_engine(lambda runner: FailingRunner(runner, fail_at, KeyboardInterrupt()))
    params = SamplingParams(max_tokens=5, ignore_eos=True, seed=1)
    prompt_ids = (7,) * 200
    engine.submit(prompt_ids, params)
    with pytest.raises(KeyboardInterrupt):
        drain(engine)
    assert engine.stats().cache.pages_now == engine.stats().cache.snapshots_now == 0
    request_id = engine.submit(prompt_ids, params)
    assert ids_of(drain(engine)[request_id]) == expected_output(prompt_ids, params, frozenset(), VOCAB)
    assert engine.records[-1].cache.num_cached == 0


def test_a_hit_is_counted_recorded_and_gone_after_a_reset() -> None:
    engine = make_engine()
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    prompt_ids = tuple(range(90)) * 2
    found = []
    for is_reset in (False, False, True):
        if is_reset:
            engine.reset_prefix_cache()
        request_id = engine.submit(prompt_ids, params)
        (first, *rest) = drain(engine)[request_id]
        assert first.cache is not None and all(chunk.cache is None for chunk in rest)
        assert engine.records[-1] == RequestRecord(request_id, first.cache)
        found.append((first.num_cached, first.cache.num_cached, first.cache.num_prompt))
    assert found == [(0, 0, 180), (128, 128, 180), (0, 0, 180)]
    stats = engine.stats()
    assert (stats.num_cached_tokens, stats.num_prompt_tokens) == (128, 3 * 180)
    assert (stats.cache.num_hit, stats.cache.num_looked_up) == (128, 3 * 180)
    events = engine.cache_events()
    assert [type(event) for event in events if isinstance(event, CacheCleared)] == [CacheCleared]
    assert [event.sequence for event in events] == sorted({event.sequence for event in events})
    assert engine.cache_events() == ()


def test_stats_do_not_change_after_they_were_given() -> None:
    engine = make_engine()
    before = engine.stats()
    copy = deepcopy(before)
    engine.submit((1,) * 100, SamplingParams(max_tokens=3))
    drain(engine)
    assert before == copy != engine.stats()


def test_the_ring_of_records_is_bounded() -> None:
    engine = make_engine()
    for _ in range(NUM_RECORDS + 10):
        engine.submit((1,), SamplingParams(max_tokens=1))
    drain(engine)
    assert [record.request_id for record in engine.records] == list(range(11, NUM_RECORDS + 11))


def test_a_full_queue_changes_nothing_but_its_count() -> None:
    engine = make_engine(num_rows=1, max_queued=1)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    accepted = [engine.submit((1,), params)]
    engine.step()
    accepted.append(engine.submit((1,), params))
    for num_refused in (1, 2):
        with pytest.raises(OverloadedError):
            engine.submit((1,), params)
        assert engine.stats().num_refused == num_refused
    assert drain(engine).keys() == set(accepted)
    assert engine.stats().num_requests == 2


def test_options_and_the_time_of_a_step_reach_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[RequestOptions] = []
    elapsed: list[float | None] = []
    add, update = Scheduler.add, Scheduler.update

    def spy_add(self: Scheduler, request: Request) -> None:
        added.append(request.options)
        add(self, request)

    def spy_update(
        self: Scheduler, plan: StepPlan, output: StepOutput, elapsed_s: float | None = None
    ) -> list[TokenChunk]:
        elapsed.append(elapsed_s)
        return update(self, plan, output, elapsed_s)

    monkeypatch.setattr(Scheduler, "add", spy_add)
    monkeypatch.setattr(Scheduler, "update", spy_update)
    engine = make_engine()
    options = RequestOptions(priority=-2, cache_salt="a", session_id="b", use_drafts=False)
    engine.submit((1,), SamplingParams(max_tokens=2), options=options)
    engine.submit((1,), SamplingParams(max_tokens=2))
    with pytest.raises(RequestError, match="session_id"):
        engine.submit((1,), SamplingParams(), options=RequestOptions(session_id=""))
    drain(engine)
    assert added == [options, RequestOptions()]
    assert elapsed and all(seconds is not None and seconds > 0 for seconds in elapsed)


@pytest.mark.parametrize("moment", ["schedule", "update"])
def test_ctrl_c_while_the_books_are_written_kills_the_engine(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is half written would keep its pages for ever, or give wrong plans."""
    engine = make_engine()
    engine.submit((1,), SamplingParams(max_tokens=3))
    engine.step()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Scheduler, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(EngineDeadError, match="interrupted"):
        engine.step()


def test_ctrl_c_with_several_ranks_kills_the_engine() -> None:
    engine = make_engine(lambda runner: FailingRunner(runner, 0, KeyboardInterrupt()), num_ranks=2)
    engine.submit((1,), SamplingParams())
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(EngineDeadError, match="interrupted"):
        engine.step()


def test_close_releases_once_and_refuses_afterwards() -> None:
    calls: list[str] = []
    engine = make_engine(on_close=lambda: calls.append("closed"))
    engine.close()
    engine.close()
    assert calls == ["closed"]
    with pytest.raises(EngineDeadError, match="closed"):
        engine.submit((1,), SamplingParams())


def test_stalled_means_work_without_a_plan() -> None:
    engine = make_engine()
    assert engine.step() == [] and not engine.has_work
    engine.submit((1,), SamplingParams(max_tokens=2))
    engine.step()
    assert not engine.is_stalled
