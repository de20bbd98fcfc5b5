"""Routing of tokens to experts, and the experts' SwiGLU.

Letters: T tokens, D width, E experts, k experts per token, F expert width.
"""

from __future__ import annotations

from torch import Tensor

from deltaserve.ops.dispatch import choose
from deltaserve.ops.lazy import Lazy
from deltaserve.ops.moe import reference
from deltaserve.ops.moe.native import ExpertWeights, FeedForward

__all__ = ["ExpertWeights", "FeedForward", "experts", "feed_forward", "route"]

IMPLEMENTATIONS = {"reference": reference, "triton": Lazy("deltaserve.ops.moe.triton")}


def route(logits_TE: Tensor, top_k: int, renormalize: bool, force: str | None = None) -> tuple[Tensor, Tensor]:
    """The top_k experts of each token, likeliest first; equal logits go to the lower expert id.

    Returns weights [T, k] float32 (softmax over all experts, divided by their sum over the k where `renormalize`) and
    expert ids [T, k] int64.
    """
    return choose(IMPLEMENTATIONS, logits_TE, force).route(logits_TE, top_k, renormalize)


def experts(
    x_TD: Tensor,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    force: str | None = None,
) -> Tensor:
    """Sum over the k chosen experts of weight * down(silu(gate x) * (up x)) -> [T, D] in x's dtype.

    gate_up holds the F gate rows of an expert, then its F up rows. On the CPU few tokens run about twice as fast where
    an expert's matrix lies the other way round in memory ([E, D, 2F] and [E, F, D], given as transposed views).
    """
    implementation = choose(IMPLEMENTATIONS, x_TD, force)
    return implementation.experts(x_TD, weights_Tk, experts_Tk, gate_up_E2FD, down_EDF)


def feed_forward(
    ffn: FeedForward,
    x_TD: Tensor,
    residual_TD: Tensor | None,
    scale_D: Tensor | None,
    eps: float,
    num_extend: int,
) -> tuple[Tensor, Tensor]:
    """Norm and FFN by its prepared weights: (ffn(norm(x + residual)), x + residual), all [T, D].

    The FFN is routing, experts and the shared expert, or a dense SwiGLU. A residual of None is zero, a scale of None
    leaves the norm out. The first num_extend tokens are those of extend rows. The first output lacks the sum over
    ranks.
    """
    return ffn(x_TD, residual_TD, scale_D, eps, num_extend)
