"""One answer, whatever the path: the whole engine on a real (random) checkpoint, tokens compared exactly.

The reference is the plainest run there is: one request at a time, its prompt in one chunk, no prefix cache. Every
other way through the engine must give the same tokens: any chunk budget, company in the batch, any order, preemption in
the middle, hits from the device and from the host, drafts. Half of the requests are sampled with seeds, so that the
sampler is on every path too. Debug mode is on throughout: freed rows, pages and slots are filled with NaN, what a hit
borrows must hold the bytes that were published, and every owner's books are recomputed after each step.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from deltaserve.core.types import SamplingParams
from deltaserve.engine.llm import LLM
from deltaserve.engine.loop import Engine

LENGTHS = (*range(1, 131), 1000)
BUDGETS = (64, 65, 127, 128, 192, 1000)
Job = tuple[list[int], SamplingParams]


def make_jobs(lengths: Sequence[int], num_tokens: Sequence[int], seed: int) -> list[Job]:
    """One request per length; every second one greedy, the others sampled with every rule that draws on history."""
    rng = random.Random(seed)
    jobs = []
    for i, length in enumerate(lengths):
        prompt_ids = [rng.randrange(900) for _ in range(length)]
        params = SamplingParams(max_tokens=num_tokens[i % len(num_tokens)], temperature=0.0, ignore_eos=True)
        if i % 2:
            params = replace(params, temperature=1.0, top_k=20, top_p=0.95, seed=i, repetition_penalty=1.1)
        jobs.append((prompt_ids, params))
    return jobs


def run_alone(engine: Engine, jobs: Sequence[Job]) -> list[list[int]]:
    return [run_together(engine, [job])[0] for job in jobs]


def run_together(
    engine: Engine, jobs: Sequence[Job], arrivals: Sequence[int] | None = None, preempt: random.Random | None = None
) -> list[list[int]]:
    """All jobs in one engine; job i is submitted before step arrivals[i] (default: all at once).

    With `preempt`, every fifth step or so pushes out a request that it draws.
    """
    waiting = sorted(enumerate(arrivals or [0] * len(jobs)), key=lambda item: item[1])
    outputs: list[list[int]] = [[] for _ in jobs]
    job_of: dict[int, int] = {}
    step = 0
    while waiting or engine.has_work:
        while waiting and waiting[0][1] <= step:
            job = waiting.pop(0)[0]
            job_of[engine.submit(*jobs[job])] = job
        for chunk in engine.step():
            assert chunk.error is None, chunk.error
            outputs[job_of[chunk.request_id]] += chunk.token_ids
        if preempt is not None and preempt.random() < 0.2:
            engine.preempt(preempt.choice(list(job_of)))
        step += 1
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_available_pages == stats.num_pages and stats.num_available_slots == stats.num_slots
    return outputs


def load(checkpoint: Path, **settings: object) -> LLM:
    return LLM(checkpoint, debug_checks=True, num_threads=1, max_model_len=2048, **settings)


@pytest.fixture(scope="module")
def whole(sample_checkpoint: Path) -> Iterator[Engine]:
    """No prompt of these tests is cut here, and none is a hit."""
    settings = {"max_num_batched_tokens": 4096, "max_num_seqs": 8, "enable_prefix_caching": False}
    with load(sample_checkpoint, **settings) as llm:
        yield llm.engine


@pytest.fixture(scope="module")
def short_jobs() -> list[Job]:
    return make_jobs(LENGTHS, num_tokens=(4,), seed=1)


@pytest.fixture(scope="module")
def short_answers(whole: Engine, short_jobs: list[Job]) -> list[list[int]]:
    answers = run_alone(whole, short_jobs)
    assert whole.stats().cache.num_hit == 0
    assert len({tuple(answer) for answer in answers}) > len(answers) // 2, "the model must not say the same to all"
    return answers


@pytest.fixture(scope="module")
def long_jobs() -> list[Job]:
    """Answers that cross one or two boundaries."""
    return make_jobs((1, 17, 60, 63, 64, 65, 100, 128, 129, 190, 300, 511), num_tokens=(70, 130, 9, 33), seed=2)


@pytest.fixture(scope="module")
def long_answers(whole: Engine, long_jobs: list[Job]) -> list[list[int]]:
    return run_alone(whole, long_jobs)


@pytest.mark.parametrize("budget", BUDGETS)
def test_every_chunk_budget_gives_the_tokens_of_the_whole_prompt(
    sample_checkpoint: Path, short_jobs: list[Job], short_answers: list[list[int]], budget: int
) -> None:
    with load(sample_checkpoint, max_num_batched_tokens=budget, max_num_seqs=4) as llm:
        assert run_alone(llm.engine, short_jobs) == short_answers


@pytest.mark.parametrize("budget", [64, 192, 4096])
def test_a_batch_with_joins_and_leaves_gives_the_tokens_of_lone_runs(
    sample_checkpoint: Path, long_jobs: list[Job], long_answers: list[list[int]], budget: int
) -> None:
    arrivals = [random.Random(budget).randrange(60) for _ in long_jobs]
    with load(sample_checkpoint, max_num_batched_tokens=budget, max_num_seqs=8) as llm:
        assert run_together(llm.engine, long_jobs, arrivals) == long_answers


def test_short_prompts_in_company_give_the_tokens_of_lone_runs(
    whole: Engine, short_jobs: list[Job], short_answers: list[list[int]]
) -> None:
    assert run_together(whole, short_jobs) == short_answers


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_requests_changes_no_tokens(
    whole: Engine, long_jobs: list[Job], long_answers: list[list[int]], seed: int
) -> None:
    order = random.Random(seed).sample(range(len(long_jobs)), len(long_jobs))
    answers = run_together(whole, [long_jobs[i] for i in order])
    assert answers == [long_answers[i] for i in order]


@pytest.mark.parametrize(("seed", "budget"), [(1, 64), (2, 192), (3, 4096)])
def test_preemption_at_random_steps_changes_no_tokens(
    sample_checkpoint: Path, long_jobs: list[Job], long_answers: list[list[int]], seed: int, budget: int
) -> None:
    with load(sample_checkpoint, max_num_batched_tokens=budget, max_num_seqs=8) as llm:
        assert run_together(llm.engine, long_jobs, preempt=random.Random(seed)) == long_answers
        assert llm.engine.stats().num_preemptions > 10


def test_preemption_for_want_of_pages_changes_no_tokens(
    sample_checkpoint: Path, long_jobs: list[Job], long_answers: list[list[int]]
) -> None:
    """Six rows fit while they are short, and each grows to three pages: someone must give way."""
    jobs, answers = [long_jobs[1], long_jobs[5]] * 4, [long_answers[1], long_answers[5]] * 4
    settings = {"num_pages": 11, "max_num_batched_tokens": 192, "max_num_seqs": 8}
    with LLM(sample_checkpoint, debug_checks=True, num_threads=1, max_model_len=11 * 64, **settings) as llm:
        assert run_together(llm.engine, jobs) == answers
        assert llm.engine.stats().num_preemptions > 0


def test_the_state_may_be_kept_in_16_bits_on_every_path_alike(sample_checkpoint: Path, long_jobs: list[Job]) -> None:
    answers = []
    for budget in (64, 4096):
        with load(sample_checkpoint, state_dtype="float16", max_num_batched_tokens=budget, max_num_seqs=8) as llm:
            answers.append(run_alone(llm.engine, long_jobs))
            answers.append(run_together(llm.engine, long_jobs))
    assert all(answer == answers[0] for answer in answers[1:])


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8_e4m3"])
def test_narrow_kv_gives_one_answer_too(sample_checkpoint: Path, long_jobs: list[Job], kv_cache_dtype: str) -> None:
    answers = []
    for budget in (64, 4096):
        with load(
            sample_checkpoint, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=budget, max_num_seqs=8
        ) as llm:
            answers.append(run_together(llm.engine, long_jobs))
    assert answers[0] == answers[1]


def turns_of(jobs: Sequence[Job], answers: Sequence[Sequence[int]]) -> list[Job]:
    """The second turn of each conversation: first prompt, its answer, and a little more."""
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True)
    return [([*ids, *answer, 7, 8, 9], params) for (ids, _), answer in zip(jobs, answers, strict=True)]


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("budget", [64, 4096])
def test_hits_change_no_tokens(
    sample_checkpoint: Path,
    whole: Engine,
    long_jobs: list[Job],
    long_answers: list[list[int]],
    budget: int,
    num_drafts: int,
) -> None:
    """Each job three times, alone and together, then the next turn of each as a hit on the first."""
    jobs = turns_of(long_jobs, long_answers)
    answers = run_alone(whole, jobs)
    with load(sample_checkpoint, max_num_batched_tokens=budget, max_num_seqs=8, num_drafts=num_drafts) as llm:
        assert run_alone(llm.engine, long_jobs) == long_answers
        assert run_together(llm.engine, long_jobs) == long_answers
        assert run_together(llm.engine, long_jobs[::-1]) == long_answers[::-1]
        num_hit = llm.engine.stats().cache.num_hit
        assert num_hit > 2000
        assert run_together(llm.engine, jobs) == answers
        assert llm.engine.stats().cache.num_hit > num_hit + 1000
        llm.reset_prefix_cache()
        assert run_together(llm.engine, jobs) == answers
        assert (llm.engine.stats().drafts.num_accepted > 0) == (num_drafts > 0)


@pytest.mark.parametrize("seed", range(3))
def test_pools_too_small_for_the_cache_change_no_tokens(
    sample_checkpoint: Path, whole: Engine, long_jobs: list[Job], long_answers: list[list[int]], seed: int
) -> None:
    """Pages and snapshots leave for the host and come back, while requests are preempted."""
    jobs = [*long_jobs, *turns_of(long_jobs, long_answers)]
    answers = [*long_answers, *run_alone(whole, jobs[len(long_jobs) :])]
    settings = {"num_pages": 24, "num_snapshots": 4, "host_cache_bytes": 1 << 25, "max_num_batched_tokens": 192}
    rng = random.Random(seed)
    with LLM(
        sample_checkpoint, debug_checks=True, num_threads=1, max_model_len=1024, max_num_seqs=3, **settings
    ) as llm:
        for _ in range(2):
            order = rng.sample(range(len(jobs)), len(jobs))
            found = run_together(llm.engine, [jobs[i] for i in order], preempt=rng)
            assert found == [answers[i] for i in order]
        stats = llm.engine.stats()
    assert stats.num_preemptions > 0
    cache = stats.cache
    assert min(cache.num_hit, cache.pages_saved, cache.pages_restored, cache.snapshots_saved) > 0, cache
    assert cache.snapshots_restored > 0, cache
