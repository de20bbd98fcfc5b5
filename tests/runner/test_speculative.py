"""Drafts and their verification in a real runner: nothing but the number of steps depends on them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deltaserve.core.plan import RowKind
from deltaserve.core.types import SamplingParams
from deltaserve.runner.speculative import SyntheticAcceptance, decode_tokens, encode_tokens
from tests.model.pairs import driver
from tests.model.steps import Driver
from tests.runner.by_hand import ByHand, Job
from tests.runner.loop import Loop, answers

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, seed=0, ignore_eos=True)
DRAWN = SamplingParams(
    max_tokens=24,
    temperature=0.7,
    top_k=40,
    top_p=0.95,
    min_p=0.02,
    seed=5,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias={7: 2.0, 11: -3.0},
    min_tokens=9,
    logprobs=2,
    ignore_eos=True,
)
STOP_IDS = (3, 17, 40)  # held back by min_tokens
LENGTHS = tuple(sorted({64 * n + d for n in (0, 1, 2) for d in range(-1, 10)} - {-1, 0}))


def prompt_of(length: int) -> list[int]:
    return torch.randint(0, 1000, (length,), generator=torch.Generator().manual_seed(length)).tolist()


class Reference:
    """The draft head over a whole sequence at once, as often as there are drafts; nothing is kept in between."""

    def __init__(self, loop: ByHand) -> None:
        self.model = loop.runner._model

    @torch.no_grad()
    def compute(self, known: list[int]) -> tuple[Driver, Tensor]:
        """A driver whose latest step was all of `known`, and the main model's hidden before each token."""
        run = driver(self.model)  # type: ignore[arg-type]
        (hidden_TD,) = run.step(prefill=[(run.open(), known)])
        return run, torch.cat((torch.zeros(1, hidden_TD.shape[1]), hidden_TD[:-1]))

    @torch.no_grad()
    def logits(self, known: list[int], drafts: tuple[int, ...]) -> list[Tensor]:
        """For each draft behind `known`, the head's logits, given the drafts before it.

        The main model sees the drafts too, but none of its hiddens behind the last of `known` is used.
        """
        run, before_TD = self.compute([*known, *drafts])
        found = []
        for end in range(len(known), len(known) + len(drafts)):
            run.before = before_TD
            head_D = run.draft()[0][end - 1]
            before_TD[end] = head_D
            found.append(self.model.logits(head_D[None])[0])
        return found

    @torch.no_grad()
    def keys(self, known: list[int]) -> Tensor:
        """[T, KV heads, 2, head size]: the draft layer's keys and values at every position."""
        run, _ = self.compute(known)
        run.draft()
        return keys_of(run.caches.pages, run.rows[0][0].pages, len(known))


def keys_of(pages: Tensor, page_ids: list[int], count: int) -> Tensor:
    """Of the last layer, by position."""
    return pages[page_ids, -1].permute(0, 3, 1, 2, 4).flatten(0, 1)[:count]


def check_drafts(reference: Reference, job: Job) -> int:
    """Each draft is the reference's choice, but for logits that are equal to the last bits; how many there were."""
    for draft, logits in zip(job.drafts, reference.logits(job.known, job.drafts), strict=True):
        assert logits.max() - logits[draft] < 1e-4, (job.id, len(job.known), draft, int(logits.argmax()))
    return len(job.drafts)


@pytest.mark.parametrize("lookahead", [True, False])
def test_drafts_are_those_of_a_plain_loop_over_the_whole_sequence(sample_checkpoint: Path, lookahead: bool) -> None:
    """Prompts of one token and of many, in chunks, beside rows without drafts; drafts cut at random."""
    loop = ByHand(sample_checkpoint, 3, chunk=64, lookahead=lookahead, rng=random.Random(1))
    params = replace(GREEDY, max_tokens=70)
    jobs = [loop.add(prompt_of(length), params, drafts) for length, drafts in ((1, 3), (62, 2), (64, 0), (150, 3))]
    reference, num_checked, number = Reference(loop), 0, 0
    while any(not job.is_done for job in jobs):
        loop.step()
        number += 1
        for job in jobs if number % 7 == 0 else ():
            num_checked += check_drafts(reference, job)
    assert num_checked > 40
    assert {row.kind for plan in loop.plans for row in plan.rows} == set(RowKind)


@pytest.mark.parametrize("lookahead", [True, False])
def test_every_accepted_position_has_the_keys_of_the_targets_hidden(sample_checkpoint: Path, lookahead: bool) -> None:
    """Whatever the row's draft count, none included, and whatever became of its drafts."""
    loop = ByHand(sample_checkpoint, 5, chunk=64, lookahead=lookahead, rng=random.Random(2))
    params = replace(GREEDY, max_tokens=80)
    jobs = [loop.add(prompt_of(n), params, drafts) for n, drafts in ((1, 5), (63, 0), (64, 1), (127, 0), (128, 5))]
    loop.run()
    for job in jobs:
        count = job.computed
        found = keys_of(loop.runner._pools.pages, job.pages, count)
        expected = Reference(loop).keys(job.known[:count])
        assert (found[1:] - expected[1:]).abs().max() < 2e-4, (job.id, (found - expected).abs().amax((1, 2, 3)))


@pytest.fixture(scope="module")
def plain(sample_checkpoint: Path) -> dict[str, list[list[int]]]:
    """Each prompt without drafts."""
    found = {}
    for params in (GREEDY, DRAWN):
        loop = ByHand(sample_checkpoint, 0, num_rows=len(LENGTHS))
        for length in LENGTHS:
            loop.add(prompt_of(length), params, stop_ids=STOP_IDS)
        found[str(params)] = loop.run()
    return found


@pytest.mark.parametrize("num_drafts", range(8))
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_tokens_do_not_depend_on_the_number_of_drafts(
    num_drafts: int, params: SamplingParams, sample_checkpoint: Path, plain: dict[str, list[list[int]]]
) -> None:
    """Lengths around every boundary, each crossing one while it verifies."""
    loop = ByHand(sample_checkpoint, num_drafts, num_rows=len(LENGTHS), chunk=128)
    jobs = [loop.add(prompt_of(length), params, stop_ids=STOP_IDS) for length in LENGTHS]
    assert loop.run() == plain[str(params)]
    num_tokens = sum(len(output.token_ids) for job in jobs for output in job.outputs)
    num_steps = sum(bool(output.token_ids) for job in jobs for output in job.outputs)
    assert num_tokens == num_steps if num_drafts == 0 else num_tokens > 1.05 * num_steps


def test_moved_jobs_go_on_as_if_nothing_had_happened(
    sample_checkpoint: Path, plain: dict[str, list[list[int]]]
) -> None:
    """Preempted at random steps; they resume from a snapshot made by a cut or by a fold, or from nothing."""
    rng = random.Random(4)
    loop = ByHand(sample_checkpoint, 3, num_rows=len(LENGTHS) + 2, rng=random.Random(5))
    jobs = [loop.add(prompt_of(length), DRAWN, stop_ids=STOP_IDS) for length in LENGTHS]
    reference, num_moves = Reference(loop), 0
    while any(not job.is_done for job in jobs):
        loop.step()
        job = rng.choice(jobs)
        if not job.is_done:
            loop.move(job, rng.choice([0, *(b for b in job.snapshots if b < len(job.known))]))
            loop.step()
            check_drafts(reference, job)
            num_moves += 1
    assert num_moves > 8
    assert [job.output_ids[:24] for job in jobs] == plain[str(DRAWN)]


@pytest.mark.parametrize(
    ("budget", "num_pages"), [(64, 200), (192, 200), (2048, 200), (2048, 17)], ids=["64", "192", "2048", "few pages"]
)
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_the_scheduler_gives_the_same_with_drafts(
    params: SamplingParams, budget: int, num_pages: int, sample_checkpoint: Path
) -> None:
    """Chunks, hits on what others left, preemption for want of pages; in debug mode, so that bytes are proved."""
    prompts, params = [prompt_of(n) for n in (1, 62, 63, 64, 66, 127, 128, 190)], replace(params, max_tokens=90)
    prompts += [prompts[5] + prompt_of(40), prompts[7] + prompt_of(3)]
    expected = answers(Loop(sample_checkpoint, enable_prefix_caching=False), prompts, params)
    loop = Loop(sample_checkpoint, budget, num_pages=num_pages, num_drafts=3)
    assert answers(loop, prompts, params) == expected
    assert answers(loop, prompts, params) == expected
    loop.scheduler.check()
    assert loop.scheduler.draft_counts.num_accepted > 60
    assert (loop.scheduler.num_preemptions > 0) == (num_pages < 200)


@pytest.mark.parametrize("budget", [128, 2048])
def test_S3_F11_prompt_logprobs_come_from_their_own_positions(budget: int, sample_checkpoint: Path) -> None:
    """Chunked and batched beside rows that verify drafts: the log-softmax of the prompt's own logits."""
    loop = Loop(sample_checkpoint, budget, num_drafts=3)
    loop.add(prompt_of(70), replace(GREEDY, max_tokens=60))
    for _ in range(4):
        loop.step()
    lengths = (1, 64, 150)
    asked = [loop.add(prompt_of(n), replace(GREEDY, prompt_logprobs=2)) for n in lengths]
    loop.run()
    for request_id, length in zip(asked, lengths, strict=True):
        known = prompt_of(length)
        run = driver(loop.runner._model)  # type: ignore[arg-type]
        with torch.no_grad():
            logits = loop.runner._model.logits(run.step(prefill=[(run.open(), known)])[0])
        expected = torch.log_softmax(logits.double(), dim=-1)
        found = loop.chunks[request_id][0].prompt_logprobs
        assert found is not None and len(found) == length and found[0] is None
        for position in range(1, length):
            entry = found[position]
            assert entry is not None and entry.token_id == known[position]
            assert entry.logprob == pytest.approx(float(expected[position - 1, known[position]]), abs=2e-4)
    assert any({row.kind for row in plan.rows} == {RowKind.VERIFY, RowKind.PREFILL} for plan in loop.plans), (
        "no step had both"
    )


def test_drafts_end_where_the_context_ends(sample_checkpoint: Path) -> None:
    """The last positions of the context have pages, what lies behind has none; a row that has room drafts on."""
    params = replace(GREEDY, max_tokens=100)
    found = []
    for num_drafts in (0, 5):
        loop = ByHand(sample_checkpoint, num_drafts, max_model_len=128)
        full, other = loop.add(prompt_of(100), params), loop.add(prompt_of(20), params)
        while len(full.known) < 129:
            loop.step()
        found.append((full.known, other.known[:40]))
        lengths = np.cumsum([100, *(len(output.token_ids) for output in full.outputs)])
        reaches = [int(n) + len(output.draft_ids) for n, output in zip(lengths[1:], full.outputs, strict=True)]
        assert max(reaches) <= 128 + 1
        assert not num_drafts or (full.outputs[-1].draft_ids == () and other.outputs[-1].draft_ids)
    assert found[0] == found[1]


def test_other_ranks_draft_alike(sample_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They hear the plan and the step's tokens; their pages and hiddens are rank 0's, bit for bit."""
    sent: list[np.ndarray] = []
    monkeypatch.setattr("deltaserve.runner.runner.send_array", lambda _, array: sent.append(array))
    monkeypatch.setattr("deltaserve.runner.runner.receive_array", lambda _: sent.pop(0))
    leader, follower = (ByHand(sample_checkpoint, 3, chunk=64) for _ in range(2))
    leader.runner._mesh = replace(leader.runner._mesh, size=2)
    for length, params in ((150, GREEDY), (10, DRAWN), (64, replace(GREEDY, prompt_logprobs=0))):
        leader.add(prompt_of(length), replace(params, max_tokens=70))
    while any(not job.is_done for job in leader.jobs):
        leader.step()
        follower.runner.follow(sent.pop(0))
        assert sent == []
    ours, theirs = leader.runner._pools, follower.runner._pools
    for name in ("pages", "states", "hiddens", "last_hiddens", "ring_u", "conv_ring"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_tokens_of_a_step_travel_flat() -> None:
    for tokens in ([], [()], [(5,), (), (1, 2, 3), (0,)]):
        assert decode_tokens(encode_tokens(tokens)) == tokens


@pytest.mark.parametrize("target", [1.0, 1.5, 2.937, 3.3, 4.0])
def test_synthetic_acceptance_meets_its_mean(target: float) -> None:
    synthetic = SyntheticAcceptance(3, target)
    for row in range(3):
        synthetic.admit(row, row * 17)
        counts = [1 + synthetic.next(row, 3) for _ in range(10_000)]
        assert abs(sum(counts) / len(counts) - target) < 0.001
        assert max(counts) - min(counts) <= 1


def test_synthetic_acceptance_makes_up_for_steps_with_few_drafts() -> None:
    """One step in 64 tokens or so is capped by a boundary; the steps after it owe the rest."""
    synthetic, rng = SyntheticAcceptance(1, 2.937), random.Random(3)
    synthetic.admit(0, 1)
    counts = [1 + synthetic.next(0, rng.choice((0, 1, 3, 3, 3, 3, 3, 3))) for _ in range(10_000)]
    assert abs(sum(counts) / len(counts) - 2.937) < 0.001


def test_short_requests_keep_the_synthetic_mean_too() -> None:
    synthetic, num_tokens = SyntheticAcceptance(1, 2.937), 0
    for request_id in range(1000):
        synthetic.admit(0, request_id)
        num_tokens += sum(1 + synthetic.next(0, 3) for _ in range(10))
    assert abs(num_tokens / 10_000 - 2.937) < 0.001


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_synthetic_runner_accepts_by_schedule(params: SamplingParams, sample_checkpoint: Path) -> None:
    loop = ByHand(sample_checkpoint, 3, synthetic=2.5)
    jobs = [loop.add(prompt_of(length), replace(params, max_tokens=150)) for length in (5, 64)]
    loop.run()
    counts = [count for job in jobs for count in job.verified]
    assert abs(sum(counts) / len(counts) - 2.5) < 2 * len(jobs) / len(counts) + 1e-9
    assert set(counts) <= {1, 2, 3, 4}


def test_a_running_sequence_takes_no_more_state_with_drafts(sample_checkpoint: Path) -> None:
    """Two states and the (k, u, g) ring, whatever the number of drafts; printed: what else a row has."""
    found = []
    for num_drafts in (0, 3):
        pools = ByHand(sample_checkpoint, num_drafts).runner._pools
        state = 2 * pools.states[0].nbytes + sum(ring[0].nbytes for ring in (pools.ring_k, pools.ring_u, pools.ring_g))
        hidden = 0 if pools.last_hiddens is None else pools.last_hiddens[0].nbytes
        print(f"k={num_drafts}: state {state} bytes, conv ring {pools.conv_ring[0].nbytes}, last hidden {hidden}")
        found.append(state)
    assert found[0] == found[1]
