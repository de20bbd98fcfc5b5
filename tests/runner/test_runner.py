"""The runner with a small real model under the real scheduler: one answer on every path, and failures that stay small.

Every loop poisons pages, slots and rows as they are given back, so a stale read shows as an error, not as luck.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from deltaserve.core.plan import DUMMY_PAGE, EMPTY_SLOT, OpKind, RowKind, StepPlan
from deltaserve.core.types import FinishReason, SamplingParams
from deltaserve.model.inputs import BatchInputs
from deltaserve.runner.runner import SCORED_PIECE
from tests.runner.loop import Loop, answers

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, seed=0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=0.8, top_k=20, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.5, seed=5)
LENGTHS = (1, 2, 3, 31, 62, 63, 64, 65, 66, 100, 126, 127, 128, 129, 130)
BUDGETS = (64, 65, 127, 128, 192, 1000)


def prompt_of(length: int) -> list[int]:
    return torch.randint(0, 1000, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.fixture(scope="module")
def whole(sample_checkpoint: Path) -> dict[str, list[list[int]]]:
    """Each prompt alone and in one piece."""
    found = {}
    for params in (GREEDY, DRAWN):
        found[str(params)] = [answers(Loop(sample_checkpoint), [prompt_of(n)], params)[0] for n in LENGTHS]
    return found


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_chunks_and_batches_give_what_a_lone_whole_prompt_gives(
    budget: int, params: SamplingParams, sample_checkpoint: Path, whole: dict[str, list[list[int]]]
) -> None:
    loop = Loop(sample_checkpoint, budget)
    assert answers(loop, [prompt_of(n) for n in LENGTHS], params) == whole[str(params)]
    assert max(plan.num_tokens for plan in loop.plans) <= budget
    assert max(len(plan.rows) for plan in loop.plans) > 1


def test_preempted_requests_give_the_same(sample_checkpoint: Path) -> None:
    """Pages for about half of what the requests grow to."""
    prompts, params = [prompt_of(n) for n in (50, 60, 61, 62, 63, 64)], replace(DRAWN, max_tokens=150)
    roomy, tight = Loop(sample_checkpoint), Loop(sample_checkpoint, num_pages=17)
    assert answers(tight, prompts, params) == answers(roomy, prompts, params)
    assert tight.scheduler.num_preemptions > 0 and roomy.scheduler.num_preemptions == 0


def test_greedy_equals_transformers(sample_checkpoint: Path) -> None:
    oracle = transformers.AutoModelForCausalLM.from_pretrained(sample_checkpoint, dtype=torch.float32)
    params, lengths = replace(GREEDY, max_tokens=70), (1, 63, 130)
    expected = []
    for length in lengths:
        ids = torch.tensor([prompt_of(length)])
        options = {"max_new_tokens": 70, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected.append(oracle.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, length:].tolist())
    assert answers(Loop(sample_checkpoint, 64), [prompt_of(n) for n in lengths], params) == expected


@pytest.mark.parametrize("budget", [64, 127, 2048])
def test_prompt_logprobs_equal_transformers(budget: int, sample_checkpoint: Path) -> None:
    """Chunked and batched with prompts that did not ask."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(sample_checkpoint, dtype=torch.float32)
    loop, lengths = Loop(sample_checkpoint, budget), (1, 70, 64, 200)
    loop.add(prompt_of(90), GREEDY)
    asked = [loop.add(prompt_of(n), replace(GREEDY, prompt_logprobs=3, logprobs=1)) for n in lengths]
    loop.add(prompt_of(33), GREEDY)
    loop.run()
    assert loop.chunks[0][0].prompt_logprobs is None
    for request_id, length in zip(asked, lengths, strict=True):
        ids = prompt_of(length)
        with torch.no_grad():
            expected = torch.log_softmax(oracle(torch.tensor([ids])).logits[0].double(), dim=-1)
        found = loop.chunks[request_id][0].prompt_logprobs
        assert found is not None and len(found) == length and found[0] is None
        assert all(chunk.prompt_logprobs is None for chunk in loop.chunks[request_id][1:])
        for position in range(1, length):
            entry = found[position]
            assert entry is not None and entry.token_id == ids[position]
            assert entry.logprob == pytest.approx(float(expected[position - 1, ids[position]]), abs=2e-4)
            assert [t for t, _ in entry.top] == expected[position - 1].topk(3).indices.tolist()
        first = loop.chunks[request_id][0]
        assert first.logprobs is not None
        assert first.logprobs[0].logprob == pytest.approx(float(expected[-1, first.token_ids[0]]), abs=2e-4)


@pytest.mark.parametrize(
    "cache",
    [
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8_e4m3", "state_dtype": "float16"},
        {"state_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_narrow_caches_give_one_answer_on_every_path_too(cache: dict[str, str], sample_checkpoint: Path) -> None:
    prompts, params = [prompt_of(n) for n in (63, 130)], replace(GREEDY, max_tokens=70)
    expected = [answers(Loop(sample_checkpoint, **cache), [prompt], params)[0] for prompt in prompts]
    assert answers(Loop(sample_checkpoint, 64, **cache), prompts, params) == expected


class Spy:
    """A model that records its calls, and can be told to fail or to give NaN."""

    def __init__(self, model: object) -> None:
        self.model = model
        self.calls: list[tuple[str, Tensor]] = []
        self.num_failures = 0
        self.is_bad = lambda hidden: torch.zeros(len(hidden), dtype=torch.bool)

    def __call__(self, inputs: BatchInputs) -> Tensor:
        self.calls.append(("forward", inputs.token_ids_T.clone()))
        hidden_TD: Tensor = self.model(inputs)  # type: ignore[operator]
        if self.num_failures:
            self.num_failures -= 1
            raise MemoryError("no memory for this step")
        return hidden_TD

    def logits(self, hidden_ND: Tensor) -> Tensor:
        self.calls.append(("logits", hidden_ND.clone()))
        logits: Tensor = self.model.logits(hidden_ND)  # type: ignore[attr-defined]
        logits[self.is_bad(hidden_ND)] = math.nan
        return logits


def spied(loop: Loop) -> Spy:
    spy = Spy(loop.runner._model)
    loop.runner._model = spy
    return spy


@pytest.mark.parametrize("failing_step", [0, 2, 5, 40])
def test_a_step_that_failed_costs_the_requests_in_it_and_no_others(failing_step: int, sample_checkpoint: Path) -> None:
    """It fails after the model has written. One request is out of it, in the queue; others come later."""
    prompts, params = [prompt_of(n) for n in (60, 130, 70)], replace(DRAWN, max_tokens=70)
    expected = answers(Loop(sample_checkpoint, 64), prompts, params)
    loop = Loop(sample_checkpoint, 64, num_rows=2)
    spy = spied(loop)
    for prompt in prompts:
        loop.add(prompt, params)
    for _ in range(failing_step):
        loop.step()
    spy.num_failures = 1
    with pytest.raises(MemoryError):
        loop.step()
    failed = {row.request_id for row in loop.plans[-1].rows}
    loop.give_up()
    loop.run()
    survivors = set(range(3)) - failed
    assert survivors and all(loop.tokens(request_id) == expected[request_id] for request_id in survivors)
    assert answers(loop, prompts, params) == expected


@pytest.mark.parametrize(
    ("params", "position"),
    [(GREEDY, 69), (DRAWN, 69), (replace(GREEDY, prompt_logprobs=1), 69), (replace(GREEDY, prompt_logprobs=1), 66)],
    ids=["greedy", "drawn", "prompt, last", "prompt, inside"],
)
def test_nan_logits_end_one_request_with_an_error(
    params: SamplingParams, position: int, sample_checkpoint: Path
) -> None:
    """One prompt position of the second request gives NaN; its neighbours and a later request are as without it."""
    prompts = [prompt_of(n) for n in (40, 70, 64)]
    expected = answers(Loop(sample_checkpoint), prompts, params)
    probe = Loop(sample_checkpoint)
    probe_spy = spied(probe)
    answers(probe, [prompts[1]], replace(GREEDY, prompt_logprobs=0))
    bad_hidden = torch.cat([hidden for call, hidden in probe_spy.calls if call == "logits"])[position]
    loop = Loop(sample_checkpoint)
    spied(loop).is_bad = lambda hidden: (hidden - bad_hidden).abs().amax(dim=1) < 1e-4
    found = answers(loop, prompts, params)
    assert [found[0], found[2]] == [expected[0], expected[2]]
    (chunk,) = loop.chunks[1]
    assert chunk.finish_reason is FinishReason.ERROR and chunk.token_ids == ()
    assert chunk.error is not None and "not finite" in chunk.error
    assert answers(loop, [prompts[2]], params) == [expected[2]]
    loop.scheduler.check()


def test_other_ranks_make_the_same_calls(sample_checkpoint: Path) -> None:
    """A follower is given nothing but the flat plans; forward and logits calls equal rank 0's, in order and value."""
    leader, follower = Loop(sample_checkpoint, 128), Loop(sample_checkpoint, 128)
    leader_spy, follower_spy = spied(leader), spied(follower)
    for n, params in ((150, replace(DRAWN, prompt_logprobs=0)), (10, GREEDY), (64, replace(GREEDY, prompt_logprobs=2))):
        leader.add(prompt_of(n), replace(params, max_tokens=70))
    while leader.scheduler.has_work:
        leader.step()
        follower.runner.follow(leader.plans[-1].encode())
    assert [name for name, _ in follower_spy.calls] == [name for name, _ in leader_spy.calls]
    for (_, theirs), (_, ours) in zip(follower_spy.calls, leader_spy.calls, strict=True):
        assert torch.equal(theirs, ours)


def test_other_ranks_move_the_same_blocks(sample_checkpoint: Path) -> None:
    """Four prompts, pages for one and a half: what they leave goes to the host and comes back, on both ranks alike."""
    settings = {"num_pages": 16, "num_snapshots": 1, "host_cache_bytes": 1 << 23}
    leader, follower = (Loop(sample_checkpoint, 128, num_rows=1, **settings) for _ in range(2))
    for n in (*range(650, 654), *range(650, 654)):
        leader.add(prompt_of(n), replace(GREEDY, max_tokens=3))
        while leader.scheduler.has_work:
            leader.step()
            follower.runner.follow(leader.plans[-1].encode())
    kinds = {op.kind for plan in leader.plans for op in plan.block_ops}
    assert kinds == set(OpKind)
    stats = leader.manager.stats
    assert min(stats.pages_restored, stats.snapshots_restored, stats.pages_saved) > 0
    ours, theirs = leader.runner._mover, follower.runner._mover
    for is_slot in (False, True):
        for pools, others in ((ours._pools, theirs._pools), (ours._host, theirs._host)):
            assert pools is not None and others is not None
            for tensor, other in zip(pools.block_fields(is_slot), others.block_fields(is_slot), strict=True):
                assert torch.equal(tensor.nan_to_num(7.0), other.nan_to_num(7.0))


def test_s3_f08_padding_writes_to_nothing_that_anybody_owns(sample_checkpoint: Path) -> None:
    """Row S3-F08: rows with more and fewer drafts are padded to one width; other pages and slots keep their bytes."""
    loop = Loop(sample_checkpoint, num_drafts=3, debug=False)
    for n, num_tokens in ((60, 20), (63, 9), (126, 30), (5, 2), (64, 12)):
        loop.add(prompt_of(n), replace(DRAWN, max_tokens=num_tokens))
    pools, owned = loop.runner._pools, loop.runner._builder.pages
    widths = set()
    while loop.scheduler.has_work:
        pages, states = pools.pages.clone(), pools.states.clone()
        loop.step()
        rows = loop.plans[-1].rows
        widths.add(len({len(row.token_ids) for row in rows if row.kind is RowKind.VERIFY}))
        others = sorted(set(range(len(pages))) - {int(page) for row in rows for page in owned[row.row]} - {DUMMY_PAGE})
        assert torch.equal(pools.pages[others], pages[others])
        written = {row.slot_out for row in rows if row.slot_out != row.slot_in}
        kept = sorted(set(range(len(states))) - written - {cut.slot for row in rows for cut in row.cuts})
        assert EMPTY_SLOT in kept and torch.equal(pools.states[kept], states[kept])
    assert max(widths) > 1, "nothing was padded"


def test_a_step_without_hits_moves_nothing(sample_checkpoint: Path) -> None:
    """Outside debug mode a cold request costs no op, with caching on."""
    loop = Loop(sample_checkpoint, debug=False)
    answers(loop, [prompt_of(n) for n in (70, 130)], GREEDY)
    assert all(plan.block_ops == () for plan in loop.plans)


def test_prompt_logits_come_in_pieces(sample_checkpoint: Path) -> None:
    loop = Loop(sample_checkpoint)
    spy = spied(loop)
    loop.add(prompt_of(300), replace(GREEDY, prompt_logprobs=0, max_tokens=1))
    loop.run()
    pieces = [len(hidden) for call, hidden in spy.calls if call == "logits"]
    assert max(pieces) <= SCORED_PIECE and sum(pieces) == 300 + 1


def test_the_runner_sends_each_plan_once(sample_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On several ranks: one flat array a step, before the model runs, from which the plan's rows can be read."""
    sent: list[StepPlan] = []

    def record(_: object, flat: np.ndarray) -> None:
        sent.append(StepPlan.decode(flat))

    monkeypatch.setattr("deltaserve.runner.runner.send_array", record)
    loop = Loop(sample_checkpoint)
    loop.runner._mesh = replace(loop.runner._mesh, size=2)
    loop.add(prompt_of(70), replace(GREEDY, max_tokens=3))
    loop.run()
    assert [plan.rows for plan in sent] == [plan.rows for plan in loop.plans]
