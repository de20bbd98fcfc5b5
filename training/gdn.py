"""The gated delta rule in chunks, with gradients.

Within a chunk of c tokens, G the inclusive sums of the log decays g, D_ij = exp(G_i - G_j) for j <= i and 0 above, and
X = (I + strictly lower part of diag(beta) (K K^T * D))^-1:

    U = X diag(beta) V,   W = X diag(beta e^G) K,   Z = diag(e^(G_last - G)) K
    state after = (e^G_last I - Z^T W) S + Z^T U = M S + B,   outputs = diag(e^G) Q S + (Q K^T * D) (U - W S)

M and B of all chunks are computed at once (`prepare`), the short recurrence S <- M S + B goes from chunk to chunk
(`scan`, float32), and the outputs follow for all chunks at once (`finish`). Only `scan` knows where sequences end.

Letters: N chunks (those of one sequence follow each other), c tokens of a chunk, J and H key and value heads, K and V
their sizes, S sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Prepared = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def prepare(q_TJK: Tensor, k_TJK: Tensor, v_THV: Tensor, g_TH: Tensor, beta_TH: Tensor, chunk: int) -> Prepared:
    """M [N, H, K, K] and B [N, H, K, V] float32; seen [N, H, 2c, K], U [N, H, c, V] and QK * D in v's dtype.

    q and k are normalised and scaled; they, g and beta are float32. `seen` is W above diag(e^G) Q.
    """
    dtype, share = v_THV.dtype, v_THV.shape[1] // k_TJK.shape[1]
    q, k, v, g, beta = (x.unflatten(0, (-1, chunk)).transpose(1, 2) for x in (q_TJK, k_TJK, v_THV, g_TH, beta_TH))
    sums = g.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).tril()
    decay_NHcc = torch.where(lower, sums.unsqueeze(-1) - sums.unsqueeze(-2), -torch.inf).exp()
    kk = torch.matmul(k, k.transpose(-1, -2)).repeat_interleave(share, 1)
    qk = torch.matmul(q, k.transpose(-1, -2)).repeat_interleave(share, 1)
    solve = unit_lower_inverse((kk * decay_NHcc * beta.unsqueeze(-1)).tril(-1)).to(dtype)
    k_NHcK, q_NHcK = k.repeat_interleave(share, 1), q.repeat_interleave(share, 1)
    from_start, to_end = sums.exp().unsqueeze(-1), (sums[..., -1:] - sums).exp().unsqueeze(-1)
    k_beta = k_NHcK * (beta.unsqueeze(-1) * from_start)
    w, u = torch.matmul(solve, k_beta.to(dtype)), torch.matmul(solve, (v.float() * beta.unsqueeze(-1)).to(dtype))
    z = (k_NHcK * to_end).to(dtype).transpose(-1, -2)
    eye = torch.eye(k.shape[-1], device=g.device)
    move = sums[..., -1:].exp().unsqueeze(-1) * eye - torch.matmul(z, w).float()
    seen = torch.cat((w, (q_NHcK * from_start).to(dtype)), dim=-2)
    return move, torch.matmul(z, u).float(), seen, u, (qk * decay_NHcc).to(dtype)


def finish(states_NHKV: Tensor, seen: Tensor, u_NHcV: Tensor, qk_NHcc: Tensor) -> Tensor:
    """Outputs [T, H, V] from each chunk's state before it and what `prepare` left."""
    chunk = u_NHcV.shape[2]
    through = torch.matmul(seen, states_NHKV.to(seen.dtype))
    new = u_NHcV - through[:, :, :chunk]
    out = through[:, :, chunk:] + torch.matmul(qk_NHcc, new)
    return out.transpose(1, 2).flatten(0, 1)


def scan(move_NHKK: Tensor, add_NHKV: Tensor, num_sequences: int) -> Tensor:
    """The state before each chunk, [N, H, K, V] float32, zero at the start of each sequence."""
    return _Scan.apply(move_NHKK, add_NHKV, num_sequences)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, move: Tensor, add: Tensor, num_sequences: int) -> Tensor:
        by_chunk_move, by_chunk_add = _by_chunk(move, num_sequences), _by_chunk(add, num_sequences)
        states = torch.empty_like(by_chunk_add)
        states[0].zero_()
        with _full_float32():
            for before, after, m, b in zip(states, states[1:], by_chunk_move, by_chunk_add, strict=False):
                torch.baddbmm(b, m, before, out=after)
        ctx.save_for_backward(by_chunk_move, states)
        ctx.num_sequences, ctx.size = num_sequences, add.shape
        return _by_sequence(states, ctx.size, num_sequences)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        move, states = ctx.saved_tensors
        grads = _by_chunk(grad, ctx.num_sequences)
        after = torch.zeros_like(grads)
        with _full_float32():
            for n in range(len(grads) - 1, 0, -1):
                torch.baddbmm(grads[n], move[n].transpose(1, 2), after[n], out=after[n - 1])
        grad_move = torch.matmul(after, states.transpose(-1, -2))
        size = (*ctx.size[:2], ctx.size[2], ctx.size[2])
        return (
            _by_sequence(grad_move, size, ctx.num_sequences),
            _by_sequence(after, ctx.size, ctx.num_sequences),
            None,
        )


def _by_chunk(x: Tensor, num_sequences: int) -> Tensor:
    """[N, H, a, b] -> [N / S, S * H, a, b]: the chunks at one place in all sequences together."""
    return x.unflatten(0, (num_sequences, -1)).transpose(0, 1).flatten(1, 2).contiguous()


def _by_sequence(x: Tensor, size: tuple[int, ...], num_sequences: int) -> Tensor:
    return x.unflatten(1, (num_sequences, -1)).transpose(0, 1).reshape(size)


class _full_float32:
    """Matrix products in plain float32 inside the block: a state passes through hundreds of them."""

    def __enter__(self) -> None:
        self.before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self.before


def unit_lower_inverse(below: Tensor) -> Tensor:
    """(I + below)^-1 of strictly lower triangular matrices [..., c, c], c a power of 2."""
    return _Inverse.apply(below)


class _Inverse(torch.autograd.Function):
    """Forward by halves: [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]], blocks of 1, 2, 4 ... at once."""

    @staticmethod
    def forward(ctx: Any, below: Tensor) -> Tensor:
        size = below.shape[-1]
        index = torch.arange(size, device=below.device)
        inverse = torch.eye(size, device=below.device) - below * _corner(index, 1)
        half = 2
        while half < size:
            inverse = inverse - torch.matmul(torch.matmul(inverse, below * _corner(index, half)), inverse)
            half *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.transpose(-1, -2)
        return -torch.matmul(torch.matmul(turned, grad.float()), turned).tril(-1)


def _corner(index: Tensor, half: int) -> Tensor:
    """1 where row and column lie in the lower left quarter of one diagonal block of 2 * half."""
    block, side = index // (2 * half), index // half % 2
    same = block.unsqueeze(1) == block.unsqueeze(0)
    return (same & (side.unsqueeze(1) > side.unsqueeze(0))).float()
