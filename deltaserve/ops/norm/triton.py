"""RMS norms in Triton. See the package for shapes.

One program takes a tile of whole rows: one wide row, or several narrow ones (heads). Rows may be strided in two levels,
token and head, as views of a projection are; a row's own numbers lie together.

Letters: N rows of D numbers; row n is head n % H of token n // H.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # numbers of one program, where rows are narrow


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_rms_norm, x, (x, scale, y), eps)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    y, total = torch.empty_like(x), torch.empty_like(x)
    _launch(_add_rms_norm, x, (x, residual, scale, y, total), eps)
    return y, total


def gated_rms_norm(x_THV: Tensor, gate_THV: Tensor, scale_V: Tensor, eps: float) -> Tensor:
    y_THV = torch.empty(x_THV.shape, dtype=x_THV.dtype, device=x_THV.device)
    gate_strides = _strides(gate_THV)
    _launch(_gated_rms_norm, x_THV, (x_THV, gate_THV, scale_V, y_THV, *gate_strides[:2]), eps)
    return y_THV


def _strides(x: Tensor) -> tuple[int, int, int, int]:
    """Distance between tokens, between heads, heads of a token, numbers of a row."""
    assert x.stride(-1) == 1, f"a row's numbers must lie together, strides are {x.stride()}"
    if x.dim() == 3:
        return x.stride(0), x.stride(1), x.shape[1], x.shape[2]
    x = x.view(-1, x.shape[-1])
    return x.stride(0), 0, 1, x.shape[1]


def _launch(kernel, x: Tensor, tensors: tuple, eps: float) -> None:
    token_stride, head_stride, num_heads, size = _strides(x)
    num_rows = x.numel() // size
    width = triton.next_power_of_2(size)
    rows = max(1, min(TILE // width, 16))
    if num_rows:
        grid = (triton.cdiv(num_rows, rows),)
        warps = 8 if width * rows > 4096 else 4
        kernel[grid](*tensors, token_stride, head_stride, num_heads, num_rows, eps, size, rows, width, num_warps=warps)


@triton.jit
def _rows(num_rows, num_heads, D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Token and head of this program's rows, the columns, and which of the tile exist."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    return (n // num_heads).to(tl.int64), n % num_heads, d, (n < num_rows)[:, None] & (d < D)[None, :], n.to(tl.int64)


@triton.jit
def _normed(x, scale_ptr, d, eps, D: tl.constexpr):
    inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    return x * inverse[:, None] * tl.load(scale_ptr + d, mask=d < D, other=0.0)[None, :]


@triton.jit
def _rms_norm(
    x_ptr, scale_ptr, y_ptr, token_stride, head_stride, num_heads, num_rows, eps,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, head, d, inside, n = _rows(num_rows, num_heads, D, ROWS, WIDTH)
    place = (token * token_stride + head * head_stride)[:, None] + d[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    y = _normed(x, scale_ptr, d, eps, D)
    tl.store(y_ptr + n[:, None] * D + d[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm(
    x_ptr, residual_ptr, scale_ptr, y_ptr, total_ptr, token_stride, head_stride, num_heads, num_rows, eps,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, head, d, inside, n = _rows(num_rows, num_heads, D, ROWS, WIDTH)
    place = n[:, None] * D + d[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    total = x.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + place, total, mask=inside)
    y = _normed(total.to(tl.float32), scale_ptr, d, eps, D)
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gated_rms_norm(
    x_ptr, gate_ptr, scale_ptr, y_ptr, gate_token_stride, gate_head_stride,
    token_stride, head_stride, num_heads, num_rows, eps,
    D: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token, head, d, inside, n = _rows(num_rows, num_heads, D, ROWS, WIDTH)
    place = (token * token_stride + head * head_stride)[:, None] + d[None, :]
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    gate_place = (token * gate_token_stride + head * gate_head_stride)[:, None] + d[None, :]
    gate = tl.load(gate_ptr + gate_place, mask=inside, other=0.0).to(tl.float32)
    y = _normed(x, scale_ptr, d, eps, D) * gate * tl.sigmoid(gate)
    tl.store(y_ptr + n[:, None] * D + d[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
