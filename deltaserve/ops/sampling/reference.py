"""Choosing tokens from logits, and the probabilities to report.

The rules and their order, as vLLM's sampler applies them (v1, `Sampler.forward`): first what a request's own
processors change in its row (`runner.processors`: min_tokens, logit_bias, then repetition, frequency and presence
penalties); then here temperature -> min_p -> top_k -> top_p -> draw. Reported probabilities are taken from the raw
logits, before all of them.

    z = (logit - max) / temperature
    min_p   keeps z >= log(min_p), that is p >= min_p * p_max
    top_k   keeps the k first in the order of `order.py` (ties: lowest id; vLLM keeps all that equal the k-th)
    top_p   over what is left, renormalised: keeps a token if those before it hold less than top_p of the mass
    draw    argmax of z + Gumbel noise of (seed, position, token) over what is left: see `noise.py`

The first token survives every rule. A row never depends on its neighbours: its own parameters choose its path, sums
run along one row only, in a sequence that padding does not change, and equals are settled by id:

| path  | rows                                | reads                                                        |
| ----- | ----------------------------------- | ------------------------------------------------------------ |
| -     | greedy, `greedy`                    | one argmax                                                   |
| top_k | 1 <= top_k < V                      | once for block maxima, then the k candidates                 |
| mass  | else, with top_p < 1 or min_p > 0   | weights of all tokens; sorts and draws those that can be kept |
| any   | else                                | all; noise for every token                                   |

Rows of one path are worked on together, in groups of like width so that a row with many candidates does not widen
the others.

A row whose logits hold NaN or +inf, or nothing but -inf, has no finite peak: the caller must look at the returned
peaks before it trusts the ids. Arrays other than logits are on the host, where the rules are known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from deltaserve.ops.sampling import noise, order

_ANY, _MASS = 0, 1  # paths; a higher one is log2 of the most candidates that a top_k group has
_LEAST_LOG2 = 6
_LANES = 16  # candidate arrays are padded to whole vectors, so that no value comes from a remainder loop
_CHUNK = 16384  # numbers worked on at a time where all of a vocabulary gets noise: stays in the first-level cache

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Peaks = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Rules:
    """Parameters of N rows. temperature > 0; top_k <= 0, top_p >= 1 and min_p <= 0 are off; keys of `stream_keys`."""

    temperature_N: Floats
    top_k_N: Ids
    top_p_N: Floats
    min_p_N: Floats
    keys_N: npt.NDArray[np.uint64]

    def take(self, rows: Ids) -> Rules:
        return Rules(
            self.temperature_N[rows], self.top_k_N[rows], self.top_p_N[rows], self.min_p_N[rows], self.keys_N[rows]
        )


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural-log probabilities of one token a row, its rank (1: no other is likelier), and the M likeliest."""

    chosen_N: Floats
    rank_N: Ids
    top_ids_NM: Ids
    top_NM: Floats


def greedy(logits_NV: Tensor) -> tuple[Ids, Peaks]:
    """Ids [N] of the highest logit (ties: lowest id; NaN counts as highest) and that logit [N]. float32 logits."""
    values_NV = logits_NV.numpy()
    ids_N = values_NV.argmax(axis=1)
    return ids_N, values_NV[np.arange(len(ids_N)), ids_N]


def greedy_ids(logits_NV: Tensor) -> Tensor:
    return torch.from_numpy(greedy(logits_NV)[0])


def sample(logits_NV: Tensor, rules: Rules) -> tuple[Ids, Peaks]:
    """Ids [N] drawn under the rules above, and the highest logit [N] of each row. float32 logits, not changed."""
    paths_N = _paths(rules, logits_NV.shape[1])
    if (paths_N == paths_N[0]).all():
        return _sample_path(int(paths_N[0]), logits_NV, rules)
    ids_N, peaks_N = np.empty(len(paths_N), np.int64), np.empty(len(paths_N), np.float32)
    for path in np.unique(paths_N).tolist():
        rows = np.flatnonzero(paths_N == path)
        ids_N[rows], peaks_N[rows] = _sample_path(path, logits_NV[torch.from_numpy(rows)], rules.take(rows))
    return ids_N, peaks_N


def logprobs(logits_NV: Tensor, ids_N: Ids, num_top: int) -> Logprobs:
    """Log-softmax of raw float32 logits: at ids[n] of row n, and at the num_top first tokens. Allocates [N, V]."""
    values_NV = logits_NV.numpy()
    peaks_N = values_NV.max(axis=1)
    with np.errstate(invalid="ignore"):
        sums_N = np.exp(values_NV - peaks_N[:, None]).sum(axis=1, dtype=np.float64)
        norms_N = peaks_N + np.log(sums_N)
    chosen_N = values_NV[np.arange(len(ids_N)), ids_N]
    rank_N = 1 + np.count_nonzero(values_NV > chosen_N[:, None], axis=1)
    num_top = min(num_top, values_NV.shape[1])
    top_ids_NM, top_NM = order.top(logits_NV, num_top) if num_top else (np.empty((len(ids_N), 0), np.int64),) * 2
    return Logprobs(chosen_N - norms_N, rank_N, top_ids_NM, top_NM - norms_N[:, None])


def _paths(rules: Rules, vocab: int) -> Ids:
    has_mass_N = (rules.top_p_N < 1) | (rules.min_p_N > 0)
    has_top_k_N = (rules.top_k_N > 0) & (rules.top_k_N < vocab)
    return np.where(has_top_k_N, _width_log2(rules.top_k_N), np.where(has_mass_N, _MASS, _ANY))


def _width_log2(counts: Ids) -> Ids:
    """The least power of two that is not below, as its logarithm; at least _LEAST_LOG2."""
    return np.maximum(np.frexp(np.maximum(counts - 1, 0))[1], _LEAST_LOG2).astype(np.int64)


def _sample_path(path: int, logits_NV: Tensor, rules: Rules) -> tuple[Ids, Peaks]:
    if path == _ANY:
        return _sample_any(logits_NV.numpy(), rules)
    if path == _MASS:
        return _sample_mass(logits_NV.numpy(), rules)
    ids_NC, values_NC = order.top(logits_NV, int(rules.top_k_N.max()))
    return _draw(ids_NC, values_NC, rules), values_NC[:, 0]


def _draw(ids_NC: Ids, values_NC: Peaks, rules: Rules, mass_N: Floats | None = None) -> Ids:
    """Filter candidates that are in order, then draw. `mass`: sum of exp(z), or NaN where it is the candidates'."""
    num_rows, num_candidates = ids_NC.shape
    width = -(-num_candidates // _LANES) * _LANES
    ids, z = np.zeros((num_rows, width), np.int64), np.full((num_rows, width), -np.inf)
    ids[:, :num_candidates] = ids_NC
    with np.errstate(invalid="ignore", divide="ignore"):
        z[:, :num_candidates] = (values_NC - values_NC[:, :1].astype(np.float64)) / rules.temperature_N[:, None]
        keep = _keep(z, rules, mass_N)
        score = np.where(keep, z + noise.gumbel(rules.keys_N[:, None], ids), -np.inf)
    return ids[np.arange(num_rows), score.argmax(axis=1)]


def _keep(z_NC: Floats, rules: Rules, mass_N: Floats | None) -> npt.NDArray[np.bool_]:
    width = z_NC.shape[1]
    top_k_N = np.where(rules.top_k_N > 0, rules.top_k_N, width)
    keep_NC = np.arange(width) < top_k_N[:, None]
    if (rules.min_p_N > 0).any():
        keep_NC &= z_NC >= np.log(np.maximum(rules.min_p_N, 0))[:, None]
    if (rules.top_p_N < 1).any():
        held_NC = np.cumsum(np.exp(np.where(keep_NC, z_NC, -np.inf)), axis=1)
        total_N = held_NC[:, -1] if mass_N is None else np.where(np.isnan(mass_N), held_NC[:, -1], mass_N)
        share_N = np.where(rules.top_p_N < 1, rules.top_p_N * total_N, np.inf)
        keep_NC[:, 1:] &= held_NC[:, :-1] < share_N[:, None]
    return keep_NC


def _sample_mass(values_NV: Peaks, rules: Rules) -> tuple[Ids, Peaks]:
    """Find tokens that are sure to hold all that the rules keep, then filter them exactly."""
    peaks_N = values_NV.max(axis=1)
    candidates, mass_N = _likely(values_NV, peaks_N, rules)
    groups_N = _width_log2(np.array([len(ids) for ids in candidates]))
    drawn_N = np.zeros(len(candidates), np.int64)
    for group in np.unique(groups_N).tolist():
        rows = np.flatnonzero(groups_N == group)
        width = max(len(candidates[row]) for row in rows)
        ids, values = np.zeros((len(rows), width), np.int64), np.full((len(rows), width), -np.inf, np.float32)
        for place, row in enumerate(rows):
            ids[place, : len(candidates[row])] = candidates[row]
            values[place, : len(candidates[row])] = values_NV[row, candidates[row]]
        if width:
            drawn_N[rows] = _draw(*order.in_order(values, ids), rules.take(rows), mass_N[rows])
    return drawn_N, peaks_N


def _likely(values_NV: Peaks, peaks_N: Peaks, rules: Rules) -> tuple[list[Ids], Floats]:
    """Ids that min_p, or else top_p, can keep, and for top_p the mass of the whole row (NaN for min_p).

    Tokens lighter than (1 - top_p) * mass / V weigh less than (1 - top_p) * mass together, so the kept prefix is
    found among the others. The thresholds leave room for float32 rounding.
    """
    candidates, mass_N = [], np.full(len(values_NV), np.nan)
    for n, values_V in enumerate(values_NV):
        with np.errstate(invalid="ignore", over="ignore"):
            weights_V = np.exp((values_V - peaks_N[n]) / np.float32(rules.temperature_N[n]))
        threshold = rules.min_p_N[n] * (1 - 1e-4)
        if threshold <= 0:
            mass_N[n] = weights_V.sum(dtype=np.float64)
            threshold = (1 - rules.top_p_N[n]) * mass_N[n] / len(weights_V) / 2
        candidates.append(np.flatnonzero(weights_V >= max(threshold, np.finfo(np.float32).tiny)))
    return candidates, mass_N


def _sample_any(values_NV: Peaks, rules: Rules) -> tuple[Ids, Peaks]:
    """No rule but temperature: draw from whole rows, some rows or a part of one at a time."""
    num_rows, vocab = values_NV.shape
    peaks_N = values_NV.max(axis=1)
    best_N, best_score_N = np.zeros(num_rows, np.int64), np.full(num_rows, -np.inf)
    rows_at_once = max(1, _CHUNK // vocab)
    for first in range(0, num_rows, rows_at_once):
        rows = slice(first, first + rows_at_once)
        peaks, keys = peaks_N[rows, None].astype(np.float64), rules.keys_N[rows, None]
        for start in range(0, vocab, _CHUNK):
            piece = values_NV[rows, start : start + _CHUNK]
            ids = np.arange(start, start + piece.shape[1])
            with np.errstate(invalid="ignore"):
                score = (piece - peaks) / rules.temperature_N[rows, None] + noise.gumbel(keys, ids)
            places = score.argmax(axis=1)
            top = np.take_along_axis(score, places[:, None], axis=1)[:, 0]
            best_N[rows] = np.where(top > best_score_N[rows], start + places, best_N[rows])
            best_score_N[rows] = np.maximum(top, best_score_N[rows])
    return best_N, peaks_N
