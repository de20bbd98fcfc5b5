"""The GDN convolution in plain torch. See the package for shapes and who writes what."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaserve.ops.rows import ExtendRows, PrefillRows


def prefill(x_TC: Tensor, weight_CW: Tensor, windows: Tensor, conv_ring: Tensor, rows: PrefillRows) -> Tensor:
    history = weight_CW.shape[1] - 1
    before = windows.index_select(0, rows.slots_in_R)
    inputs = [
        torch.cat((window, x_TC[start:stop]))
        for window, start, stop in zip(before.unbind(), rows.offsets, rows.offsets[1:], strict=False)
    ]
    for row, position, slot in rows.cuts:
        windows[slot] = inputs[row][position : position + history]
    for row, ring_row in enumerate(rows.rows_R.tolist()):
        end = rows.starts[row] + inputs[row].shape[0] - history
        _write_ring(conv_ring[ring_row], inputs[row][-history:], end)
    return torch.cat([_convolve(row_inputs, weight_CW) for row_inputs in inputs])


def extend(x_TC: Tensor, weight_CW: Tensor, conv_ring: Tensor, rows: ExtendRows) -> Tensor:
    num_taps, ring_width = weight_CW.shape[1], conv_ring.shape[1]
    offsets = torch.arange(1 - num_taps, rows.width, device=x_TC.device)
    entries = (rows.starts_R.unsqueeze(1) + offsets) % ring_width
    rows_R1 = rows.rows_R.unsqueeze(1)
    before = conv_ring[rows_R1, entries[:, : num_taps - 1]]
    x_RwC = x_TC.view(rows.num_rows, rows.width, -1)
    inputs = torch.cat((before, x_RwC), dim=1)
    for row, num_new in enumerate(rows.num_new):
        conv_ring[rows.rows_R[row], entries[row, num_taps - 1 : num_taps - 1 + num_new]] = x_RwC[row, :num_new]
    y = inputs[:, : rows.width] * weight_CW[:, 0]
    for tap in range(1, num_taps):
        y.addcmul_(inputs[:, tap : tap + rows.width], weight_CW[:, tap])
    return F.silu(y).view_as(x_TC)


def fold(windows: Tensor, conv_ring: Tensor, rows: ExtendRows) -> None:
    history, ring_width = windows.shape[2], conv_ring.shape[2]
    for ring_row, slot, end in zip(rows.fold_rows_F.tolist(), rows.fold_out_F.tolist(), rows.fold_ends, strict=True):
        entries = [position % ring_width for position in range(end - history, end)]
        windows[slot] = conv_ring[ring_row][:, entries]


def _convolve(inputs: Tensor, weight_CW: Tensor) -> Tensor:
    """silu of the valid convolution: [W - 1 + n, C] -> [n, C]."""
    num_taps = weight_CW.shape[1]
    num_tokens = inputs.shape[0] - num_taps + 1
    y = inputs[:num_tokens] * weight_CW[:, 0]
    for tap in range(1, num_taps):
        y.addcmul_(inputs[tap : tap + num_tokens], weight_CW[:, tap])
    return F.silu(y, inplace=True)


def _write_ring(ring: Tensor, last_inputs: Tensor, end: int) -> None:
    """ring [ring width, C] <- inputs of the positions just before `end`."""
    num_inputs = last_inputs.shape[0]
    entries = [position % ring.shape[0] for position in range(end - num_inputs, end)]
    ring[entries] = last_inputs
