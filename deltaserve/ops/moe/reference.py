"""Routing and experts in plain torch. See the package for shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def route(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    # A stable sort, not topk: topk does not say which of two equal logits it takes.
    sorted_TE, ids_TE = logits_TE.float().sort(dim=-1, descending=True, stable=True)
    if renormalize:
        return sorted_TE[:, :top_k].softmax(dim=-1), ids_TE[:, :top_k]
    return sorted_TE.softmax(dim=-1)[:, :top_k], ids_TE[:, :top_k]


def experts(
    x_TD: Tensor, weights_Tk: Tensor, experts_Tk: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor
) -> Tensor:
    num_tokens, top_k = experts_Tk.shape
    pairs = experts_Tk.reshape(-1)
    order = pairs.argsort(stable=True)
    counts = torch.bincount(pairs, minlength=gate_up_E2FD.shape[0]).tolist()
    tokens = order // top_k
    x_sorted = x_TD.index_select(0, tokens)
    y_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    outputs = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            gate, up = F.linear(x_sorted[start : start + count], gate_up_E2FD[expert]).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, down_EDF[expert]))
            start += count
    weighted = torch.cat(outputs) * weights_Tk.reshape(-1, 1).index_select(0, order)
    return y_TD.index_add_(0, tokens, weighted.float()).to(x_TD.dtype)
