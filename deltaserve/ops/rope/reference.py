"""Rotary embedding in plain torch. Angles are formed in float64, so that position 250,000 is as exact as position 1."""

from __future__ import annotations

import torch
from torch import Tensor


def cos_sin(positions_T: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    pairs_R = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=positions_T.device)
    angles_TR = torch.outer(positions_T.double(), theta ** (pairs_R / -rotary_dim))
    return angles_TR.cos().float(), angles_TR.sin().float()


def apply_rope(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    num_pairs = cos_TR.shape[-1]
    sizes = (num_pairs, num_pairs, x_THD.shape[-1] - 2 * num_pairs)
    first, second, rest = x_THD.split_with_sizes(sizes, dim=-1)
    cos_T1R, sin_T1R = cos_TR.unsqueeze(1), sin_TR.unsqueeze(1)
    turned_first = (first * cos_T1R).addcmul_(second, sin_T1R, value=-1)
    turned_second = (second * cos_T1R).addcmul_(first, sin_T1R)
    y_THD = torch.cat((turned_first, turned_second, rest), dim=-1)
    return y_THD if y_THD.dtype == x_THD.dtype else y_THD.to(x_THD.dtype)
