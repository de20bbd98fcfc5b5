"""RMS norms by the C kernels (ops/native/linear.c). See the package for shapes; float32 on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from deltaserve.ops import native
from deltaserve.ops.norm.reference import gated_rms_norm

__all__ = ["add_rms_norm", "gated_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    y, width = torch.empty_like(x), x.shape[-1]
    num_rows = x.numel() // width
    run = native.function("norm")
    run(x.data_ptr(), None, scale.data_ptr(), eps, num_rows, width, None, y.data_ptr(), torch.get_num_threads())
    return y


def add_rms_norm(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, residual = x.contiguous(), residual.contiguous()
    y, total, width = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    run, inputs = native.function("norm"), (x.data_ptr(), residual.data_ptr(), scale.data_ptr())
    run(*inputs, eps, x.numel() // width, width, total.data_ptr(), y.data_ptr(), torch.get_num_threads())
    return y, total
