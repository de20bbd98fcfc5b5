"""Rotary angles by the C kernels (ops/native/linear.c). See the package for shapes."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from deltaserve.ops import native
from deltaserve.ops.rope.reference import apply_rope

__all__ = ["apply_rope", "cos_sin"]


def cos_sin(positions_T: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    frequencies_R = _frequencies(rotary_dim, theta)
    num_tokens, num_pairs = positions_T.shape[0], frequencies_R.shape[0]
    both = torch.empty(2, num_tokens, num_pairs)
    cos_TR, sin_TR = both.unbind()
    pointers = (positions_T.contiguous().data_ptr(), frequencies_R.data_ptr())
    native.function("cos_sin")(*pointers, 1.0, num_tokens, num_pairs, cos_TR.data_ptr(), sin_TR.data_ptr())
    return cos_TR, sin_TR


@functools.lru_cache(maxsize=8)
def _frequencies(rotary_dim: int, theta: float) -> Tensor:
    pairs_R = torch.arange(0, rotary_dim, 2, dtype=torch.float64)
    return theta ** (pairs_R / -rotary_dim)
