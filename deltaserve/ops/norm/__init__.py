"""RMS norms. All compute in float32 and return the dtype of their input.

Letters: T tokens, D width, H heads, V head size.
"""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.dispatch import choose
from deltaserve.ops.lazy import Lazy
from deltaserve.ops.norm import native, reference

IMPLEMENTATIONS = {"reference": reference, "native": native, "triton": Lazy("deltaserve.ops.norm.triton")}


def rms_norm(x: Tensor, scale: Tensor, eps: float, force: str | None = None) -> Tensor:
    """y = x * rsqrt(mean(x^2) + eps) * scale over the last dim; x [..., D] any float dtype, scale [D] float32."""
    return choose(IMPLEMENTATIONS, x, force).rms_norm(x, scale, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, scale: Tensor, eps: float, force: str | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual); all [..., D] of one dtype, scale [D] float32."""
    return choose(IMPLEMENTATIONS, x, force).add_rms_norm(x, residual, scale, eps)


def gated_rms_norm(x_THV: Tensor, gate_THV: Tensor, scale_V: Tensor, eps: float, force: str | None = None) -> Tensor:
    """rms_norm(x) * silu(gate) -> [T, H, V]: norm first, gate after, one scale for all heads."""
    return choose(IMPLEMENTATIONS, x_THV, force).gated_rms_norm(x_THV, gate_THV, scale_V, eps)
