"""Routing and experts in plain torch. See the package for shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def route(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    # A stable sort, not topk: topk does not say which of two equal logits it takes.
    logits_TE, ids_TE = logits_TE.float().sort(dim=-1, descending=True, stable=True)
    if renormalize:
        return logits_TE[:, :top_k].softmax(dim=-1), ids_TE[:, :top_k]
    return logits_TE.softmax(dim=-1)[:, :top_k], ids_TE[:, :top_k]


def experts(x_TD: Tensor, weights_Tk: Tensor, experts_Tk: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    if x_TD.shape[0] == 1:
        return _one_token(x_TD[0], weights_Tk, experts_Tk[0].tolist(), gate_up_E2FD, down_EDF)
    by_expert = experts_Tk.flatten().argsort(stable=True)
    counts = torch.bincount(experts_Tk.flatten(), minlength=gate_up_E2FD.shape[0]).tolist()
    x_per_expert = x_TD.index_select(0, by_expert // experts_Tk.shape[1]).split(counts)
    h_nF = _swiglu(_each_expert(x_per_expert, gate_up_E2FD))
    y_nD = _each_expert(h_nF.split(counts), down_EDF)
    back = torch.empty_like(by_expert).scatter_(0, by_expert, torch.arange(len(by_expert), device=by_expert.device))
    y_TkD = y_nD.index_select(0, back).unflatten(0, experts_Tk.shape)
    return torch.bmm(weights_Tk.unsqueeze(1), y_TkD.float()).squeeze(1).to(x_TD.dtype)


def _one_token(x_D: Tensor, weights_1k: Tensor, ids: list[int], gate_up_E2FD: Tensor, down_EDF: Tensor) -> Tensor:
    h_kF = _swiglu(torch.stack([torch.mv(gate_up_E2FD[expert], x_D) for expert in ids]))
    y_kD = torch.stack([torch.mv(down_EDF[expert], h_F) for expert, h_F in zip(ids, h_kF.unbind(), strict=True)])
    return torch.mm(weights_1k, y_kD.float()).to(x_D.dtype)


def _each_expert(x_per_expert: tuple[Tensor, ...], weight_Eoi: Tensor) -> Tensor:
    """Each expert's tokens through its matrix, one after the other; experts without tokens are not touched."""
    pairs = zip(x_per_expert, weight_Eoi.unbind(), strict=True)
    return torch.cat([F.linear(x, weight) for x, weight in pairs if x.shape[0]])


def _swiglu(gate_up_n2F: Tensor) -> Tensor:
    gate_nF, up_nF = gate_up_n2F.chunk(2, dim=-1)
    return F.silu(gate_nF).mul_(up_nF)
