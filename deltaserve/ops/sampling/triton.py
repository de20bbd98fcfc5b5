"""Choosing tokens on the GPU, by the rules of `reference` and with its noise; the host waits once, for the result.

What the rules keep of a row is always a beginning of the one order (logit down, id up), so it is told by two numbers:
the key of the last logit that is kept, and the last id among tokens of that logit. `_limits` finds both without
sorting: it narrows a range of keys by counting, or weighing, what lies above three points of it, 16 times.

| kernel  | one program takes   | writes                                                              |
| ------- | ------------------- | ------------------------------------------------------------------- |
| _peaks  | a part of a row     | its highest logit, NaN if there is one                              |
| _limits | a row with rules    | key and id of the last token kept                                   |
| _draw   | a part of a row     | its best score, logit or z + noise, and where (lowest id of equals) |
| _pick   | a row               | the token; the peak                                                 |

A key is a float's bits made monotone (int32), -0 as 0. Noise and z are float64, as in the reference; sums of weights
run in another order, which can matter only where a sum meets its limit in the last bit.

Letters: N rows, V vocabulary, S parts of a row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.sampling.reference import Rules

Ids = npt.NDArray[np.int64]
Peaks = npt.NDArray[np.float32]

PART = 8192  # tokens of a part
BLOCK = 1024
NUM_COLUMNS = 5  # of a table of rules


def greedy(logits_NV: Tensor) -> tuple[Ids, Peaks]:
    return _to_host(launch(logits_NV, None, has_rules=False))


def greedy_ids(logits_NV: Tensor) -> Tensor:
    return launch(logits_NV, None, has_rules=False)[:, 0]


def sample(logits_NV: Tensor, rules: Rules) -> tuple[Ids, Peaks]:
    has_rules = bool(np.any(rules.top_k_N > 0) or np.any(rules.top_p_N < 1) or np.any(rules.min_p_N > 0))
    table_N5 = torch.from_numpy(pack(rules))
    if logits_NV.device.type == "cuda":
        table_N5 = table_N5.pin_memory().to(logits_NV.device, non_blocking=True)
    return _to_host(launch(logits_NV, table_N5, has_rules))


def pack(rules: Rules) -> Ids:
    """[N, 5] int64: temperature, top_p and log(min_p) as the bits of float64, top_k, key. Temperature 0 is greedy."""
    with np.errstate(divide="ignore"):
        least_z = np.log(np.maximum(rules.min_p_N, 0))
    top_p = np.where(rules.top_p_N < 1, rules.top_p_N, np.inf)
    floats = [np.ascontiguousarray(x, np.float64).view(np.int64) for x in (rules.temperature_N, top_p, least_z)]
    return np.stack((*floats, rules.top_k_N, rules.keys_N.view(np.int64)), axis=1)


def launch(logits_NV: Tensor, table_N5: Tensor | None, has_rules: bool) -> Tensor:
    """[N, 2] int64 on the device: token id, and the bits of the row's peak (float64). No waiting.

    table_N5 as `pack` makes it; None is greedy for all rows. `has_rules` False: no row has top_k, top_p or min_p.
    """
    num_rows, vocab = logits_NV.shape
    device, parts = logits_NV.device, triton.cdiv(vocab, PART)
    peaks_NS = torch.empty(num_rows, parts, device=device)
    best_NS = torch.empty(num_rows, parts, dtype=torch.float64, device=device)
    place_NS = torch.empty(num_rows, parts, dtype=torch.int32, device=device)
    limits_N2 = torch.empty(num_rows, 2, dtype=torch.int32, device=device)
    chosen_N2 = torch.empty(num_rows, 2, dtype=torch.int64, device=device)
    is_greedy = table_N5 is None
    table = chosen_N2 if table_N5 is None else table_N5
    width, stride = triton.next_power_of_2(parts), logits_NV.stride(0)
    _peaks[(parts, num_rows)](logits_NV, peaks_NS, stride, vocab, PART, BLOCK)
    if has_rules:
        _limits[(num_rows,)](logits_NV, peaks_NS, table, limits_N2, stride, vocab, parts, width, 8192, num_warps=32)
    _draw[(parts, num_rows)](
        logits_NV, peaks_NS, table, limits_N2, best_NS, place_NS, stride, vocab, parts, width, PART, BLOCK,
        is_greedy, has_rules,
    )  # fmt: skip
    _pick[(num_rows,)](peaks_NS, best_NS, place_NS, chosen_N2, parts, width)
    return chosen_N2


def _to_host(chosen_N2: Tensor) -> tuple[Ids, Peaks]:
    chosen = chosen_N2.cpu().numpy()
    return chosen[:, 0].copy(), np.ascontiguousarray(chosen[:, 1]).view(np.float64).astype(np.float32)


@triton.jit
def _key(x):
    """Monotone in x; NaN as +inf, -0 as 0."""
    x = tl.where(x != x, float("inf"), x) + 0.0
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _column(table_ptr, n, which: tl.constexpr):
    return tl.load(table_ptr + n * 5 + which)


@triton.jit
def _real(table_ptr, n, which: tl.constexpr):
    return _column(table_ptr, n, which).to(tl.float64, bitcast=True)


@triton.jit
def _row_peak(peaks_ptr, n, S: tl.constexpr, WIDTH: tl.constexpr):
    """(highest logit with NaN as +inf, whether there is NaN)."""
    s = tl.arange(0, WIDTH)
    peaks = tl.load(peaks_ptr + n * S + s, mask=s < S, other=-float("inf"))
    has_nan = tl.max((peaks != peaks).to(tl.int32), 0)
    return tl.max(tl.where(peaks != peaks, float("inf"), peaks), 0), has_nan


@triton.jit
def _peaks(logits_ptr, peaks_ptr, stride, vocab, PART: tl.constexpr, BLOCK: tl.constexpr):
    part, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    peak = tl.full([BLOCK], -float("inf"), tl.float32)
    has_nan = tl.zeros([BLOCK], tl.int32)
    for start in range(0, PART, BLOCK):
        v = part * PART + start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + n * stride + v, mask=v < vocab, other=-float("inf"))
        has_nan = has_nan | (x != x).to(tl.int32)
        peak = tl.maximum(peak, tl.where(x != x, -float("inf"), x))
    result = tl.where(tl.max(has_nan, 0) > 0, float("nan"), tl.max(peak, 0))
    tl.store(peaks_ptr + n * tl.num_programs(0) + part, result)


@triton.jit
def _above(logits_ptr, vocab, a_key, b_key, c_key, peak, temperature, WEIGH: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens lie above each of three keys, or what they weigh (the sum of exp z); float64."""
    kind: tl.constexpr = tl.float64 if WEIGH else tl.float32
    a = tl.zeros([BLOCK], kind)
    b = tl.zeros([BLOCK], kind)
    c = tl.zeros([BLOCK], kind)
    for start in range(0, vocab, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + v, mask=v < vocab, other=-float("inf"))
        key = tl.where(v < vocab, _key(x), -2147483648)
        if WEIGH:
            weight = tl.exp((x - peak.to(tl.float32)) / temperature.to(tl.float32)).to(kind)
        else:
            weight = tl.full([BLOCK], 1.0, kind)
        a += tl.where(key > a_key, weight, 0.0)
        b += tl.where(key > b_key, weight, 0.0)
        c += tl.where(key > c_key, weight, 0.0)
    return tl.sum(a, 0).to(tl.float64), tl.sum(b, 0).to(tl.float64), tl.sum(c, 0).to(tl.float64)


@triton.jit
def _fits(above, most, key, least_z, peak, temperature):
    return (above < most) & ((_value(key.to(tl.int32)).to(tl.float64) - peak) / temperature >= least_z)


@triton.jit
def _last_key(logits_ptr, vocab, low, high, most, least_z, peak, temperature, WEIGH: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest key in [low, high] above which lies less than `most` (tokens or weight) and with z >= least_z.

    `high`, the peak's, qualifies. Keys are int64 here. Each round leaves a quarter of the range.
    """
    for _ in range(17):
        a_key, b_key, c_key = low + (high - low) // 4, low + (high - low) // 2, low + 3 * (high - low) // 4
        a, b, c = _above(
            logits_ptr,
            vocab,
            a_key.to(tl.int32),
            b_key.to(tl.int32),
            c_key.to(tl.int32),
            peak,
            temperature,
            WEIGH,
            BLOCK,
        )
        is_a = _fits(a, most, a_key, least_z, peak, temperature)
        is_b = _fits(b, most, b_key, least_z, peak, temperature)
        is_c = _fits(c, most, c_key, least_z, peak, temperature)
        low = tl.where(is_a, low, tl.where(is_b, a_key + 1, tl.where(is_c, b_key + 1, c_key + 1)))
        high = tl.where(is_a, a_key, tl.where(is_b, b_key, tl.where(is_c, c_key, high)))
        low = tl.minimum(low, high)
    return high


@triton.jit
def _limits(
    logits_ptr, peaks_ptr, table_ptr, limits_ptr, stride, vocab, S: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    logits_ptr += n * stride
    peak32, has_nan = _row_peak(peaks_ptr, n, S, WIDTH)
    peak = peak32.to(tl.float64)
    temperature, top_p, least_z = _real(table_ptr, n, 0), _real(table_ptr, n, 1), _real(table_ptr, n, 2)
    top_k = _column(table_ptr, n, 3)
    key = _key(peak32).to(tl.int64)
    last, num_equal = key * 0 - 2147483648, key * 0 + vocab
    has_top_k = (top_k > 0) & (top_k < vocab)
    if (temperature > 0) & (has_top_k | (least_z > -float("inf")) | (top_p < float("inf"))):
        most = tl.where(has_top_k, top_k, vocab + 1).to(tl.float64)
        if has_top_k | (least_z > -float("inf")):
            last = _last_key(logits_ptr, vocab, last, key, most, least_z, peak, temperature, False, BLOCK)
            last32 = last.to(tl.int32)
            above, upto, same = _above(logits_ptr, vocab, last32, last32, last32, peak, temperature, False, BLOCK)
            num_equal = tl.minimum(most - above, num_equal.to(tl.float64)).to(tl.int64)
        if top_p < float("inf"):
            # Weight of all that is left: what lies above the last key, and the tokens of that key that are kept.
            last32 = last.to(tl.int32)
            below32 = tl.maximum(last - 1, -2147483648).to(tl.int32)
            above, upto, same = _above(logits_ptr, vocab, last32, below32, last32, peak, temperature, True, BLOCK)
            weight = tl.exp((_value(last32) - peak32) / temperature.to(tl.float32)).to(tl.float64)
            weight = tl.where(last == -2147483648, 0.0, weight)
            total = tl.minimum(above + num_equal.to(tl.float64) * weight, upto)
            share = top_p * total
            cut = _last_key(logits_ptr, vocab, last, key, share, -float("inf"), peak, temperature, True, BLOCK)
            cut32 = cut.to(tl.int32)
            above, upto, same = _above(logits_ptr, vocab, cut32, cut32, cut32, peak, temperature, True, BLOCK)
            weight = tl.exp((_value(cut32) - peak32) / temperature.to(tl.float32)).to(tl.float64)
            fits = tl.maximum(tl.ceil((share - above) / tl.maximum(weight, 1e-300)), 1.0)
            fits = tl.minimum(fits, vocab.to(tl.float64)).to(tl.int64)
            num_equal = tl.where(cut == last, tl.minimum(num_equal, fits), fits)
            last = cut
    tl.store(limits_ptr + n * 2, last.to(tl.int32))
    tl.store(limits_ptr + n * 2 + 1, _last_id(logits_ptr, vocab, last.to(tl.int32), num_equal, BLOCK))


@triton.jit
def _last_id(logits_ptr, vocab, key, num_equal, BLOCK: tl.constexpr):
    """The id of the num_equal-th token of this key, or any that lies behind them all where there are fewer."""
    found = vocab + 0
    seen = num_equal * 0
    for start in range(0, vocab, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + v, mask=v < vocab, other=-float("inf"))
        equal = ((_key(x) == key) & (v < vocab)).to(tl.int32)
        here = tl.sum(equal, 0).to(tl.int64)
        if (seen < num_equal) & (seen + here >= num_equal):
            rank = tl.cumsum(equal, 0).to(tl.int64) + seen
            found = tl.min(tl.where((equal > 0) & (rank == num_equal), v, vocab), 0)
        seen += here
    return found


@triton.jit
def _gumbel(key, v):
    x = (v.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15 + key
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    uniform = ((x >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def _draw(
    logits_ptr, peaks_ptr, table_ptr, limits_ptr, best_ptr, place_ptr, stride, vocab,
    S: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    IS_GREEDY: tl.constexpr, HAS_RULES: tl.constexpr,
):  # fmt: skip
    part, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    peak32, has_nan = _row_peak(peaks_ptr, n, S, WIDTH)
    best = tl.sum(tl.full([1], -float("inf"), tl.float64), 0)
    place = part * PART
    for start in range(0, PART, BLOCK):
        v = part * PART + start + tl.arange(0, BLOCK)
        raw = tl.load(logits_ptr + n * stride + v, mask=v < vocab, other=-float("inf"))
        x = tl.where(raw != raw, float("inf"), raw)
        score = x.to(tl.float64)
        if not IS_GREEDY:
            temperature = _real(table_ptr, n, 0)
            if temperature > 0:
                keep = v < vocab
                if HAS_RULES:
                    last, last_id = tl.load(limits_ptr + n * 2), tl.load(limits_ptr + n * 2 + 1)
                    key = _key(raw)
                    keep = keep & ((key > last) | ((key == last) & (v <= last_id)))
                if tl.max(keep.to(tl.int32), 0) > 0:
                    stream = _column(table_ptr, n, 4).to(tl.uint64, bitcast=True)
                    z = (score - peak32.to(tl.float64)) / temperature
                    score = tl.where(keep, z + _gumbel(stream, v), -float("inf"))
                else:
                    score = tl.full([BLOCK], -float("inf"), tl.float64)
        here = tl.max(score, 0)
        if here > best:
            place = tl.min(tl.where(score == here, v, vocab), 0)
            best = here
    tl.store(best_ptr + n * S + part, best)
    tl.store(place_ptr + n * S + part, place)


@triton.jit
def _pick(peaks_ptr, best_ptr, place_ptr, chosen_ptr, S: tl.constexpr, WIDTH: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, WIDTH)
    best = tl.load(best_ptr + n * S + s, mask=s < S, other=-float("inf"))
    place = tl.load(place_ptr + n * S + s, mask=s < S, other=2147483647)
    token = tl.min(tl.where(best == tl.max(best, 0), place, 2147483647), 0)
    peak, has_nan = _row_peak(peaks_ptr, n, S, WIDTH)
    peak = tl.where(has_nan > 0, float("nan"), peak).to(tl.float64)
    tl.store(chosen_ptr + n * 2, token.to(tl.int64))
    tl.store(chosen_ptr + n * 2 + 1, peak.to(tl.int64, bitcast=True))
