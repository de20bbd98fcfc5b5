"""Executes plans: the same forward on every rank, choice of tokens on rank 0.

    rank 0       plan -> flat array to the other ranks -> block ops -> batch -> forward -> logits -> tokens
    other ranks           flat array                   -> block ops -> batch -> forward -> logits

With drafts a step has a second half (`speculative.py`):

    rank 0       tokens -> flat array to the other ranks -> draft head -> drafts
    other ranks            flat array                    -> draft head

Every rank computes the same logits calls in the same order, since the exchange inside them needs all ranks: first, for
each row with Logits.ALL in plan order, its positions in pieces of at most SCORED_PIECE (a vocabulary is too wide for a
long prompt at once), then one call for all rows that give a token.

A step is executed once. An exception or an interrupt in the middle of one leaves the rings of its rows half written
(a fold reads entries that the same step then overwrites), so the requests of its plan must end; what other requests
have is untouched, and new ones may take the same rows. With several ranks an exception on one of them leaves the others
waiting in an exchange; the processes must then end, and their launcher sees to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.cache.layout import PoolSizes, num_pages_for
from deltaserve.cache.storage import CachePools, HostPools
from deltaserve.core.errors import LogitsError
from deltaserve.core.plan import RowOutput, StepOutput, StepPlan
from deltaserve.core.types import TokenLogprob
from deltaserve.grammar.compiler import Grammars
from deltaserve.model.inputs import BatchInputs, CacheTensors
from deltaserve.parallel.group import receive_array, send_array
from deltaserve.parallel.mesh import SINGLE, Mesh
from deltaserve.runner.batch import Batch, BatchBuilder, Scored
from deltaserve.runner.block_ops import BlockMover
from deltaserve.runner.sampler import Sampler
from deltaserve.runner.speculative import Drafter, DraftModel, SyntheticAcceptance, decode_tokens, encode_tokens

SCORED_PIECE = 64


class Model(DraftModel, Protocol):
    """What the runner needs of a model: see `model.qwen3_5`. It drafts only where the pools have room for drafts."""

    def __call__(self, inputs: BatchInputs) -> Tensor:
        """Hidden [T, D]; writes the caches."""


class ModelRunner:
    """One rank's model, its pools and its rows. Calls come one at a time."""

    def __init__(
        self,
        model: Model,
        pools: CachePools,
        sizes: PoolSizes,
        vocab_size: int,
        mesh: Mesh = SINGLE,
        debug_checks: bool = False,
        host: HostPools | None = None,
        synthetic_acceptance: float | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._model = model
        self._pools = pools
        self._mesh = mesh
        self._debug_checks = debug_checks
        self._mover = BlockMover(pools, host)
        fields = {field.name: getattr(pools, field.name) for field in dataclasses.fields(pools)}
        caches = CacheTensors(**fields)
        self._builder = BatchBuilder(sizes.num_rows, num_pages_for(sizes.max_model_len), caches)
        has_drafts = caches.last_hiddens is not None
        self._drafter = Drafter(model, caches, self._builder.pages) if has_drafts else None
        synthetic = SyntheticAcceptance(sizes.num_rows, synthetic_acceptance) if synthetic_acceptance else None
        self._sampler = Sampler(sizes.num_rows, vocab_size, synthetic, grammars)

    def execute(self, plan: StepPlan) -> StepOutput:
        """Rank 0: run one step, on the other ranks too. After an exception the requests of the plan must end."""
        self._sampler.retire(plan.retired)
        for admission in plan.admitted:
            self._sampler.admit(admission)
        with torch.inference_mode():
            if self._debug_checks:
                self._pools.poison(rows=plan.retired)
            if self._mesh.size > 1:
                send_array(self._mesh, plan.encode())
            self._mover.carry_out(plan.block_ops)
            batch = self._builder.build(plan)
            hidden_TD = self._model(batch.inputs)
            scores = [self._score(scored, hidden_TD) for scored in batch.scored]
            sampled = self._sampler.sample(batch.sampled, self._logits(batch, hidden_TD)) if batch.sampled else []
            outputs = _outputs(plan, sampled, scores)
            if self._drafter is not None:
                outputs = self._with_drafts(self._drafter, plan, batch, hidden_TD, outputs)
        return StepOutput(plan.step_id, outputs)

    def _with_drafts(
        self, drafter: Drafter, plan: StepPlan, batch: Batch, hidden_TD: Tensor, outputs: tuple[RowOutput, ...]
    ) -> tuple[RowOutput, ...]:
        """The outputs with what the draft head proposes, on all ranks."""
        tokens = [output.token_ids for output in outputs]
        if self._mesh.size > 1:
            send_array(self._mesh, encode_tokens(tokens))
        drafts = drafter.draft(plan.rows, batch.firsts, hidden_TD, tokens)
        return tuple(
            dataclasses.replace(output, draft_ids=found) if found else output
            for output, found in zip(outputs, drafts, strict=True)
        )

    def follow(self, flat: npt.NDArray[np.int32]) -> None:
        """Every other rank: take part in the step that rank 0 sent (`parallel.group.receive_array`)."""
        with torch.inference_mode():
            plan = StepPlan.decode(flat)
            self._mover.carry_out(plan.block_ops)
            batch = self._builder.build(plan)
            hidden_TD = self._model(batch.inputs)
            for scored in batch.scored:
                for _ in self._pieces(scored, hidden_TD):
                    pass
            if batch.sampled:
                self._logits(batch, hidden_TD)
            if self._drafter is not None:
                tokens = decode_tokens(receive_array(self._mesh))
                self._drafter.draft(plan.rows, batch.firsts, hidden_TD, tokens)

    def _logits(self, batch: Batch, hidden_TD: Tensor) -> Tensor:
        return self._model.logits(hidden_TD[batch.sampled_tokens_N])

    def _pieces(self, scored: Scored, hidden_TD: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(absolute position of the first, logits) of a row's positions, piece by piece."""
        for first in range(scored.first, scored.stop, SCORED_PIECE):
            stop = min(first + SCORED_PIECE, scored.stop)
            yield scored.row.start + first - scored.first, self._model.logits(hidden_TD[first:stop])

    def _score(self, scored: Scored, hidden_TD: Tensor) -> RowOutput:
        """Prompt logprobs of one row, or an error. All logits calls are made either way: other ranks make them too."""
        entries: list[TokenLogprob] = []
        error = None
        for start, logits_TV in self._pieces(scored, hidden_TD):
            try:
                entries += self._sampler.score(scored.row, start, logits_TV)
            except LogitsError as reason:
                error = str(reason)
        return RowOutput(scored.row.request_id, prompt_logprobs=tuple(entries), error=error)


def _outputs(plan: StepPlan, sampled: list[RowOutput], scores: list[RowOutput]) -> tuple[RowOutput, ...]:
    """Parallel to the plan's rows."""
    if len(sampled) == len(plan.rows) and not scores:
        return tuple(sampled)
    tokens = {output.request_id: output for output in sampled}
    prompts = {output.request_id: output for output in scores}
    return tuple(_merge(row.request_id, tokens, prompts) for row in plan.rows)


def _merge(request_id: int, tokens: dict[int, RowOutput], prompts: dict[int, RowOutput]) -> RowOutput:
    output = tokens.get(request_id, RowOutput(request_id))
    prompt = prompts.get(request_id)
    if prompt is None:
        return output
    error = prompt.error or output.error
    if error is not None:
        return RowOutput(request_id, error=error)
    return dataclasses.replace(output, prompt_logprobs=prompt.prompt_logprobs)
