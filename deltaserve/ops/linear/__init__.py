"""Linear layers, SwiGLU's elementwise half, and the values of quantised weights.

Letters: T tokens, O rows of a weight (outputs), I its columns (inputs), F width of a gate or of an up projection.

Every dequantisation returns float32 and rounds once per element: the product of a 4- or 8-bit value with an 8-bit
scale is exact in float32, and the one inexact factor comes last.
"""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.dispatch import choose
from deltaserve.ops.lazy import Lazy
from deltaserve.ops.linear import reference
from deltaserve.ops.linear.native import Packed, Table
from deltaserve.ops.linear.packed import Product, is_for_kernels, pack, swap

__all__ = [
    "Packed",
    "Product",
    "Table",
    "dequantize_fp8_block",
    "dequantize_fp8_channel",
    "dequantize_fp8_tensor",
    "dequantize_nvfp4",
    "is_for_kernels",
    "linear",
    "pack",
    "silu_mul",
    "swap",
]

IMPLEMENTATIONS = {"reference": reference, "triton": Lazy("deltaserve.ops.linear.triton")}
FP8_BLOCK = 128  # rows, and columns, that share one scale of block FP8
NVFP4_GROUP = 16  # columns that share one scale of NVFP4


def linear(x_TI: Tensor, weight_OI: Tensor, force: str | None = None) -> Tensor:
    """x W^T: [..., I] and [O, I] of one dtype -> [..., O]."""
    return choose(IMPLEMENTATIONS, x_TI, force).linear(x_TI, weight_OI)


def silu_mul(gate_up_T2F: Tensor, force: str | None = None) -> Tensor:
    """silu(gate) * up -> [..., F], where the gate is the first half of the last dim."""
    return choose(IMPLEMENTATIONS, gate_up_T2F, force).silu_mul(gate_up_T2F)


def dequantize_fp8_tensor(weight: Tensor, scale: Tensor, force: str | None = None) -> Tensor:
    """float8 weight of any shape times its one scale (0-d or one element)."""
    return choose(IMPLEMENTATIONS, weight, force).dequantize_fp8_tensor(weight, scale)


def dequantize_fp8_channel(weight_OI: Tensor, scale_O1: Tensor, force: str | None = None) -> Tensor:
    """float8 weight times a scale per row ([O, 1] or [O])."""
    return choose(IMPLEMENTATIONS, weight_OI, force).dequantize_fp8_channel(weight_OI, scale_O1)


def dequantize_fp8_block(weight_OI: Tensor, scale_inv: Tensor, force: str | None = None) -> Tensor:
    """float8 weight times a scale per block of 128 rows and 128 columns; the last blocks may be ragged.

    `scale_inv` [ceil(O / 128), ceil(I / 128)] is a multiplier, whatever its name in the files says.
    """
    return choose(IMPLEMENTATIONS, weight_OI, force).dequantize_fp8_block(weight_OI, scale_inv)


def dequantize_nvfp4(
    packed: Tensor, scale: Tensor, global_scale: Tensor, *, divide: bool = False, force: str | None = None
) -> Tensor:
    """uint8 [O, I / 2] of two E2M1 values a byte (the low half is the even column) -> [O, I].

    `scale` float8 [O, I / 16] belongs to 16 columns each. `global_scale` (one element) is a multiplier, as ModelOpt
    stores it, or with `divide` its reciprocal, as compressed-tensors stores it.
    """
    implementation = choose(IMPLEMENTATIONS, packed, force)
    return implementation.dequantize_nvfp4(packed, scale, global_scale, divide=divide)
