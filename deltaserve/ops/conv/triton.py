"""The GDN convolution in Triton. See the package for shapes and who writes what.

Prefill runs a program for each chunk of 64 tokens and block of channels; the inputs before a chunk are the row's own,
or its window's where the row begins. Extend runs a program for each row and block of channels and walks over its
tokens. Programs never read an entry that another one of the same launch writes: a ring is wide enough that a step's
new entries lie beside the inputs that it looks back at.

Letters: W taps, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops import triton_common as common
from deltaserve.ops.rows import ExtendRows, PrefillRows


def prefill(x_TC: Tensor, weight_CW: Tensor, windows: Tensor, conv_ring: Tensor, rows: PrefillRows) -> Tensor:
    common.check_rows(x_TC, windows, conv_ring)
    num_channels, num_taps = weight_CW.shape
    y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    chunks = common.chunks(rows)
    starts_R = common.once(rows, "starts_R", lambda: common.to_device([rows.starts], x_TC.device)[0])
    block = min(1024, triton.next_power_of_2(num_channels))
    _prefill[(triton.cdiv(num_channels, block), chunks.num_chunks)](
        x_TC, weight_CW, windows, conv_ring, y_TC, rows.rows_R, rows.slots_in_R, starts_R,
        chunks.row_N, chunks.token_N, chunks.count_N, chunks.index_N,
        chunks.first_R1, chunks.cut_first_N1, chunks.cut_slots,
        x_TC.stride(0), *weight_CW.stride(), windows.stride(0), conv_ring.stride(0), conv_ring.shape[1],
        num_channels, num_taps, block,
    )  # fmt: skip
    return y_TC


def extend(x_TC: Tensor, weight_CW: Tensor, conv_ring: Tensor, rows: ExtendRows) -> Tensor:
    common.check_rows(x_TC, conv_ring)
    num_channels, num_taps = weight_CW.shape
    y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    block = min(512, triton.next_power_of_2(num_channels))
    _extend[(triton.cdiv(num_channels, block), rows.num_rows)](
        x_TC, weight_CW, conv_ring, y_TC, rows.rows_R, rows.starts_R, common.num_new(rows),
        x_TC.stride(0), *weight_CW.stride(), conv_ring.stride(0), conv_ring.shape[1],
        rows.width, num_channels, num_taps, block,
    )  # fmt: skip
    return y_TC


def fold(windows: Tensor, conv_ring: Tensor, rows: ExtendRows) -> None:
    if not rows.fold_ends:
        return
    num_layers, history, num_channels = windows.shape[1:]
    block = min(1024, triton.next_power_of_2(num_channels))
    _fold[(triton.cdiv(num_channels, block), num_layers, len(rows.fold_ends))](
        windows, conv_ring, rows.fold_rows_F, rows.fold_out_F, common.fold_ends(rows),
        *windows.stride()[:2], *conv_ring.stride()[:2], conv_ring.shape[2], num_channels, history, block,
    )  # fmt: skip


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _prefill(
    x_ptr, weight_ptr, windows_ptr, ring_ptr, y_ptr, rows_ptr, slots_ptr, starts_ptr,
    row_ptr, token_ptr, count_ptr, index_ptr, first_ptr, cut_first_ptr, cut_slots_ptr,
    x_stride, weight_c, weight_w, window_stride, ring_stride, ring_width,
    C: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    row = tl.load(row_ptr + n)
    first = tl.load(token_ptr + n).to(tl.int64)
    count = tl.load(count_ptr + n)
    index = tl.load(index_ptr + n)
    window = windows_ptr + tl.load(slots_ptr + row) * window_stride + c
    taps = ()
    last = ()  # the W - 1 inputs before the token
    for tap in tl.static_range(W):
        weight = tl.load(weight_ptr + c * weight_c + tap * weight_w, mask=mask, other=0.0)
        taps = taps + (weight.to(tl.float32),)
    for before in tl.static_range(W - 1):
        own = tl.load(x_ptr + (first + before - (W - 1)) * x_stride + c, mask=mask & (index > 0), other=0.0)
        old = tl.load(window + before * C, mask=mask & (index == 0), other=0.0)
        last = last + (tl.where(index > 0, own, old),)
    for t in tl.range(0, count, loop_unroll_factor=8):
        x = tl.load(x_ptr + (first + t) * x_stride + c, mask=mask, other=0.0)
        y = x.to(tl.float32) * taps[W - 1]
        moved = ()
        for tap in tl.static_range(W - 1):
            y += last[tap].to(tl.float32) * taps[tap]
            if tap > 0:
                moved = moved + (last[tap],)
        last = moved + (x,)
        tl.store(y_ptr + (first + t) * C + c, _silu(y).to(y_ptr.dtype.element_ty), mask=mask)
    # The last inputs go to the slots of a cut after this chunk, and to the ring after the row's last chunk.
    for cut in range(tl.load(cut_first_ptr + n), tl.load(cut_first_ptr + n + 1)):
        slot = windows_ptr + tl.load(cut_slots_ptr + cut).to(tl.int64) * window_stride + c
        for i in tl.static_range(W - 1):
            tl.store(slot + i * C, last[i], mask=mask)
    if n + 1 == tl.load(first_ptr + row + 1):
        ring = ring_ptr + tl.load(rows_ptr + row) * ring_stride + c
        end = tl.load(starts_ptr + row) + index * 64 + count
        for i in tl.static_range(W - 1):
            entry = (end - (W - 1) + i + ring_width) % ring_width
            tl.store(ring + entry * C, last[i], mask=mask)


@triton.jit
def _extend(
    x_ptr, weight_ptr, ring_ptr, y_ptr, rows_ptr, starts_ptr, num_new_ptr,
    x_stride, weight_c, weight_w, ring_stride, ring_width,
    WIDTH: tl.constexpr, C: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = c < C
    start = tl.load(starts_ptr + r)
    num_new = tl.load(num_new_ptr + r)
    ring = ring_ptr + tl.load(rows_ptr + r) * ring_stride + c
    token = r.to(tl.int64) * WIDTH
    for t in tl.static_range(WIDTH):
        y = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(W):
            if t + tap - (W - 1) < 0:
                entry = (start + t + tap - (W - 1) + ring_width) % ring_width
                x = tl.load(ring + entry * C, mask=mask, other=0.0)
            else:
                x = tl.load(x_ptr + (token + t + tap - (W - 1)) * x_stride + c, mask=mask, other=0.0)
                if tap == W - 1:
                    tl.store(ring + ((start + t) % ring_width) * C, x, mask=mask & (t < num_new))
            weight = tl.load(weight_ptr + c * weight_c + tap * weight_w, mask=mask, other=0.0)
            y += x.to(tl.float32) * weight.to(tl.float32)
        tl.store(y_ptr + (token + t) * C + c, _silu(y).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _fold(
    windows_ptr, ring_ptr, rows_ptr, slots_ptr, ends_ptr,
    window_slot, window_layer, ring_row, ring_layer, ring_width,
    C: tl.constexpr, HISTORY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    layer, f = tl.program_id(1), tl.program_id(2)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ring = ring_ptr + tl.load(rows_ptr + f) * ring_row + layer.to(tl.int64) * ring_layer + c
    window = windows_ptr + tl.load(slots_ptr + f) * window_slot + layer.to(tl.int64) * window_layer + c
    end = tl.load(ends_ptr + f)
    for i in tl.static_range(HISTORY):
        x = tl.load(ring + ((end - HISTORY + i) % ring_width) * C, mask=c < C, other=0.0)
        tl.store(window + i * C, x, mask=c < C)
