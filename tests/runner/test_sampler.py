"""The sampler's tables and processors: every request gets its own rules, whoever its neighbours are."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from deltaserve.core.errors import LogitsError
from deltaserve.core.plan import Logits, Row, RowKind, RowOutput
from deltaserve.core.types import SamplingParams
from deltaserve.ops import sampling
from deltaserve.runner.sampler import Sampler
from tests.runner.clients import GREEDY, VOCAB, Client, alone, hash_logits, random_params, step


def one(params: SamplingParams, logits: Tensor, **fields: object) -> RowOutput:
    """The first output of a request, from given logits."""
    client = Client(1, params, **fields)  # type: ignore[arg-type]
    sampler = Sampler(1, VOCAB)
    sampler.admit(client.admission())
    return step(sampler, [client], logits[None].clone())[0]


@pytest.mark.parametrize("seed", range(8))
def test_a_request_gives_the_same_whoever_comes_goes_and_moves(seed: int) -> None:
    """Rows admitted, retired, reused, skipped and shuffled at random; each request against itself alone."""
    rng, sampler = random.Random(seed), Sampler(8, VOCAB)
    clients: list[Client] = []
    done: list[Client] = []
    free_rows = list(range(8))
    for number in range(60):
        while free_rows and rng.random() < 0.6:
            row = free_rows.pop(rng.randrange(len(free_rows)))
            prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9)))
            clients.append(Client(seed * 1000 + number * 10 + row, random_params(rng), prompt, (1, 2, 3), row))
            sampler.admit(clients[-1].admission())
        present = [client for client in clients if rng.random() < 0.8]
        rng.shuffle(present)
        if present:
            step(sampler, present)
        for client in [client for client in clients if rng.random() < 0.1]:
            clients.remove(client)
            done.append(client)
            free_rows.append(client.row)
            sampler.retire([client.row])
    assert len(done) > 15
    for client in done:
        assert client.outputs == alone(client, len(client.outputs))


@pytest.mark.parametrize("seed", range(4))
def test_a_preempted_request_continues_as_if_nothing_had_happened(seed: int) -> None:
    rng = random.Random(seed)
    params = replace(random_params(rng), temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.3, min_tokens=7)
    client, sampler = Client(seed, params, (9, 9, 4), (1, 2)), Sampler(4, VOCAB)
    for number in range(12):
        if number % 3 == 0:
            client.row = rng.randrange(4)
            sampler.admit(client.admission())
        step(sampler, [client])
    assert client.outputs == alone(client, 12)


def test_same_seed_same_tokens_other_seed_other_tokens() -> None:
    params = SamplingParams(temperature=1.0, seed=11)
    first = [output.token_ids for output in alone(Client(1, params), 20)]
    assert [output.token_ids for output in alone(Client(1, params), 20)] == first
    assert [output.token_ids for output in alone(Client(1, replace(params, seed=12)), 20)] != first


@pytest.mark.parametrize(("start", "num_tokens"), [(0, 1), (0, 63), (64, 7), (130, 1)])
def test_noise_is_keyed_by_the_absolute_position_of_the_new_token(start: int, num_tokens: int) -> None:
    """However many tokens the row computed before it: a whole prompt, a chunk's end, one decoded token."""
    sampler, client, logits = Sampler(1, VOCAB), Client(1, SamplingParams(seed=21)), hash_logits(1, 1)[None]
    sampler.admit(client.admission())
    row = replace(client.plan_row(), start=start, token_ids=(0,) * num_tokens)
    keys = sampling.stream_keys(sampling.seed_keys(np.array([21], np.uint64)), np.array([start + num_tokens]))
    rules = sampling.Rules(np.ones(1), np.zeros(1, np.int64), np.ones(1), np.zeros(1), keys)
    assert sampler.sample([row], logits)[0].token_ids == tuple(sampling.sample(logits, rules)[0].tolist())


@pytest.mark.parametrize(
    "change",
    [{}, {"temperature": 2.5}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"seed": 22}],
    ids=str,
)
def test_each_parameter_reaches_the_draw(change: dict[str, float]) -> None:
    """Against `ops.sampling` told the rules directly; and each changes some of 40 tokens."""
    usual = SamplingParams(temperature=1.0, seed=21)
    params = replace(usual, **change)  # type: ignore[arg-type]
    tokens = [output.token_ids[0] for output in alone(Client(1, params), 40)]
    positions = np.arange(40) + 3
    keys = sampling.stream_keys(sampling.seed_keys(np.full(40, params.seed, np.uint64)), positions)
    numbers = (params.temperature, params.top_k, params.top_p, params.min_p)
    rules = sampling.Rules(*(np.full(40, number) for number in numbers), keys)
    logits = torch.stack([hash_logits(1, int(position) - 1) for position in positions])
    assert tokens == sampling.sample(logits, rules)[0].tolist()
    if change:
        assert tokens != [output.token_ids[0] for output in alone(Client(1, usual), 40)]


def test_a_seed_of_64_bits_counts_in_full() -> None:
    seeds = (3, 3 + (1 << 40), 3 - (1 << 63), (1 << 64) - 3)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in seeds]
    tokens = {tuple(output.token_ids[0] for output in alone(Client(1, p), 12)) for p in params}
    assert len(tokens) == len(seeds)


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_temperature_zero_is_the_lowest_id_of_the_highest(temperature: float) -> None:
    logits = torch.zeros(VOCAB)
    logits[[200, 40, 41]] = 3.0
    assert one(SamplingParams(temperature=temperature, seed=1), logits).token_ids == (40,)


def penalised(logits: Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> Tensor:
    """The rules, token by token."""
    result, counts = logits.clone(), Counter(output)
    for token_id, bias in params.logit_bias.items():
        result[token_id] += bias
    for token_id in set(prompt) | set(output):
        value = float(result[token_id])
        result[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token_id, count in counts.items():
        result[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return result


@pytest.mark.parametrize("seed", range(12))
def test_penalties_follow_the_rules_over_a_whole_answer(seed: int) -> None:
    """Greedy from logits with few distinct tokens, so that repetition decides; against the rules spelt out."""
    rng = random.Random(seed)
    params = SamplingParams(
        temperature=0.0,
        seed=0,
        repetition_penalty=rng.choice((1.0, 1.15, 0.9, 2.0)),
        frequency_penalty=rng.choice((0.0, 0.21, -0.3)),
        presence_penalty=rng.choice((0.0, 0.37, -0.2)),
        logit_bias={17: 0.5, 3: -1.0},
    )
    prompt = tuple(rng.randrange(30) for _ in range(20))
    client, sampler = Client(1, params, prompt), Sampler(1, VOCAB)
    sampler.admit(client.admission())
    for number in range(60):
        logits = torch.full((VOCAB,), -9.0)
        logits[:30] = torch.randn(30, generator=torch.Generator().manual_seed(seed * 99 + number))
        expected = int(penalised(logits, prompt, client.output_ids, params).argmax())
        assert step(sampler, [client], logits[None])[0].token_ids == (expected,)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 10),
        ({"repetition_penalty": 1.5}, 30),
        ({"presence_penalty": 0.2}, 20),
        ({"frequency_penalty": 0.06}, 20),
        ({"frequency_penalty": 0.02, "presence_penalty": 0.03}, 10),
        ({"logit_bias": {77: 3.5}}, 77),
        ({"logit_bias": {10: -1.0}}, 20),
    ],
)
def test_each_rule_moves_the_choice(change: dict[str, object], expected: int) -> None:
    """10 was said twice, 20 is in the prompt, 30 is new: logits 3.0, 2.9, 2.8."""
    logits = torch.zeros(VOCAB)
    logits[[10, 20, 30]] = torch.tensor([3.0, 2.9, 2.8])
    said = [RowOutput(1, (10,)), RowOutput(1, (10,))]
    params = replace(GREEDY, **change)  # type: ignore[arg-type]
    assert one(params, logits, prompt_ids=(20,), outputs=said).token_ids == (expected,)


@pytest.mark.parametrize("is_preempted", [False, True])
def test_min_tokens_holds_stop_ids_back_and_then_lets_them_go(is_preempted: bool) -> None:
    """Id 5000 is outside this vocabulary: an end-of-sequence id that the model has no row for."""
    client = Client(1, replace(GREEDY, min_tokens=3), stop_ids=(8, 9, 5000))
    sampler = Sampler(1, VOCAB)
    sampler.admit(client.admission())
    logits = torch.zeros(1, VOCAB)
    logits[0, [8, 9, 100]] = torch.tensor([5.0, 4.0, 3.0])
    for number, expected in enumerate((100, 100, 100, 8, 8)):
        if is_preempted and number == 2:
            sampler.admit(client.admission())
        assert step(sampler, [client], logits.clone())[0].token_ids == (expected,)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    """Temperature, filters, bias and penalties move the choice, not the report."""
    params = SamplingParams(
        temperature=0.5,
        top_k=2,
        seed=3,
        logprobs=4,
        logit_bias={50: 30.0},
        repetition_penalty=1.7,
        presence_penalty=1.0,
    )
    logits = hash_logits(4, 4)
    expected = torch.log_softmax(logits.double(), dim=0)
    output = one(params, logits, prompt_ids=(0, 1, 2))
    assert output.logprobs is not None
    (entry,) = output.logprobs
    ranked = expected.argsort(descending=True).tolist()
    assert output.token_ids == (50,) and entry.token_id == 50
    assert entry.logprob == pytest.approx(float(expected[50]), abs=1e-5)
    assert entry.rank == ranked.index(50) + 1
    assert [token_id for token_id, _ in entry.top] == ranked[:4]
    np.testing.assert_allclose([value for _, value in entry.top], expected[ranked[:4]], atol=1e-5)


@pytest.mark.parametrize("asked", [(None, 0, 2, 7), (7, None, 0, 2), (0, 0, 0, 0)])
def test_each_row_gets_as_many_logprobs_as_it_asked_for(asked: tuple[int | None, ...]) -> None:
    clients = [Client(n, replace(GREEDY, logprobs=num_top), row=n) for n, num_top in enumerate(asked)]
    sampler = Sampler(len(clients), VOCAB)
    for client in clients:
        sampler.admit(client.admission())
    for output, num_top in zip(step(sampler, clients), asked, strict=True):
        found = None if output.logprobs is None else [len(entry.top) for entry in output.logprobs]
        assert found == (None if num_top is None else [num_top])


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=4), SamplingParams(seed=4, top_k=20, logprobs=2)])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
def test_logits_that_are_not_finite_end_that_request_only(params: SamplingParams, value: float) -> None:
    clients = [Client(n, params, row=n) for n in range(3)]
    sampler = Sampler(3, VOCAB)
    for client in clients:
        sampler.admit(client.admission())
    logits = torch.cat([client.logits() for client in clients])
    logits[1, 123] = value
    outputs = step(sampler, clients, logits)
    assert outputs[1].token_ids == () and outputs[1].logprobs is None
    assert outputs[1].error is not None and "not finite" in outputs[1].error
    for n in (0, 2):
        assert [outputs[n]] == alone(clients[n], 1)


def test_rules_that_forbid_everything_say_so() -> None:
    logits = torch.full((VOCAB,), -math.inf)
    logits[8] = 1.0
    output = one(replace(GREEDY, min_tokens=1), logits, stop_ids=(8,))
    assert output.token_ids == ()
    assert output.error is not None and "forbid" in output.error


def score_row(client: Client) -> Row:
    return replace(client.plan_row(), kind=RowKind.PREFILL, start=0, token_ids=client.prompt_ids, logits=Logits.ALL)


def test_prompt_logprobs_pair_each_position_with_its_successor() -> None:
    prompt = tuple(range(40, 52))
    client = Client(3, replace(GREEDY, prompt_logprobs=2), prompt)
    sampler = Sampler(1, VOCAB)
    sampler.admit(client.admission())
    logits = torch.stack([hash_logits(3, position) for position in range(len(prompt))])
    expected = torch.log_softmax(logits.double(), dim=1)
    row = score_row(client)
    entries = [
        entry for start, stop in ((0, 5), (5, 11), (11, 12)) for entry in sampler.score(row, start, logits[start:stop])
    ]
    assert [entry.token_id for entry in entries] == list(prompt[1:])
    for position, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(expected[position, prompt[position + 1]]), abs=1e-5)
        assert entry.rank == 1 + int((expected[position] > expected[position, prompt[position + 1]]).sum())
        assert [token_id for token_id, _ in entry.top] == expected[position].argsort(descending=True)[:2].tolist()


def test_prompt_logits_that_are_not_finite_raise_a_named_error() -> None:
    client, sampler = Client(3, replace(GREEDY, prompt_logprobs=0)), Sampler(1, VOCAB)
    sampler.admit(client.admission())
    logits = torch.zeros(3, VOCAB)
    logits[1, 7] = math.nan
    with pytest.raises(LogitsError):
        sampler.score(score_row(client), 0, logits)


def test_a_row_of_a_request_that_was_never_admitted_is_our_own_mistake() -> None:
    sampler = Sampler(2, VOCAB)
    sampler.admit(Client(1, GREEDY).admission())
    with pytest.raises(AssertionError):
        step(sampler, [Client(2, GREEDY)])
    sampler.retire([0])
    with pytest.raises(AssertionError):
        step(sampler, [Client(1, GREEDY)])


@pytest.mark.parametrize("seed", range(4))
def test_rows_split_by_where_their_logits_are_needed_give_what_they_give_together(seed: int) -> None:
    """As on a GPU, where rows with processors or logprobs go through the host. Some carry drafts."""
    rng = random.Random(seed)
    clients = [Client(n, random_params(rng), row=n, drafts=(1, 2)[: rng.randrange(3)]) for n in range(8)]
    rows, logits_NV = [client.plan_row() for client in clients], torch.cat([client.logits() for client in clients])
    together, split = Sampler(8, VOCAB), Sampler(8, VOCAB)
    for client in clients:
        together.admit(client.admission())
        split.admit(client.admission())
    expected = together.sample(rows, logits_NV.clone())
    assert split._sample_on_device(split._spans(rows), logits_NV.clone()) == expected
