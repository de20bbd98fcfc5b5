"""The one order of tokens that every rule uses: higher logit first, lower id first among equals.

`top` first takes the plain way: the k + 1 largest values. Where those all differ, the k first tokens and their order
are settled. A row with equals among them is done again exactly: a (logit, id) pair is packed into one int64 whose
integer order is the order above, so that integer sorts need no rule for ties.

A wide row is read once, for the maximum of each block of neighbouring tokens; the search goes on in the blocks with
the k largest maxima. No value is missed: each of the k kept maxima is at least as large as a dropped block's largest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_LOW_BITS = np.int64(0xFFFFFFFF)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_WIDE_VOCABULARY = 32768
_SMALL = 32768  # values that are searched whole sooner than by blocks

Ids = npt.NDArray[np.int64]
Values = npt.NDArray[np.float32]


def top(logits_NV: Tensor, k: int) -> tuple[Ids, Values]:
    """The k first tokens of each row: ids [N, k] int64 and logits [N, k] float32, in order.

    float32 logits on the CPU, 1 <= k <= V. NaN counts as highest, so it comes first.
    """
    vocab = logits_NV.shape[1]
    values, ids = _largest(logits_NV, min(k + 1, vocab))
    values_NK: Values = values.numpy()
    ids_NK: Ids = ids.numpy()
    tied_N = (values_NK[:, 1:] == values_NK[:, :-1]).any(axis=1)
    if tied_N.any():
        rows = np.flatnonzero(tied_N)
        ids_NK[rows, :k], values_NK[rows, :k] = _exact_top(logits_NV.numpy()[rows], values_NK[rows, k - 1], k)
    return ids_NK[:, :k], values_NK[:, :k]


def _largest(logits_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row, descending, and where they are; equals in any order."""
    num_rows, vocab = logits_NV.shape
    block = 64 if vocab >= _WIDE_VOCABULARY else 16
    num_blocks = vocab // block
    if num_blocks < 2 * k or num_rows * vocab <= _SMALL:
        return torch.topk(logits_NV, k)
    main_NBb = logits_NV[:, : num_blocks * block].view(num_rows, num_blocks, block)
    blocks_NK = torch.topk(main_NBb.amax(-1), k, sorted=False).indices
    ids_NC = (blocks_NK[:, :, None] * block + torch.arange(block)).view(num_rows, -1)
    if vocab > num_blocks * block:
        rest = torch.arange(num_blocks * block, vocab)
        ids_NC = torch.cat((ids_NC, rest.expand(num_rows, -1)), dim=1)
    values_NK, places_NK = torch.topk(logits_NV.gather(1, ids_NC), k)
    return values_NK, ids_NC.gather(1, places_NK)


def _exact_top(values_NV: Values, least_N: Values, k: int) -> tuple[Ids, Values]:
    """As `top`, for rows whose k-th largest value `least` is known."""
    ids_NK, values_NK = np.empty((len(least_N), k), np.int64), np.empty((len(least_N), k), np.float32)
    for n, (values_V, least) in enumerate(zip(values_NV, least_N, strict=True)):
        ids_C = np.flatnonzero(~(values_V < least))
        ids_NK[n], values_NK[n] = (found[0, :k] for found in in_order(values_V[None, ids_C], ids_C[None]))
    return ids_NK, values_NK


def in_order(values_NC: Values, ids_NC: Ids) -> tuple[Ids, Values]:
    """(value, id) pairs of each row, in order."""
    keys_NC = _pack(values_NC, ids_NC)
    keys_NC.sort(axis=1)
    return _unpack(keys_NC)


def _pack(values: Values, ids: Ids) -> Ids:
    """Float bits made monotone and flipped, so that smaller is earlier, above the id. Adding 0 turns -0 into 0.

    NaN becomes +inf, whatever its sign bit.
    """
    bits = (np.where(np.isnan(values), np.float32(np.inf), values) + np.float32(0)).view(np.int32)
    ascending = bits ^ ((bits >> 31) & _MAGNITUDE)
    return ((~ascending).astype(np.int64) << 32) | ids


def _unpack(keys: Ids) -> tuple[Ids, Values]:
    ascending = ~(keys >> 32).astype(np.int32)
    bits = ascending ^ ((ascending >> 31) & _MAGNITUDE)
    return keys & _LOW_BITS, bits.view(np.float32)
