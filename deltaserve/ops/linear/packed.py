"""Weights laid out for repeated products on the CPU.

Where the C kernels are there, they have a layout of their own (`native`). What follows is for machines without them. A
product of few rows is bound by how fast its weight can be read, and the plain row-major layout is the slowest to
read: for 1536 x 256 outside the caches, 4 rows take 365 us so, 264 us with rows and columns swapped, 110 us in
oneDNN's blocks (one core; LOG.md, 2026-11-30). oneDNN costs 11 us a call, so small weights are better swapped.

Only float32 on the CPU is packed; anything else multiplies as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaserve.ops.dispatch import NATIVE, REFERENCE, explain
from deltaserve.ops.linear.native import Packed

Product = Callable[[Tensor], Tensor]

BLOCKED_NUMEL = 1 << 17  # from this size on a weight is kept in oneDNN's blocks
_ROWS_HINT = 64  # what the blocks are chosen for; measured best or near it from 2 to 512 rows


def is_for_kernels(weight: Tensor, force: str | None = None) -> bool:
    """True where the C kernels multiply by this weight."""
    names = dict.fromkeys((REFERENCE, NATIVE))
    return weight.dtype == torch.float32 and explain(names, weight.device.type, force).name == NATIVE


def pack(weight_OI: Tensor, force: str | None = None) -> Product:
    """[O, I] -> a function of x [T, I] that gives x W^T [T, O]. It holds its own copy of the weight."""
    if is_for_kernels(weight_OI, force):
        return Packed(weight_OI)
    if weight_OI.device.type != "cpu" or weight_OI.dtype != torch.float32:
        return partial(F.linear, weight=weight_OI)
    if weight_OI.numel() >= BLOCKED_NUMEL and torch.backends.mkldnn.is_available():
        return _blocked(weight_OI)
    return partial(torch.mm, mat2=weight_OI.t().contiguous())


def swap(weight_Eoi: Tensor) -> Tensor:
    """The same stacked matrices, rows and columns swapped in memory where that is faster (float32 on the CPU)."""
    if weight_Eoi.device.type != "cpu" or weight_Eoi.dtype != torch.float32:
        return weight_Eoi
    return weight_Eoi.mT.contiguous().mT


def _blocked(weight_OI: Tensor) -> Product:
    blocks = torch.ops.mkldnn._reorder_linear_weight.default(weight_OI.contiguous(), _ROWS_HINT)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(x_TI: Tensor) -> Tensor:
        y_TO: Tensor = multiply(x_TI, blocks, None, "none", [], None)
        return y_TO

    return product
