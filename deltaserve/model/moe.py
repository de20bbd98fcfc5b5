"""The mixture-of-experts FFN: routed experts, and a shared one behind a scalar gate.

Every rank holds its columns of every expert, so that routing is the same everywhere and one sum over ranks ends the
layer.

Letters: T tokens, D model width, E experts, k experts per token, F expert width on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deltaserve.model.config import ModelConfig
from deltaserve.model.layers import Block, DenseFfn, Half, Linear, Norm
from deltaserve.model.params import Parameter, Section, Split
from deltaserve.ops import linear, moe
from deltaserve.parallel.mesh import Mesh


class Experts(Block):
    """All experts' weights, stacked: gate_up [E, 2F, D] (gate, then up) and down [E, D, F]."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        num, width, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        columns = Section(width, width)
        by_column, by_row = Split(1, (columns, columns)), Split(2, (columns,))
        self.gate_up = Parameter((num, 2 * width, hidden), dtype, by_column, mesh.rank, mesh.size)
        self.down = Parameter((num, hidden, width), dtype, by_row, mesh.rank, mesh.size)

    def prepare(self, force: str | None = None) -> None:
        """Lay the weights out as they are read fastest; shapes and values stay."""
        self.force = force
        self.gate_up.data = linear.swap(self.gate_up.data)
        self.down.data = linear.swap(self.down.data)

    def forward(self, x_TD: Tensor, weights_Tk: Tensor, experts_Tk: Tensor) -> Tensor:
        return moe.experts(x_TD, weights_Tk, experts_Tk, self.gate_up, self.down, self.force)


class MoeFfn(Half):
    """y = sum of the top k experts by weight + sigmoid(shared_gate x) * shared(x); this rank's share of it."""

    def __init__(self, config: ModelConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k, self.renormalize = config.num_experts_per_token, config.norm_topk_prob
        self.router = Linear((config.num_experts, config.hidden_size), mesh, dtype)
        self.experts = Experts(config, mesh, dtype)
        self.shared = DenseFfn(config.hidden_size, config.shared_intermediate_size, mesh, dtype)
        self.shared_gate = Linear((1, config.hidden_size), mesh, dtype)
        self.whole: moe.FeedForward | None = None

    def prepare(self, force: str | None = None) -> None:
        if not linear.is_for_kernels(self.router.weight, force):
            super().prepare(force)
            return
        gates, stacks = (self.router.weight, self.shared_gate.weight), (self.experts.gate_up, self.experts.down)
        experts = moe.ExpertWeights(*gates, *stacks, self.top_k, self.renormalize)
        self.whole = moe.FeedForward(self.shared.gate_up_proj.weight, self.shared.down_proj.weight, experts)
        del self.router, self.shared_gate, self.experts, self.shared

    def after(self, norm: Norm, x_TD: Tensor, residual_TD: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        if self.whole is None:
            return super().after(norm, x_TD, residual_TD, *rest)
        return moe.feed_forward(self.whole, x_TD, residual_TD, norm.scale, norm.eps, rest[0])

    def forward(self, x_TD: Tensor, num_extend: int | None = None) -> Tensor:
        """`num_extend` tokens are those of extend rows and come first; None: all are."""
        if self.whole is not None:
            return moe.feed_forward(self.whole, x_TD, None, None, 0.0, len(x_TD) if num_extend is None else num_extend)[
                0
            ]
        weights_Tk, experts_Tk = moe.route(self.router(x_TD), self.top_k, self.renormalize, self.force)
        routed_TD = self.experts(x_TD, weights_Tk, experts_Tk)
        return torch.addcmul(routed_TD, self.shared_gate(x_TD).sigmoid(), self.shared(x_TD))


def feed_forward(config: ModelConfig, is_moe: bool, mesh: Mesh, dtype: torch.dtype) -> Half:
    """The second half of a layer: experts, or one dense SwiGLU."""
    if is_moe:
        return MoeFfn(config, mesh, dtype)
    return DenseFfn(config.hidden_size, config.intermediate_size, mesh, dtype)
