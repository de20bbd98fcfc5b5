"""Chooses each row's next token by that row's own rules, and reports the probabilities it asked for.

A request's parameters live in tables indexed by its row, written when it is admitted; every step reads them anew by
the rows of its plan. Nothing is indexed by a place in the batch, so rows may come, go and change places freely.

Per step: raw logits are kept for the rows that report probabilities; rows with processors (`processors.py`) change
their logits; then `ops.sampling` filters and draws, with noise keyed by (seed, absolute position of the new token,
token id). A row costs what its own rules cost: an all-greedy batch is one argmax.

A row whose logits are NaN or infinite, or all forbidden, gives an error instead of a token. Its neighbours do not
notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.core.errors import LogitsError
from deltaserve.core.plan import Admission, Row, RowOutput
from deltaserve.core.types import TokenLogprob
from deltaserve.ops import sampling
from deltaserve.runner.processors import Processor, make_processors

GREEDY_BELOW = 1e-5  # a lower temperature would overflow; vLLM draws the line at the same place
_SEED_BITS = (1 << 64) - 1

Ids = npt.NDArray[np.int64]
Peaks = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Request:
    """What the sampler keeps of a request beside the tables."""

    id: int
    prompt_ids: tuple[int, ...]
    num_top: int | None
    num_prompt_top: int
    processors: tuple[Processor, ...]


class Sampler:
    """Rows 0 .. num_rows - 1 over one vocabulary."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._requests: list[_Request | None] = [None] * num_rows
        self._is_greedy = np.ones(num_rows, np.bool_)
        self._seed_keys = np.zeros(num_rows, np.uint64)
        self._temperature = np.ones(num_rows)
        self._top_k = np.zeros(num_rows, np.int64)
        self._top_p = np.ones(num_rows)
        self._min_p = np.zeros(num_rows)

    def admit(self, admission: Admission) -> None:
        """The request that `admission.row` now belongs to."""
        row, params = admission.row, admission.params
        assert params.seed is not None, "the engine draws a seed at admission"
        self._requests[row] = _Request(
            admission.request_id,
            admission.prompt_ids,
            params.logprobs,
            params.prompt_logprobs or 0,
            make_processors(admission, self._vocab_size),
        )
        self._is_greedy[row] = params.temperature < GREEDY_BELOW
        self._seed_keys[row] = sampling.seed_keys(np.array([params.seed & _SEED_BITS], np.uint64))[0]
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p

    def retire(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._requests[row] = None

    def sample(self, rows: Sequence[Row], logits_NV: Tensor) -> list[RowOutput]:
        """One output per row: a token, or an error. logits_NV[n] follow the last token of rows[n]; float32, changed."""
        requests = [self._request(row) for row in rows]
        reporting = [n for n, request in enumerate(requests) if request.num_top is not None]
        raw_MV = logits_NV[reporting] if reporting else None
        values_NV = logits_NV.numpy()
        for n, request in enumerate(requests):
            for processor in request.processors:
                processor.apply(values_NV[n])
        ids_N, peaks_N = self._choose(rows, logits_NV)
        outputs = [
            RowOutput(request.id, token_ids=(token_id,)) if is_fine else RowOutput(request.id, error=_sentence(peak))
            for request, token_id, is_fine, peak in zip(
                requests, ids_N.tolist(), np.isfinite(peaks_N).tolist(), peaks_N.tolist(), strict=True
            )
        ]
        if raw_MV is not None:
            self._report(outputs, requests, reporting, raw_MV, ids_N)
        for request, output in zip(requests, outputs, strict=True):
            for processor in request.processors if output.error is None else ():
                processor.accept(output.token_ids[0])
        return outputs

    def score(self, row: Row, start: int, logits_TV: Tensor) -> tuple[TokenLogprob, ...]:
        """Prompt logprobs: logits_TV[t] follow absolute position start + t of the row's prompt.

        One entry for each position whose successor is a prompt token: the probability of that successor. Raises
        LogitsError if a row of logits is NaN or infinite.
        """
        request = self._request(row)
        successors = request.prompt_ids[start + 1 : start + 1 + len(logits_TV)]
        if not successors:
            return ()
        logits_TV = logits_TV[: len(successors)]
        peaks_T = logits_TV.numpy().max(axis=1)
        if not np.isfinite(peaks_T).all():
            raise LogitsError(_sentence(float(peaks_T.max())))
        found = sampling.logprobs(logits_TV, np.array(successors, np.int64), request.num_prompt_top)
        return tuple(_entries(found, successors, [request.num_prompt_top] * len(successors)))

    def _request(self, row: Row) -> _Request:
        request = self._requests[row.row]
        assert request is not None and request.id == row.request_id, (row, request)
        return request

    def _choose(self, rows: Sequence[Row], logits_NV: Tensor) -> tuple[Ids, Peaks]:
        places_N = np.array([row.row for row in rows])
        is_greedy_N = self._is_greedy[places_N]
        if is_greedy_N.all():
            return sampling.greedy(logits_NV)
        if not is_greedy_N.any():
            return sampling.sample(logits_NV, self._rules(rows, places_N))
        ids_N, peaks_N = sampling.greedy(logits_NV)
        drawn = np.flatnonzero(~is_greedy_N)
        rules = self._rules([rows[n] for n in drawn.tolist()], places_N[drawn])
        ids_N[drawn], peaks_N[drawn] = sampling.sample(logits_NV[torch.from_numpy(drawn)], rules)
        return ids_N, peaks_N

    def _rules(self, rows: Sequence[Row], places_N: Ids) -> sampling.Rules:
        positions_N = np.array([row.start + len(row.token_ids) for row in rows])
        return sampling.Rules(
            self._temperature[places_N],
            self._top_k[places_N],
            self._top_p[places_N],
            self._min_p[places_N],
            sampling.stream_keys(self._seed_keys[places_N], positions_N),
        )

    def _report(
        self, outputs: list[RowOutput], requests: Sequence[_Request], reporting: list[int], raw_MV: Tensor, ids_N: Ids
    ) -> None:
        """Puts the logprobs of rows `reporting` into their outputs."""
        num_tops = [requests[n].num_top or 0 for n in reporting]
        ids_M = ids_N[reporting]
        entries = _entries(sampling.logprobs(raw_MV, ids_M, max(num_tops)), ids_M.tolist(), num_tops)
        for n, entry in zip(reporting, entries, strict=True):
            if outputs[n].error is None:
                outputs[n] = RowOutput(outputs[n].request_id, outputs[n].token_ids, logprobs=(entry,))


def _entries(found: sampling.Logprobs, token_ids: Sequence[int], num_tops: Sequence[int]) -> list[TokenLogprob]:
    columns = (found.chosen_N.tolist(), found.rank_N.tolist(), found.top_ids_NM.tolist(), found.top_NM.tolist())
    return [
        TokenLogprob(token_id, chosen, rank, tuple(zip(top_ids[:num_top], top[:num_top], strict=True)))
        for token_id, num_top, chosen, rank, top_ids, top in zip(token_ids, num_tops, *columns, strict=True)
    ]


def _sentence(peak: float) -> str:
    """What went wrong in a row whose highest logit is `peak`."""
    if peak == -np.inf:
        return "no token is left to choose from: the request's rules forbid the whole vocabulary"
    return "the model's logits are not finite numbers (NaN or infinity); the request cannot go on"
