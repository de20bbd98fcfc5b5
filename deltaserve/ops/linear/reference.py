"""Products and dequantisation in plain torch. See the package for shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# OCP Microscaling Formats 1.0, section 5.3.3: the values of E2M1 by their four bits, sign first.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    return F.linear(x_TI, weight_OI)


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def dequantize_fp8_tensor(weight: Tensor, scale: Tensor) -> Tensor:
    return weight.float().mul_(scale.float().reshape(()))


def dequantize_fp8_channel(weight_OI: Tensor, scale_O1: Tensor) -> Tensor:
    return weight_OI.float().mul_(scale_O1.float().reshape(-1, 1))


def dequantize_fp8_block(weight_OI: Tensor, scale_inv: Tensor) -> Tensor:
    num_rows, num_columns = weight_OI.shape
    scale_rows = scale_inv.float().repeat_interleave(128, dim=1)[:, :num_columns]
    return weight_OI.float().mul_(scale_rows.repeat_interleave(128, dim=0)[:num_rows])


def dequantize_nvfp4(packed: Tensor, scale: Tensor, global_scale: Tensor, *, divide: bool) -> Tensor:
    values = torch.tensor(E2M1, dtype=torch.float32, device=packed.device)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)  # [256, 2]: both values of a byte
    weight = pairs[packed.int()].view(*scale.shape, -1)
    weight.mul_(scale.float().unsqueeze(-1))
    factor = global_scale.float().reshape(())
    weight = weight.div_(factor) if divide else weight.mul_(factor)
    return weight.flatten(1)
