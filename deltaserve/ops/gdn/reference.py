"""The gated delta rule in plain torch: gates, extend and fold. The chunked prefill is in `chunked`.

Extend looks at state and ring once for keys and queries together (letter X: the keys of a row's tokens, then their
queries). What is small is batched over rows; the two large reads, state and ring, go row by row through views, so that
nothing is gathered and no entry beyond a row's own ring is touched. Decays are exponentials of suffix sums or products
of such, each at most 1; no difference of prefix sums is formed in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deltaserve.ops.gdn.chunked import decay_matrix, prefill
from deltaserve.ops.rows import ExtendRows

__all__ = ["extend", "fold", "gates", "normalize", "prefill"]

BLOCK = 64


def gates(a_TH: Tensor, b_TH: Tensor, A_log_H: Tensor, dt_bias_H: Tensor) -> tuple[Tensor, Tensor]:
    return F.softplus(a_TH.float() + dt_bias_H).mul_(A_log_H.exp().neg_()), b_TH.float().sigmoid()


def normalize(q_TJK: Tensor, k_TJK: Tensor) -> tuple[Tensor, Tensor]:
    qk = torch.stack((q_TJK, k_TJK)).float()
    norms = torch.linalg.vector_norm(qk, dim=-1, keepdim=True)
    inverse = torch.addcmul(torch.full((), 1e-6, device=qk.device), norms, norms).rsqrt_()
    q, k = qk.mul_(inverse).unbind()
    q.mul_(q.shape[-1] ** -0.5)
    return _cast(q, q_TJK.dtype), _cast(k, k_TJK.dtype)


def extend(
    q_TJK: Tensor,
    k_TJK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    states: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_g: Tensor,
    rows: ExtendRows,
) -> Tensor:
    step = _decode if rows.width == 1 else _verify
    o_THV = step(q_TJK.float(), k_TJK.float(), v_THV.float(), g_TH, beta_TH, states, ring_k, ring_u, ring_g, rows)
    return _cast(o_THV, v_THV.dtype)


def fold(states: Tensor, ring_k: Tensor, ring_u: Tensor, ring_g: Tensor, rows: ExtendRows) -> None:
    slots = zip(rows.fold_in_F.tolist(), rows.fold_out_F.tolist(), strict=True)
    for ring_row, (slot_in, slot_out) in zip(rows.fold_rows_F.tolist(), slots, strict=True):
        keys = ring_k[ring_row].float().permute(0, 2, 3, 1)
        sums = _suffix_sums(ring_g[ring_row])
        decays = torch.cat((sums[:, :, 1:], torch.zeros_like(sums[:, :, :1])), dim=2).exp_()
        updates = ring_u[ring_row].transpose(1, 2) * decays.unsqueeze(3)
        by_key_head = updates.unflatten(1, (keys.shape[1], -1))
        update = torch.matmul(keys.unsqueeze(2), by_key_head).flatten(1, 2)
        states[slot_out] = torch.addcmul(update, states[slot_in].float(), sums[:, :, :1, None].exp())


def _decode(
    q_RJK: Tensor,
    k_RJK: Tensor,
    v_RHV: Tensor,
    g_RH: Tensor,
    beta_RH: Tensor,
    states: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_g: Tensor,
    rows: ExtendRows,
) -> Tensor:
    """One token a row. Its k and g are in the ring before the ring's decays are formed, so these reach up to it."""
    num_key_heads, num_heads = k_RJK.shape[1], v_RHV.shape[1]
    entry = (rows.rows_R, rows.num_ring_R)
    ring_k.index_put_(entry, _cast(k_RJK, ring_k.dtype))
    ring_g.index_put_(entry, g_RH)
    decays_RHc = _decays_after(ring_g, rows, num_included=1)
    past_RHXV = _look_back(torch.stack((k_RJK, q_RJK), dim=2), decays_RHc, states, ring_k, ring_u, rows)
    past_k_RHV, past_q_RHV = past_RHXV.unbind(2)
    u_RHV = torch.sub(v_RHV, past_k_RHV).mul_(beta_RH.unsqueeze(2))
    ring_u.index_put_(entry, u_RHV)
    gain_RJ1 = (q_RJK * k_RJK).sum(2, keepdim=True)
    if num_key_heads != num_heads:
        gain_RJ1 = gain_RJ1.repeat_interleave(num_heads // num_key_heads, dim=1)
    return torch.addcmul(past_q_RHV, u_RHV, gain_RJ1)


def _verify(
    q_TJK: Tensor,
    k_TJK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    states: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_g: Tensor,
    rows: ExtendRows,
) -> Tensor:
    """Several tokens a row: what they see of state and ring, then a small triangular system among themselves."""
    q_RJwK, k_RJwK, v_RHwV = (_by_row(x, rows) for x in (q_TJK, k_TJK, v_THV))
    g_RHw, beta_RHw1 = _by_row(g_TH, rows), _by_row(beta_TH, rows).unsqueeze(3)
    num_heads, width = v_RHwV.shape[1:3]
    qk_RJXK = torch.cat((k_RJwK, q_RJwK), dim=2)
    past_RHXV = _look_back(qk_RJXK, _decays_after(ring_g, rows, num_included=0), states, ring_k, ring_u, rows)
    past_RH2wV = past_RHXV.unflatten(2, (2, width)) * g_RHw.cumsum(2).exp_()[:, :, None, :, None]
    past_k_RHwV, past_q_RHwV = past_RH2wV.unbind(2)
    scores_RJXw = torch.matmul(qk_RJXK, k_RJwK.transpose(2, 3))
    scores_RHXw = scores_RJXw.repeat_interleave(num_heads // scores_RJXw.shape[1], dim=1)
    weights_RH2ww = scores_RHXw.unflatten(2, (2, width)) * decay_matrix(g_RHw).unsqueeze(2)
    among_k_RHww, among_q_RHww = weights_RH2ww.unbind(2)
    rhs_RHwV = (v_RHwV - past_k_RHwV).mul_(beta_RHw1)
    u_RHwV = torch.linalg.solve_triangular(among_k_RHww * beta_RHw1, rhs_RHwV, upper=False, unitriangular=True)
    o_RHwV = past_q_RHwV + torch.matmul(among_q_RHww, u_RHwV)
    _append(ring_k, ring_u, ring_g, k_TJK, u_RHwV.transpose(1, 2).flatten(0, 1), g_TH, rows)
    return o_RHwV.transpose(1, 2).flatten(0, 1).contiguous()


def _look_back(
    qk_RJXK: Tensor, decays_RHc: Tensor, states: Tensor, ring_k: Tensor, ring_u: Tensor, rows: ExtendRows
) -> Tensor:
    """[R, H, X, V]: for each x the decayed S^T x plus the decayed sum of (k_i . x) u_i over the row's ring."""
    num_rows, num_key_heads, num_x, key_size = qk_RJXK.shape
    num_heads, num_decays = decays_RHc.shape[1:]
    decays_RJh1c = decays_RHc.view(num_rows, num_key_heads, -1, 1, num_decays)
    scaled_RHXK = (qk_RJXK.unsqueeze(2) * decays_RJh1c.narrow(4, 0, 1)).view(num_rows, num_heads, num_x, key_size)
    keys, updates = ring_k.permute(0, 2, 3, 1), ring_u.transpose(1, 2)
    places = zip(rows.slots_R.tolist(), rows.rows_R.tolist(), rows.contexts, rows.num_new, strict=True)
    parts = zip(scaled_RHXK.unbind(), qk_RJXK.unbind(), decays_RJh1c.narrow(4, 1, num_decays - 1).unbind(), strict=True)
    outputs = []
    for (slot, ring_row, context, num_new), (scaled_HXK, qk_JXK, decays_Jh1n) in zip(places, parts, strict=True):
        past_HXV = torch.bmm(scaled_HXK, _widen(states[slot]))
        length = (context - num_new) % BLOCK
        if length:
            scores_JXn = torch.bmm(qk_JXK, _widen(keys[ring_row].narrow(2, 0, length)))
            weights_JhXn = scores_JXn.unsqueeze(1) * decays_Jh1n.narrow(3, 0, length)
            past_HXV.baddbmm_(weights_JhXn.view(num_heads, num_x, length), updates[ring_row].narrow(1, 0, length))
        outputs.append(past_HXV)
    return outputs[0].unsqueeze(0) if num_rows == 1 else torch.stack(outputs)


def _decays_after(ring_g: Tensor, rows: ExtendRows, num_included: int) -> Tensor:
    """[R, H, 1 + n], n the longest ring: decay of the state, then of entry i, i < n, by what comes later in the ring.

    `num_included` of the row's new tokens, already in the ring, count as later (0 or 1).
    """
    lengths = [(context - new) % BLOCK for context, new in zip(rows.contexts, rows.num_new, strict=True)]
    g_RcH = ring_g.index_select(0, rows.rows_R).narrow(1, 0, max(lengths) + 1)
    if num_included == 0 or min(lengths) < max(lengths):
        entries = torch.arange(g_RcH.shape[1], device=g_RcH.device)
        beyond_Rc = entries >= (rows.num_ring_R + num_included).unsqueeze(1)
        g_RcH = g_RcH.masked_fill(beyond_Rc.unsqueeze(2), 0.0)
    return _suffix_sums(g_RcH).exp_()


def _suffix_sums(g_RnH: Tensor) -> Tensor:
    """[R, n, H] -> [R, H, n], contiguous: the sum from entry i to the last."""
    return g_RnH.transpose(1, 2).flip(2).cumsum(2).flip(2).contiguous()


def _append(
    ring_k: Tensor, ring_u: Tensor, ring_g: Tensor, k_TJK: Tensor, u_THV: Tensor, g_TH: Tensor, rows: ExtendRows
) -> None:
    """Write the entries of the tokens that are not padding behind each row's ring."""
    device = k_TJK.device
    offsets = torch.arange(rows.width, device=device)
    row_N, offset_N = (offsets < torch.tensor(rows.num_new, device=device).unsqueeze(1)).nonzero(as_tuple=True)
    tokens_N = row_N * rows.width + offset_N
    entries = (rows.rows_R[row_N], rows.num_ring_R[row_N] + offset_N)
    ring_k.index_put_(entries, k_TJK[tokens_N].to(ring_k.dtype))
    ring_u.index_put_(entries, u_THV[tokens_N])
    ring_g.index_put_(entries, g_TH[tokens_N])


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Tensor.to takes a microsecond to find that there is nothing to do.
    return x if x.dtype == dtype else x.to(dtype)


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 else x.float()


def _by_row(x: Tensor, rows: ExtendRows) -> Tensor:
    """[T, heads, ...] -> [R, heads, w, ...]."""
    return x.unflatten(0, (rows.num_rows, rows.width)).transpose(1, 2)
