"""Rotary position embedding on the first dims of a head (partial rope, rotate-half pairs).

Letters: T tokens, H heads, D head size, R pairs (half the rotary dim).
"""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.dispatch import choose
from deltaserve.ops.lazy import Lazy
from deltaserve.ops.rope import native, reference

IMPLEMENTATIONS = {"reference": reference, "native": native, "triton": Lazy("deltaserve.ops.rope.triton")}


def cos_sin(positions_T: Tensor, rotary_dim: int, theta: float, force: str | None = None) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i / rotary_dim), i < R = rotary_dim // 2: both [T, R] float32."""
    return choose(IMPLEMENTATIONS, positions_T, force).cos_sin(positions_T, rotary_dim, theta)


def apply_rope(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, force: str | None = None) -> Tensor:
    """Rotate pairs (i, i + R), i < R, of every head; dims from 2R on pass through. A new tensor of x's dtype."""
    return choose(IMPLEMENTATIONS, x_THD, force).apply_rope(x_THD, cos_TR, sin_TR)
