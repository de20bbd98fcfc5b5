"""Gumbel noise that depends on (seed, position, token id) and on nothing else.

A counter-based hash stands where a generator with state would: the noise of a token is the same whatever the batch,
the row order, the chunking, and whichever other tokens were looked at. It is SplitMix64 used by index: position p of
seed s has the key mix(mix(s) + (p + 1) * GOLDEN), and token t of that key the bits mix(key + (t + 1) * GOLDEN), so
that each key opens a stream of its own. GOLDEN is 2**64 divided by the golden ratio, made odd; the multipliers and
shifts of `mix` are David Stafford's variant 13 of the 64-bit finaliser. Both are those of SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

With u uniform in (0, 1), -log(-log(u)) is a standard Gumbel variable, and the argmax of logit + noise over tokens has
the law of a softmax draw (Gumbel 1954). u has 52 random bits and is never 0 or 1, so the noise lies in (-3.7, 36.8).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_DROP = np.uint64(12)
_ONE = np.uint64(1)


def seed_keys(seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """mix(seed), once a request."""
    return _mix(seeds.copy())


def stream_keys(seed_keys_N: npt.NDArray[np.uint64], positions_N: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """[N] uint64: the key of absolute position positions[n] under the seed whose mix is seed_keys[n]."""
    return _mix((positions_N.astype(np.uint64) + _ONE) * GOLDEN + seed_keys_N)


def gumbel(keys: npt.NDArray[np.uint64], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Noise of token `ids` under `keys`, broadcast against each other; float64."""
    bits = _mix((ids.astype(np.uint64) + _ONE) * GOLDEN + keys)
    uniform = (np.right_shift(bits, _DROP, out=bits).astype(np.float64) + 0.5) * 2.0**-52
    noise = np.log(uniform, out=uniform)
    np.negative(noise, out=noise)
    np.log(noise, out=noise)
    return np.negative(noise, out=noise)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The 64-bit finaliser, in place."""
    shifted = np.right_shift(x, _SHIFTS[0])
    np.bitwise_xor(x, shifted, out=x)
    np.multiply(x, _MIX_1, out=x)
    np.right_shift(x, _SHIFTS[1], out=shifted)
    np.bitwise_xor(x, shifted, out=x)
    np.multiply(x, _MIX_2, out=x)
    np.right_shift(x, _SHIFTS[2], out=shifted)
    return np.bitwise_xor(x, shifted, out=x)
