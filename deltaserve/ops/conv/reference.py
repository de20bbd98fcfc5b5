"""The GDN convolution in plain torch. See the package for shapes and who writes what.

Taps are applied one after the other on rows of weight_WC, which is contiguous at no cost where the caller keeps the
weight that way round (a [C, W] view of a [W, C] tensor).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaserve.ops.rows import ExtendRows, PrefillRows


def prefill(x_TC: Tensor, weight_CW: Tensor, windows: Tensor, conv_ring: Tensor, rows: PrefillRows) -> Tensor:
    weight_WC = weight_CW.t().contiguous()
    history = weight_WC.shape[0] - 1
    before_R = windows.index_select(0, rows.slots_in_R).unbind()
    y_TC = torch.empty_like(x_TC)
    if rows.num_tokens > history:
        y_TC[history:] = _convolve(x_TC, weight_WC)
    # Over the seams of the packed rows that was wrong: the first tokens of each row look into its window.
    for row, (ring_row, before) in enumerate(zip(rows.rows_R.tolist(), before_R, strict=True)):
        start, stop = rows.offsets[row], rows.offsets[row + 1]
        first, end = min(start + history, stop), rows.starts[row] + stop - start
        y_TC[start:first] = _convolve(torch.cat((before, x_TC[start:first])), weight_WC)
        last_inputs = torch.cat((before, x_TC[max(start, stop - history) : stop]))[-history:]
        conv_ring[ring_row, _entries(end, history, conv_ring.shape[1])] = last_inputs
    for row, position, slot in rows.cuts:
        cut = rows.offsets[row] + position
        windows[slot] = x_TC[cut - history : cut]
    return y_TC


def extend(x_TC: Tensor, weight_CW: Tensor, conv_ring: Tensor, rows: ExtendRows) -> Tensor:
    weight_WC = weight_CW.t().contiguous()
    if rows.num_tokens == 1:
        return _decode_one(x_TC, weight_WC, conv_ring[int(rows.rows_R)], rows.contexts[0])
    if rows.width == 1:
        return _decode(x_TC, weight_WC, conv_ring, rows)
    num_rows, width, num_taps, ring_width = rows.num_rows, rows.width, weight_WC.shape[0], conv_ring.shape[1]
    starts = [context - new for context, new in zip(rows.contexts, rows.num_new, strict=True)]
    x_RwC = x_TC.unflatten(0, (num_rows, width))
    _append(conv_ring, x_RwC, starts, rows)
    taken = conv_ring.index_select(0, rows.rows_R).flatten(0, 1)
    offsets = range(1 - num_taps, width)
    in_taken = [row * ring_width + (start + i) % ring_width for row, start in enumerate(starts) for i in offsets]
    inputs = taken.index_select(0, torch.tensor(in_taken, device=taken.device)).unflatten(0, (num_rows, -1))
    if min(rows.num_new) < width:
        inputs[:, num_taps - 1 :] = x_RwC
    return _convolve(inputs, weight_WC).flatten(0, 1)


def fold(windows: Tensor, conv_ring: Tensor, rows: ExtendRows) -> None:
    history, ring_width = windows.shape[2], conv_ring.shape[2]
    for ring_row, slot, end in zip(rows.fold_rows_F.tolist(), rows.fold_out_F.tolist(), rows.fold_ends, strict=True):
        windows[slot] = conv_ring[ring_row][:, _entries(end, history, ring_width)]


def _convolve(inputs_nC: Tensor, weight_WC: Tensor) -> Tensor:
    """silu of the valid convolution along the last dim but one: [..., W - 1 + n, C] -> [..., n, C]."""
    num_tokens = inputs_nC.shape[-2] - weight_WC.shape[0] + 1
    y, *rest = (inputs_nC.narrow(-2, tap, num_tokens) for tap in range(weight_WC.shape[0]))
    y = y * weight_WC[0]
    for tap, inputs in enumerate(rest, start=1):
        y.addcmul_(inputs, weight_WC[tap])
    return F.silu(y, inplace=True)


def _decode_one(x_1C: Tensor, weight_WC: Tensor, ring: Tensor, context: int) -> Tensor:
    """One token of one row, the commonest step of all: its input is stored first, then the window read in place."""
    num_taps, ring_width = weight_WC.shape[0], ring.shape[0]
    ring[(context - 1) % ring_width] = x_1C[0]
    first = (context - num_taps) % ring_width
    if first + num_taps <= ring_width:
        inputs = ring.narrow(0, first, num_taps)
    else:
        inputs = torch.cat((ring[first:], ring[: first + num_taps - ring_width]))
    return F.silu((inputs * weight_WC).sum(0, keepdim=True), inplace=True)


def _decode(x_RC: Tensor, weight_WC: Tensor, conv_ring: Tensor, rows: ExtendRows) -> Tensor:
    """One token a row."""
    num_taps, ring_width = weight_WC.shape[0], conv_ring.shape[1]
    steps = torch.arange(1 - num_taps, 1, device=x_RC.device)
    entries_RW = (rows.starts_R.unsqueeze(1) + steps).remainder_(ring_width)
    conv_ring.index_put_((rows.rows_R, entries_RW[:, -1]), x_RC)
    inputs_RWC = conv_ring[rows.rows_R.unsqueeze(1), entries_RW]
    return F.silu(inputs_RWC.mul_(weight_WC).sum(1), inplace=True)


def _append(conv_ring: Tensor, x_RwC: Tensor, starts: list[int], rows: ExtendRows) -> None:
    """Store the inputs of the tokens that are not padding."""
    for row, (ring_row, start, new) in enumerate(zip(rows.rows_R.tolist(), starts, rows.num_new, strict=True)):
        conv_ring[ring_row, _entries(start + new, new, conv_ring.shape[1])] = x_RwC[row, :new]


def _entries(end: int, count: int, ring_width: int) -> list[int]:
    """Ring entries of the `count` positions before `end`, oldest first."""
    return [position % ring_width for position in range(end - count, end)]
