"""Routing and experts in plain torch. See the package for shapes.

The outputs of a token's experts are summed in the order of its routing, whatever the batch, so that nothing depends on
which tokens it came with but the rounding inside the products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Up to here reading an expert once per token costs less than sorting, and the products of so few tokens.
FEW_TOKENS = 16

# Up to here all experts' products in one call, on zero-padded tokens, beat a call for each expert: the calls are small,
# and one call can read several experts at a time. It reads every expert, so it is for batches that touch most of them.
SOME_TOKENS = 256
MOST_PADDING = 3  # padded rows for each real one


def route(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    # A stable sort, not topk: topk does not say which of two equal logits it takes.
    logits_TE, ids_TE = logits_TE.float().sort(dim=-1, descending=True, stable=True)
    if renormalize:
        return logits_TE[:, :top_k].softmax(dim=-1), ids_TE[:, :top_k]
    return logits_TE.softmax(dim=-1)[:, :top_k], ids_TE[:, :top_k]


def experts(x_TD: Tensor, weights_Tk: Tensor, experts_Tk: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    if x_TD.shape[0] <= FEW_TOKENS and _are_rows(gate_up_E2FD) and _are_rows(down_EDF):
        y_TkD = _few_tokens(x_TD, experts_Tk, gate_up_E2FD, down_EDF)
    elif x_TD.shape[0] == 1:
        y_TkD = _one_token(x_TD[0], experts_Tk[0].tolist(), gate_up_E2FD, down_EDF)
    else:
        y_TkD = _sorted(x_TD, experts_Tk, gate_up_E2FD, down_EDF)
    y_TD = torch.bmm(weights_Tk.unsqueeze(1), y_TkD.float()).squeeze(1)
    return y_TD if y_TD.dtype == x_TD.dtype else y_TD.to(x_TD.dtype)


def _are_rows(weight_Eoi: Tensor) -> bool:
    """True for the layout (an expert's inputs are rows in memory), dtype and device that _few_tokens is for."""
    return weight_Eoi.mT.is_contiguous() and weight_Eoi.dtype == torch.float32 and weight_Eoi.device.type == "cpu"


def _few_tokens(x_TD: Tensor, experts_Tk: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    """[T, k, D]: a product as a weighted sum of the expert's rows, all pairs of token and expert in one call.

    embedding_bag reads rows ahead; a matrix-vector product of this size waits for each of them.
    """
    pairs = experts_Tk.flatten()
    x_nD = x_TD.repeat_interleave(experts_Tk.shape[1], dim=0)
    h_nF = _swiglu(_weighted_rows(x_nD, pairs, gate_up_E2FD))
    return _weighted_rows(h_nF, pairs, down_EDF).unflatten(0, experts_Tk.shape)


def _weighted_rows(x_ni: Tensor, experts_n: Tensor, weight_Eoi: Tensor) -> Tensor:
    """[n, o]: x times the expert's matrix, one expert for each x."""
    num_inputs = x_ni.shape[1]
    rows_ni = (experts_n * num_inputs).unsqueeze(1) + torch.arange(num_inputs)
    return F.embedding_bag(rows_ni, weight_Eoi.mT.flatten(0, 1), per_sample_weights=x_ni, mode="sum")


def _one_token(x_D: Tensor, ids: list[int], gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    """[1, k, D]"""
    h_kF = _swiglu(torch.stack([torch.mv(gate_up_E2FD[expert], x_D) for expert in ids]))
    y_kD = torch.stack([torch.mv(down_EDF[expert], h_F) for expert, h_F in zip(ids, h_kF.unbind(), strict=True)])
    return y_kD.unsqueeze(0)


def _sorted(x_TD: Tensor, experts_Tk: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    """[T, k, D]: pairs of token and expert in order of experts, the products of each expert, and back."""
    num_tokens, top_k = experts_Tk.shape
    pairs = experts_Tk.flatten()
    by_expert = pairs.argsort(stable=True)
    counts = torch.bincount(pairs, minlength=gate_up_E2FD.shape[0]).tolist()
    x_nD = x_TD.index_select(0, by_expert // top_k)
    if num_tokens <= SOME_TOKENS and max(counts) * len(counts) <= MOST_PADDING * len(by_expert):
        y_nD = _padded(x_nD, counts, gate_up_E2FD, down_EDF)
    else:
        h_nF = _swiglu(_each_expert(x_nD.split_with_sizes(counts), gate_up_E2FD))
        y_nD = _each_expert(h_nF.split_with_sizes(counts), down_EDF)
    back = torch.empty_like(by_expert).scatter_(0, by_expert, torch.arange(len(by_expert), device=by_expert.device))
    return y_nD.index_select(0, back).unflatten(0, experts_Tk.shape)


def _padded(x_nD: Tensor, counts: list[int], gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    """[n, D]: every expert on as many rows as the busiest has; rows beyond its own are zero and dropped again."""
    most = max(counts)
    place_n = torch.tensor([expert * most + i for expert, count in enumerate(counts) for i in range(count)])
    place_n = place_n.to(x_nD.device)
    x_EmD = x_nD.new_zeros(len(counts) * most, x_nD.shape[1]).index_copy_(0, place_n, x_nD).unflatten(0, (-1, most))
    h_EmF = _swiglu(torch.bmm(x_EmD, gate_up_E2FD.mT))
    return torch.bmm(h_EmF, down_EDF.mT).flatten(0, 1).index_select(0, place_n)


def _each_expert(x_per_expert: tuple[Tensor, ...], weight_Eoi: Tensor) -> Tensor:
    """Each expert's tokens through its matrix, one after the other; experts without tokens are not touched."""
    pairs = zip(x_per_expert, weight_Eoi.unbind(), strict=True)
    return torch.cat([F.linear(x, weight) for x, weight in pairs if x.shape[0]])


def _swiglu(gate_up_n2F: Tensor) -> Tensor:
    gate_nF, up_nF = gate_up_n2F.chunk(2, dim=-1)
    return F.silu(gate_nF).mul_(up_nF)
