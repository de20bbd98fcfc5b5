"""Elementwise parts of linear layers in Triton; FP8 products are in `triton_fp8`. See the package for shapes.

Plain products go to torch (cuBLAS), which reads few tokens' weights at the memory's speed and runs many at the card's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops.linear.reference import (
    dequantize_fp8_block,
    dequantize_fp8_channel,
    dequantize_fp8_tensor,
    dequantize_nvfp4,
    linear,
)
from deltaserve.ops.linear.triton_fp8 import linear_fp8, quantize, silu_mul_quantize

__all__ = [
    "dequantize_fp8_block",
    "dequantize_fp8_channel",
    "dequantize_fp8_tensor",
    "dequantize_nvfp4",
    "linear",
    "linear_fp8",
    "quantize",
    "silu_mul",
    "silu_mul_quantize",
]


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    width = gate_up_T2F.shape[-1] // 2
    x = gate_up_T2F.reshape(-1, 2 * width)
    y = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(width))
    if len(x):
        _silu_mul[(len(x), triton.cdiv(width, block))](x, y, x.stride(0), width, block)
    return y.view(*gate_up_T2F.shape[:-1], width)


@triton.jit
def _silu_mul(x_ptr, y_ptr, stride, F: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x_ptr + t * stride + f, mask=f < F, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + t * stride + F + f, mask=f < F, other=0.0).to(tl.float32)
    # Rounded like the reference: silu first, then the product.
    silu = (gate * tl.sigmoid(gate)).to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + t * F + f, (silu * up).to(y_ptr.dtype.element_ty), mask=f < F)
