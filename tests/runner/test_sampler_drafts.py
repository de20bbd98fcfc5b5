"""Verification of drafts by sampling: the tokens, their law and their logprobs are those of a run without drafts."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from deltaserve.core.plan import Admission, Logits, Row, RowKind
from deltaserve.core.types import SamplingParams
from deltaserve.runner.processors import Processor, Values, make_processors
from deltaserve.runner.sampler import Sampler
from deltaserve.runner.speculative import SyntheticAcceptance
from tests.runner.clients import GREEDY, VOCAB, Client, random_params, step, twin

EVERY_RULE = SamplingParams(
    temperature=0.9,
    top_k=60,
    top_p=0.95,
    min_p=0.01,
    seed=31,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    logit_bias={9: 3.0, 12: -4.0},
    min_tokens=8,
    logprobs=3,
)


def propose(rng: random.Random, client: Client, right: Sequence[int]) -> tuple[int, ...]:
    """Up to 7 drafts: what the twin says, with mistakes, now and then right again behind one."""
    done = len(client.output_ids)
    return tuple(
        token_id if rng.random() < 0.8 else rng.randrange(VOCAB) for token_id in right[done : done + rng.randrange(8)]
    )


def check(client: Client, right: Client) -> None:
    """As far as the client came: tokens and logprobs are the twin's."""
    count = len(client.output_ids)
    assert client.output_ids == right.output_ids[:count]
    assert client.logprobs == right.logprobs[:count]
    assert len(client.logprobs) == (0 if client.params.logprobs is None else count)


@pytest.mark.parametrize("num_drafts", range(1, 8))
@pytest.mark.parametrize("params", [EVERY_RULE, replace(EVERY_RULE, temperature=0.0), SamplingParams(seed=3)], ids=str)
def test_right_drafts_are_accepted_and_wrong_ones_replaced(num_drafts: int, params: SamplingParams) -> None:
    """One wrong draft at each place in turn: the tokens before it are kept, and the right one stands in its place."""
    right = twin(Client(1, params, stop_ids=(4, 5)), 2 * num_drafts + 2)
    for wrong in range(num_drafts + 1):
        client, sampler = Client(1, params, stop_ids=(4, 5)), Sampler(1, VOCAB)
        sampler.admit(client.admission())
        drafts = list(right.output_ids[:num_drafts])
        if wrong < num_drafts:
            drafts[wrong] = (drafts[wrong] + 1) % VOCAB
        client.drafts = tuple(drafts)
        assert step(sampler, [client])[0].token_ids == right.output_ids[: wrong + 1]
        client.drafts = ()
        step(sampler, [client])
        check(client, right)


@pytest.mark.parametrize("seed", range(8))
def test_S3_F01_parameters_follow_their_request_through_reorder_leave_and_join(seed: int) -> None:
    """Rows come, go, are reused, skipped and shuffled, each with its own rules and some with drafts."""
    rng, sampler = random.Random(seed), Sampler(8, VOCAB)
    clients: list[tuple[Client, Client]] = []
    free_rows, num_done, num_saved = list(range(8)), 0, 0
    for number in range(50):
        while free_rows and rng.random() < 0.6:
            row = free_rows.pop(rng.randrange(len(free_rows)))
            prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9)))
            client = Client(seed * 1000 + number * 10 + row, random_params(rng), prompt, (1, 2, 3), row)
            clients.append((client, twin(client, 40)))
            sampler.admit(client.admission())
        present = [pair for pair in clients if rng.random() < 0.8 and len(pair[0].output_ids) < 30]
        rng.shuffle(present)
        for client, right in present:
            client.drafts = propose(rng, client, right.output_ids) if rng.random() < 0.7 else ()
        for output in step(sampler, [client for client, _ in present]) if present else ():
            num_saved += len(output.token_ids) - 1
        for pair in [pair for pair in clients if rng.random() < 0.1]:
            check(*pair)
            clients.remove(pair)
            free_rows.append(pair[0].row)
            sampler.retire([pair[0].row])
            num_done += 1
    for pair in clients:
        check(*pair)
    assert num_done > 10 and num_saved > 50


class Grammar:
    """A language whose next token depends on all before it: each has one remainder by 5, fixed by the state.

    It takes no token from outside, keeps its states on a stack, and goes back by counting.
    """

    def __init__(self, output_ids: Sequence[int] = ()) -> None:
        self.states = [7]
        for token_id in output_ids:
            self.accept(token_id)

    def _remainder(self) -> int:
        return self.states[-1] % 5

    def apply(self, logits_V: Values) -> None:
        logits_V[np.arange(len(logits_V)) % 5 != self._remainder()] = -np.inf

    def accept(self, token_id: int) -> None:
        assert token_id % 5 == self._remainder(), f"{token_id} is not in the language"
        self.states.append(self.states[-1] * 31 + token_id)

    def rollback(self, token_ids: Sequence[int]) -> None:
        del self.states[-len(token_ids) :]


class BadWords:
    """The sequences named never appear whole."""

    def __init__(self, words: Sequence[tuple[int, ...]], output_ids: Sequence[int]) -> None:
        self.words, self.said = words, list(output_ids)

    def apply(self, logits_V: Values) -> None:
        for *before, last in self.words:
            if self.said[len(self.said) - len(before) :] == before:
                logits_V[last] = -np.inf

    def accept(self, token_id: int) -> None:
        self.said.append(token_id)

    def rollback(self, token_ids: Sequence[int]) -> None:
        assert tuple(self.said[-len(token_ids) :]) == tuple(token_ids)
        del self.said[-len(token_ids) :]


def add_rules(monkeypatch: pytest.MonkeyPatch, request_id: int, words: Sequence[tuple[int, ...]] = ()) -> None:
    """The request also obeys the grammar, or never says the words."""

    def make(admission: Admission, vocab_size: int, _: object) -> tuple[Processor, ...]:
        found = make_processors(admission, vocab_size)
        if admission.request_id != request_id:
            return found
        output_ids = admission.output_ids
        return (*found, BadWords(words, output_ids) if words else Grammar(output_ids))

    monkeypatch.setattr("deltaserve.runner.sampler.make_processors", make)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("seed", range(3))
def test_S3_F02_a_grammar_reaches_its_own_row_only(
    seed: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row under a grammar, a free one, and each round a prefill row before or behind them: 100 rounds."""
    add_rules(monkeypatch, request_id=1)
    rng = random.Random(seed)
    bound = Client(1, SamplingParams(temperature=temperature, seed=1, repetition_penalty=1.1), row=1)
    free = Client(2, SamplingParams(temperature=1.5, seed=2, logprobs=1), row=0)
    pairs = [(bound, twin(bound, 220)), (free, twin(free, 220))]
    sampler = Sampler(3, VOCAB)
    for client, _ in pairs:
        sampler.admit(client.admission())
    for number in range(100):
        third = Client(10 + number, random_params(rng), row=2)
        sampler.admit(third.admission())
        for client, right in pairs:
            client.drafts = propose(rng, client, right.output_ids)[:3]
        clients = [bound, free, third]
        rng.shuffle(clients)
        step(sampler, clients)
        sampler.retire([2])
        assert third.outputs == twin(third, 1).outputs
        if len(bound.output_ids) > 200 or len(free.output_ids) > 200:
            break
    for pair in pairs:
        check(*pair)
    Grammar(bound.output_ids)
    assert len(bound.output_ids) > 120


def test_S3_F03_a_rule_of_the_last_row_survives_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are banned for the request in the last row, while the rows before it empty one by one."""
    plain = twin(Client(9, GREEDY, row=3), 40)
    words = [tuple(plain.output_ids[4:6]), tuple(plain.output_ids[10:13]), (plain.output_ids[20],)]
    add_rules(monkeypatch, request_id=9, words=words)
    client = Client(9, GREEDY, row=3)
    right = twin(client, 40)
    sampler, rng = Sampler(4, VOCAB), random.Random(0)
    others = [Client(n, SamplingParams(temperature=1.0, seed=n), row=n) for n in range(3)]
    for each in (*others, client):
        sampler.admit(each.admission())
    while len(client.output_ids) < 30:
        client.drafts = propose(rng, client, right.output_ids)
        step(sampler, [*others, client])
        if others:
            sampler.retire([others.pop(0).row])
    check(client, right)
    said = client.output_ids
    assert said[:5] == plain.output_ids[:5] and said != plain.output_ids[: len(said)]
    assert not any(said[n : n + len(word)] == word for word in words for n in range(len(said)))


@pytest.mark.parametrize(
    "change",
    [{"min_p": 0.4}, {"logit_bias": {5: 12.0}}, {"min_tokens": 12, "logit_bias": {2: 8.0}}],
    ids=["min_p", "logit_bias", "min_tokens"],
)
def test_S3_F04_single_rules_follow_their_row(change: dict[str, object]) -> None:
    """The rule's effect is seen, and is the same after every reorder, with drafts, as alone."""
    params = replace(SamplingParams(temperature=1.2, seed=8), **change)  # type: ignore[arg-type]
    client, rng = Client(5, params, stop_ids=(2,), row=1), random.Random(1)
    right = twin(client, 60)
    assert right.output_ids != twin(replace(client, params=SamplingParams(temperature=1.2, seed=8)), 60).output_ids
    others = [Client(20 + n, SamplingParams(seed=n), row=n) for n in (0, 2)]
    sampler = Sampler(3, VOCAB)
    for each in (client, *others):
        sampler.admit(each.admission())
    while len(client.output_ids) < 40:
        clients = [client, *others]
        rng.shuffle(clients)
        client.drafts = propose(rng, client, right.output_ids)
        step(sampler, clients)
    check(client, right)


def test_S3_F10_the_last_id_of_a_real_vocabulary_is_reported_whole() -> None:
    vocab, sampler = 248_320, Sampler(1, 248_320)
    client = Client(1, replace(GREEDY, logprobs=2), drafts=(vocab - 1,))
    sampler.admit(client.admission())
    logits = torch.zeros(2, vocab)
    logits[0, [vocab - 1, vocab - 2]] = torch.tensor([5.0, 4.0])
    logits[1, [0, vocab - 1]] = torch.tensor([5.0, 4.0])
    output = step(sampler, [client], logits)[0]
    assert output.token_ids == (vocab - 1, 0) and all(type(token_id) is int for token_id in output.token_ids)
    assert output.logprobs is not None
    assert [[token_id for token_id, _ in entry.top] for entry in output.logprobs] == [
        [vocab - 1, vocab - 2],
        [0, vocab - 1],
    ]
    assert [entry.token_id for entry in output.logprobs] == [vocab - 1, 0]


# Chi-square with 7 degrees of freedom exceeds this with probability 1e-4.
CHI_SQUARE_7 = 29.88


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=0.6, logit_bias={2: 1.0}, presence_penalty=0.0)],
    ids=["plain", "rules"],
)
def test_the_law_of_tokens_with_drafts_is_the_targets(params: SamplingParams) -> None:
    """8 tokens, 20,000 seeds, 3 drafts that are mostly the likeliest token: by place in the output, against softmax."""
    num_rows, rng = 4000, np.random.default_rng(5)
    logits_4V = torch.from_numpy(0.7 * rng.standard_normal((4, 8)).astype(np.float32))
    bias = np.array([params.logit_bias.get(token_id, 0.0) for token_id in range(8)])
    counts = np.zeros((4, 8))
    for batch in range(5):
        sampler, rows = Sampler(num_rows, 8), []
        for n in range(num_rows):
            sampler.admit(Admission(n, n, (1, 2), (), replace(params, seed=batch * num_rows + n), ()))
            drafts = np.where(rng.random(3) < 0.7, logits_4V[:3].argmax(1), rng.integers(8, size=3)).tolist()
            rows.append(Row(n, n, RowKind.VERIFY, 1, (2, *drafts), 0, (), 1, 1, 1, (), Logits.ALL, True))
        for output in sampler.sample(rows, logits_4V.repeat(num_rows, 1)):
            for place, token_id in enumerate(output.token_ids):
                counts[place, token_id] += 1
    for place, found in enumerate(counts):
        z = (logits_4V[place].double().numpy() + bias) / params.temperature
        expected = np.exp(z) / np.exp(z).sum() * found.sum()
        assert expected.min() > 5
        assert ((found - expected) ** 2 / expected).sum() < CHI_SQUARE_7, place


@pytest.mark.parametrize("params", [GREEDY, EVERY_RULE], ids=["greedy", "every rule"])
@pytest.mark.parametrize("place", range(4))
def test_logits_that_are_not_finite_cost_what_comes_after_them(params: SamplingParams, place: int) -> None:
    """Behind accepted drafts the step gives these; the next one, which starts there, gives the error."""
    client = Client(1, params)
    right, sampler = twin(client, 6), Sampler(2, VOCAB)
    neighbour = Client(2, params, row=1, drafts=(1, 2))
    for each in (client, neighbour):
        sampler.admit(each.admission())
    client.drafts = right.output_ids[:3]
    logits = torch.cat([client.logits(), neighbour.logits()])
    logits[place, 7] = math.nan
    output, other = step(sampler, [client, neighbour], logits)
    assert other == twin(neighbour, 1).outputs[0]
    if place:
        assert output.error is None and output.token_ids == right.output_ids[:place]
        client.drafts = ()
        output = step(sampler, [client], torch.full((1, VOCAB), math.nan))[0]
    assert output.token_ids == () and output.logprobs is None
    assert output.error is not None and "not finite" in output.error


def test_logits_behind_a_refused_draft_do_not_count() -> None:
    client, sampler = Client(1, EVERY_RULE), Sampler(1, VOCAB)
    right = twin(client, 3)
    sampler.admit(client.admission())
    client.drafts = (right.output_ids[0], (right.output_ids[1] + 1) % VOCAB, 9)
    logits = client.logits()
    logits[2:] = math.nan
    step(sampler, [client], logits)
    client.drafts = ()
    step(sampler, [client])
    check(client, right)
    assert len(client.output_ids) == 3


@pytest.mark.parametrize("params", [GREEDY, EVERY_RULE], ids=["greedy", "every rule"])
def test_synthetic_acceptance_draws_and_reports_all_the_same(params: SamplingParams) -> None:
    """The schedule decides; what comes behind the drafts is drawn, and each token has its true probability."""
    client, sampler = Client(1, replace(params, logprobs=1)), Sampler(1, VOCAB, SyntheticAcceptance(1, 2.937))
    sampler.admit(client.admission())
    counts, rng = [], random.Random(2)
    for _ in range(300):
        client.drafts = tuple(rng.randrange(VOCAB) for _ in range(3))
        logits = client.logits()
        output = step(sampler, [client], logits.clone())[0]
        counts.append(len(output.token_ids))
        assert output.token_ids[:-1] == client.drafts[: counts[-1] - 1]
        assert output.logprobs is not None and len(output.logprobs) == counts[-1]
        for entry, token_id, raw in zip(output.logprobs, output.token_ids, logits, strict=False):
            assert entry.logprob == pytest.approx(float(torch.log_softmax(raw.double(), 0)[token_id]), abs=1e-5)
    assert abs(sum(counts) / 300 - 2.937) < 1 / 300 + 1e-9
