"""Requests driven through a sampler by made-up logits, which depend on request and position alone.

So what a request must say can be had from itself alone, without drafts: its twin.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deltaserve.core.plan import Admission, Logits, Row, RowKind, RowOutput
from deltaserve.core.types import SamplingParams, TokenLogprob
from deltaserve.runner.sampler import Sampler

VOCAB = 300
GREEDY = SamplingParams(temperature=0.0, seed=0)


def hash_logits(request_id: int, position: int) -> Tensor:
    """[VOCAB] float32: what a model would give after `position`, for this request alone."""
    generator = torch.Generator().manual_seed(request_id * 100_003 + position)
    return torch.randn(VOCAB, generator=generator) * 2


@dataclass
class Client:
    """One request driven through a sampler, token by token or with drafts."""

    id: int
    params: SamplingParams
    prompt_ids: tuple[int, ...] = (5, 6, 7)
    stop_ids: tuple[int, ...] = ()
    row: int = 0
    outputs: list[RowOutput] = field(default_factory=list)
    drafts: tuple[int, ...] = ()

    @property
    def output_ids(self) -> tuple[int, ...]:
        return tuple(token_id for output in self.outputs for token_id in output.token_ids)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for output in self.outputs for entry in output.logprobs or ()]

    def admission(self) -> Admission:
        return Admission(self.id, self.row, self.prompt_ids, self.output_ids, self.params, self.stop_ids)

    def plan_row(self) -> Row:
        start = len(self.prompt_ids) + len(self.output_ids) - 1
        kind = RowKind.VERIFY if self.drafts else RowKind.DECODE
        return Row(self.id, self.row, kind, start, (0, *self.drafts), 1, (), 1, 1, 0, (), Logits.LAST, True)

    def logits(self) -> Tensor:
        """[1 + drafts, VOCAB]."""
        start = len(self.prompt_ids) + len(self.output_ids) - 1
        return torch.stack([hash_logits(self.id, start + n) for n in range(1 + len(self.drafts))])


def step(sampler: Sampler, clients: Sequence[Client], logits_NV: Tensor | None = None) -> list[RowOutput]:
    if logits_NV is None:
        logits_NV = torch.cat([client.logits() for client in clients])
    outputs = sampler.sample([client.plan_row() for client in clients], logits_NV)
    for client, output in zip(clients, outputs, strict=True):
        assert output.request_id == client.id
        client.outputs.append(output)
    return outputs


def alone(client: Client, num_tokens: int) -> list[RowOutput]:
    """What the same request gives with nobody beside it."""
    return twin(client, num_tokens).outputs


def twin(client: Client, num_tokens: int) -> Client:
    """The same request, driven to so many tokens with nobody beside it and no drafts."""
    other = replace(client, row=0, outputs=[], drafts=())
    sampler = Sampler(1, VOCAB)
    sampler.admit(other.admission())
    for _ in range(num_tokens):
        step(sampler, [other])
    return other


def random_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 0.3, 1.0, 1.8)),
        top_k=rng.choice((0, 0, 1, 20, 100)),
        top_p=rng.choice((1.0, 0.9, 0.3)),
        min_p=rng.choice((0.0, 0.0, 0.1)),
        seed=rng.choice((rng.getrandbits(64), -rng.getrandbits(60), 7)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.0, 0.7)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.4)),
        logit_bias=rng.choice(({}, {}, {rng.randrange(VOCAB): 6.0})),
        min_tokens=rng.choice((0, 0, 6)),
        logprobs=rng.choice((None, None, 0, 3)),
    )
