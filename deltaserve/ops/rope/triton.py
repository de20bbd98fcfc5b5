"""Rotary embedding in Triton, alone or right after the heads' RMS norm. See the package for shapes.

A program takes some heads of one token: cos and sin are read once for them. The other number of each pair is loaded a
second time, from the cache, instead of being moved between threads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.rope.reference import cos_sin

__all__ = ["apply_rope", "cos_sin", "norm_rope"]


def apply_rope(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    return _launch(x_THD, None, 0.0, cos_TR, sin_TR)


def norm_rope(x_THD: Tensor, scale_D: Tensor, eps: float, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """apply_rope(rms_norm(x)) with one reading of x and no rounding between."""
    return _launch(x_THD, scale_D, eps, cos_TR, sin_TR)


def _launch(x_THD: Tensor, scale_D: Tensor | None, eps: float, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    assert x_THD.stride(2) == 1, f"a head's numbers must lie together, strides are {x_THD.stride()}"
    num_tokens, num_heads, size = x_THD.shape
    y_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    if num_tokens:
        width = triton.next_power_of_2(size)
        heads = max(1, min(triton.next_power_of_2(num_heads), 4096 // width))
        _rope[(num_tokens, triton.cdiv(num_heads, heads))](
            x_THD, y_THD, cos_TR, sin_TR, scale_D, x_THD.stride(0), x_THD.stride(1), num_heads, eps,
            cos_TR.shape[1], size, heads, width, scale_D is not None,
        )  # fmt: skip
    return y_THD


@triton.jit
def _rope(
    x_ptr, y_ptr, cos_ptr, sin_ptr, scale_ptr, token_stride, head_stride, num_heads, eps,
    R: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    inside = (head < num_heads)[:, None] & (d < D)[None, :]
    base = x_ptr + token * token_stride + head[:, None] * head_stride
    x = tl.load(base + d[None, :], mask=inside, other=0.0).to(tl.float32)
    turned = d < 2 * R
    partner = tl.where(turned, tl.where(d < R, d + R, d - R), d)
    other = tl.load(base + partner[None, :], mask=inside & turned[None, :], other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * inverse * tl.load(scale_ptr + d, mask=d < D, other=0.0)[None, :]
        other = other * inverse * tl.load(scale_ptr + partner, mask=d < D, other=0.0)[None, :]
    cos = tl.load(cos_ptr + token * R + d % R, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + token * R + d % R, mask=turned, other=0.0)
    y = x * cos[None, :] + other * tl.where(d < R, -sin, sin)[None, :]
    place = (token * num_heads + head[:, None]) * D + d[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)
