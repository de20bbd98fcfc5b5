"""Causal attention of the draft layer when it runs on its own drafts, with gradients.

At depth s a query sees keys of two kinds. Those that earlier positions wrote from the main model's hiddens, up to s - 1
positions before it; and s - 1 keys written from drafts: its own and those of the drafts between. The first kind goes
through flash attention, whose sums then take up the second kind:

    L = log(exp(lse) + sum_j exp(e_j)),   out = exp(lse - L) out_first + sum_j exp(e_j - L) v_j

Flash attention's backward pass, given L and out in place of its own, gives the exact gradients of the first kind,
because each probability it recomputes is exp(score - L). A caller turns the queries back by s - 1 positions, so that
the causal mask is the ordinary one.

Letters: B sequences, N heads, T positions, A head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attend(q_TNA: Tensor, k_TGA: Tensor, v_TGA: Tensor, num_sequences: int) -> Tensor:
    """Ordinary causal attention of tokens that lie flat, [T, N, A]."""
    q, k, v = (by_head(x, num_sequences, q_TNA.shape[1]) for x in (q_TNA, k_TGA, v_TGA))
    return flat(F.scaled_dot_product_attention(q, k, v, is_causal=True))


def by_head(x_TGA: Tensor, num_sequences: int, num_heads: int) -> Tensor:
    """[B * T, G, A] -> [B, N, T, A]; KV heads are repeated to N."""
    x = x_TGA.unflatten(0, (num_sequences, -1)).transpose(1, 2)
    return x.repeat_interleave(num_heads // x.shape[1], 1)


def flat(x_BNTA: Tensor) -> Tensor:
    return x_BNTA.transpose(1, 2).flatten(0, 1)


def attend_drafts(q: Tensor, keys: Tensor, values: Tensor, drafts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """[B, N, T, A]. Query t sees keys at positions <= t - len(drafts), and of each pair (k, v) of drafts one entry.

    `drafts` run from the earliest (depth 2) to the query's own depth; entry t of the pair of depth d stands at the
    position where depth d was computed, so query t sees entry t - (len(drafts) - 1 - i) of pair i. The first
    len(drafts) outputs mean nothing.
    """
    count = len(drafts)
    turned = [torch.roll(x, len(drafts) - 1 - i - count, dims=2) for i, pair in enumerate(drafts) for x in pair]
    out = _Merged.apply(torch.roll(q, -count, dims=2), keys, values, *turned)
    return torch.roll(out, count, dims=2)


class _Merged(torch.autograd.Function):
    """q [B, N, T, A] over causal keys and values and, per query, single extra keys and values (k1, v1, k2, v2 ...)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        ctx.scale = q.shape[-1] ** -0.5
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        first, lse, ctx.rest = _flash(q, k, v, ctx.scale)
        scores = [(q.float() * key.float()).sum(-1) * ctx.scale for key in extra[::2]]
        total = torch.logsumexp(torch.stack([lse, *scores]), dim=0)
        out = (lse - total).exp().unsqueeze(-1) * first.float()
        for score, value in zip(scores, extra[1::2], strict=True):
            out = out + (score - total).exp().unsqueeze(-1) * value.float()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total, *extra)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, total, *extra = ctx.saved_tensors
        dq, dk, dv = _flash_backward(grad.contiguous(), q, k, v, out, total, ctx.rest, ctx.scale)
        dq, delta, grads = dq.float(), (grad.float() * out.float()).sum(-1), []
        for key, value in zip(extra[::2], extra[1::2], strict=True):
            p = ((q.float() * key.float()).sum(-1) * ctx.scale - total).exp()
            ds = (p * ((grad.float() * value.float()).sum(-1) - delta) * ctx.scale).unsqueeze(-1)
            dq = dq + ds * key.float()
            grads += [(ds * q.float()).to(key.dtype), (p.unsqueeze(-1) * grad.float()).to(value.dtype)]
        return dq.to(q.dtype), dk, dv, *grads


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Output, log-sum-exp [B, N, T] float32, and what the backward pass wants beside them."""
    if q.is_cuda:
        out, lse, *rest = _FLASH(q, k, v, 0.0, True, scale=scale)
        return out, lse, tuple(rest)
    out, lse = _FLASH_CPU(q, k, v, 0.0, True, scale=scale)
    return out, lse, ()


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: tuple[Any, ...], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if q.is_cuda:
        cum_q, cum_k, max_q, max_k, seed, offset = rest[:6]
        more = (cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset)
        return _FLASH_BACKWARD(grad, q, k, v, out, lse, *more, scale=scale)
    return _FLASH_CPU_BACKWARD(grad, q, k, v, out, lse, 0.0, True, scale=scale)
