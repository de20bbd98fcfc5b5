"""RMS norms in plain torch. See the package for shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, scale.shape, scale, eps)
    return F.rms_norm(x.float(), scale.shape, scale, eps).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, scale, eps), total


def gated_rms_norm(x_THV: Tensor, gate_THV: Tensor, scale_V: Tensor, eps: float) -> Tensor:
    normed_THV = F.rms_norm(x_THV.float(), scale_V.shape, scale_V, eps)
    return (normed_THV * F.silu(gate_THV.float())).to(x_THV.dtype)
