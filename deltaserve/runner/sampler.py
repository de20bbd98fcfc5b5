"""Chooses each row's next tokens by that row's own rules, and reports the probabilities it asked for.

A request's parameters live in tables indexed by its row, written when it is admitted; every step reads them anew by
the rows of its plan. Nothing is indexed by a place in the batch, so rows may come, go and change places freely.

Per step: raw logits are kept for the rows that report probabilities; rows with processors (`processors.py`) change
their logits; then `ops.sampling` filters and draws, with noise keyed by (seed, absolute position of the new token,
token id). A row costs what its own rules cost: an all-greedy batch is one argmax.

On a GPU logits stay there, and the host waits once, for the tokens. Rows that report probabilities or have processors
are copied to the host, where both run.

Drafts are verified by sampling and comparing. Every position of a VERIFY row draws its token x from the distribution
that the target has there, as it would without drafts; the draft after it is accepted if it equals x, and the first x
that differs, or the one behind the last draft, ends the step. So the tokens of a request are those of its own chain
of draws, one for each position: neither their law nor a single one of them depends on drafts. All positions of all
rows are drawn in one call.

A row whose logits are NaN or infinite, or all forbidden, gives an error instead of a token. Its neighbours do not
notice. Where that happens behind accepted drafts, these are given first, and the next step meets the error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.core.errors import LogitsError
from deltaserve.core.plan import Admission, Row, RowKind, RowOutput
from deltaserve.core.types import TokenLogprob
from deltaserve.grammar.compiler import Grammars
from deltaserve.ops import sampling
from deltaserve.runner.processors import Processor, make_processors
from deltaserve.runner.speculative import SyntheticAcceptance

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

    @property
    def needs_host(self) -> bool:
        """Whether its logits must be on the host."""
        return self.num_top is not None or bool(self.processors)


@dataclass(slots=True)
class _Span:
    """A row's part of the step's logits: [first, first + drafts], the last of them after the row's last token.

    `num_told` drafts have been told to the row's processors.
    """

    row: Row
    request: _Request
    first: int
    drafts: tuple[int, ...]
    num_told: int = 0

    @property
    def stop(self) -> int:
        return self.first + len(self.drafts) + 1


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What each position drew, and which positions could draw at all."""

    ids: list[int]
    is_fine: list[bool]
    peaks: list[float]


def num_logits(row: Row) -> int:
    """How many of the row's last tokens need logits so that it can be sampled: all of a VERIFY row's."""
    return len(row.token_ids) if row.kind == RowKind.VERIFY else 1


class Sampler:
    """Rows 0 .. num_rows - 1 over one vocabulary. `synthetic` decides on drafts instead of their comparison."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        synthetic: SyntheticAcceptance | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._synthetic = synthetic
        self._grammars = grammars
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
            make_processors(admission, self._vocab_size, self._grammars),
        )
        self._is_greedy[row] = params.temperature < GREEDY_BELOW
        self._seed_keys[row] = sampling.seed_keys(np.array([params.seed & _SEED_BITS], np.uint64))[0]
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        if self._synthetic is not None:
            self._synthetic.admit(row, admission.request_id)

    def retire(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._requests[row] = None

    def sample(self, rows: Sequence[Row], logits_NV: Tensor) -> list[RowOutput]:
        """One output per row: its new tokens, or an error.

        logits_NV, float32 and changed here, holds for each row in turn the logits after its last `num_logits` tokens.
        """
        spans = self._spans(rows)
        assert spans[-1].stop == len(logits_NV), (spans[-1], logits_NV.shape)
        if logits_NV.device.type == "cpu":
            return self._sample(spans, logits_NV)
        return self._sample_on_device(spans, logits_NV)

    def _sample_on_device(self, spans: Sequence[_Span], logits_NV: Tensor) -> list[RowOutput]:
        """Those spans whose logits the host must see, there; the others where the logits are."""
        plain = [span for span in spans if not span.request.needs_host]
        if len(plain) == len(spans):
            return self._sample(spans, logits_NV)
        watched = [span for span in spans if span.request.needs_host]
        outputs = self._sample(_packed(watched), _part(watched, logits_NV).cpu())
        if plain:
            outputs += self._sample(_packed(plain), _part(plain, logits_NV))
        by_id = {output.request_id: output for output in outputs}
        return [by_id[span.request.id] for span in spans]

    def _sample(self, spans: Sequence[_Span], logits_NV: Tensor) -> list[RowOutput]:
        reporting = [span for span in spans if span.request.num_top is not None]
        raw_MV = logits_NV[[n for span in reporting for n in range(span.first, span.stop)]] if reporting else None
        for span in spans:
            if span.request.processors:
                _apply(span, logits_NV.numpy()[span.first : span.stop])
        drawn = self._choose(spans, logits_NV)
        outputs = [self._settle(span, drawn) for span in spans]
        return outputs if raw_MV is None else _report(spans, outputs, raw_MV)

    def score(self, row: Row, start: int, logits_TV: Tensor) -> tuple[TokenLogprob, ...]:
        """Prompt logprobs: logits_TV[t] follow absolute position start + t of the row's prompt.

        One entry for each position whose successor is a prompt token: the probability of that successor. Raises
        LogitsError if a row of logits is NaN or infinite.
        """
        request = self._request(row)
        successors = request.prompt_ids[start + 1 : start + 1 + len(logits_TV)]
        if not successors:
            return ()
        logits_TV = logits_TV[: len(successors)].cpu()
        peaks_T = logits_TV.numpy().max(axis=1)
        if not np.isfinite(peaks_T).all():
            raise LogitsError(_sentence(float(peaks_T.max())))
        found = sampling.logprobs(logits_TV, np.array(successors, np.int64), request.num_prompt_top)
        return tuple(_entries(found, successors, [request.num_prompt_top] * len(successors)))

    def _request(self, row: Row) -> _Request:
        request = self._requests[row.row]
        assert request is not None and request.id == row.request_id, (row, request)
        return request

    def _spans(self, rows: Sequence[Row]) -> list[_Span]:
        spans, first = [], 0
        for row in rows:
            drafts = row.token_ids[1:] if row.kind == RowKind.VERIFY else ()
            spans.append(_Span(row, self._request(row), first, drafts))
            first += 1 + len(drafts)
        return spans

    def _choose(self, spans: Sequence[_Span], logits_NV: Tensor) -> _Drawn:
        """One draw at every position."""
        places_N, positions_N = _places(spans)
        is_greedy_N = self._is_greedy[places_N]
        if is_greedy_N.all():
            ids_N, peaks_N = sampling.greedy(logits_NV)
        elif logits_NV.device.type != "cpu" or not is_greedy_N.any():
            ids_N, peaks_N = sampling.sample(logits_NV, self._rules(places_N, positions_N))
        else:
            ids_N, peaks_N = sampling.greedy(logits_NV)
            drawn = np.flatnonzero(~is_greedy_N)
            rules = self._rules(places_N[drawn], positions_N[drawn])
            ids_N[drawn], peaks_N[drawn] = sampling.sample(logits_NV[torch.from_numpy(drawn)], rules)
        return _Drawn(ids_N.tolist(), np.isfinite(peaks_N).tolist(), peaks_N.tolist())

    def _rules(self, places_N: Ids, positions_N: Ids) -> sampling.Rules:
        return sampling.Rules(
            np.where(self._is_greedy[places_N], 0.0, self._temperature[places_N]),
            self._top_k[places_N],
            self._top_p[places_N],
            self._min_p[places_N],
            sampling.stream_keys(self._seed_keys[places_N], positions_N),
        )

    def _settle(self, span: _Span, drawn: _Drawn) -> RowOutput:
        """The tokens of one row; its processors hear which ones these are."""
        num_accepted = self._num_accepted(span, drawn)
        tokens, last = span.drafts[:num_accepted], span.first + num_accepted
        error = None
        if drawn.is_fine[last]:
            tokens += (drawn.ids[last],)
        elif not tokens:
            error = _sentence(drawn.peaks[last])
        _tell(span, tokens)
        return RowOutput(span.request.id, token_ids=tokens, error=error)

    def _num_accepted(self, span: _Span, drawn: _Drawn) -> int:
        """How many drafts to keep: none behind a position that drew nothing."""
        if self._synthetic is not None and span.drafts:
            wanted = self._synthetic.next(span.row.row, len(span.drafts))
            ids: Sequence[int] = span.drafts[:wanted]
        else:
            ids = drawn.ids[span.first : span.stop - 1]
        num_accepted = 0
        for token_id, draft, is_fine in zip(ids, span.drafts, drawn.is_fine[span.first :], strict=False):
            if token_id != draft or not is_fine:
                break
            num_accepted += 1
        return num_accepted


def _places(spans: Sequence[_Span]) -> tuple[Ids, Ids]:
    """For each position: the row's place in the tables, and the absolute position of the token that is drawn."""
    numbers = [
        (span.row.row, end)
        for span in spans
        for end in range(
            span.row.start + len(span.row.token_ids) - len(span.drafts), span.row.start + len(span.row.token_ids) + 1
        )
    ]
    places_N, positions_N = np.array(numbers, np.int64).T
    return places_N, positions_N


def _packed(spans: Sequence[_Span]) -> list[_Span]:
    """The same spans, one behind the other."""
    firsts = accumulate((span.stop - span.first for span in spans), initial=0)
    return [replace(span, first=first) for span, first in zip(spans, firsts, strict=False)]


def _part(spans: Sequence[_Span], logits_NV: Tensor) -> Tensor:
    """A copy of the logits of these spans alone."""
    places = [place for span in spans for place in range(span.first, span.stop)]
    return logits_NV[torch.tensor(places).to(logits_NV.device)]


def _apply(span: _Span, logits_WV: Peaks) -> None:
    """The row's rules at each of its positions, as though the drafts before it were accepted.

    It goes no further than a draft that a rule forbids: that draft will be refused.
    """
    for logits_V, draft in zip(logits_WV, (*span.drafts, None), strict=True):
        for processor in span.request.processors:
            processor.apply(logits_V)
        if draft is None or logits_V[draft] == -np.inf:
            return
        for processor in span.request.processors:
            processor.accept(draft)
        span.num_told += 1


def _tell(span: _Span, tokens: Sequence[int]) -> None:
    """From the drafts that processors were told to the tokens that the row keeps."""
    told = span.drafts[: span.num_told]
    num_right = next((n for n, pair in enumerate(zip(told, tokens, strict=False)) if pair[0] != pair[1]), None)
    num_right = min(len(told), len(tokens)) if num_right is None else num_right
    for processor in span.request.processors:
        if told[num_right:]:
            processor.rollback(told[num_right:])
        for token_id in tokens[num_right:]:
            processor.accept(token_id)


def _report(spans: Sequence[_Span], outputs: Sequence[RowOutput], raw_MV: Tensor) -> list[RowOutput]:
    """The outputs with the logprobs that their requests asked for; raw_MV has all positions of those rows in turn."""
    places: list[int] = []
    token_ids: list[int] = []
    num_tops: list[int] = []
    first = 0
    for span, output in zip(spans, outputs, strict=True):
        num_top, num_tokens = span.request.num_top, len(output.token_ids)
        if num_top is not None:
            places += range(first, first + num_tokens)
            token_ids += output.token_ids
            num_tops += [num_top] * num_tokens
            first += len(span.drafts) + 1
    if not places:
        return list(outputs)
    found = sampling.logprobs(raw_MV[places], np.array(token_ids, np.int64), max(num_tops))
    entries = iter(_entries(found, token_ids, num_tops))
    return [
        output
        if span.request.num_top is None or output.error is not None
        else replace(output, logprobs=tuple(next(entries) for _ in output.token_ids))
        for span, output in zip(spans, outputs, strict=True)
    ]


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
