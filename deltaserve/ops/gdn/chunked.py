"""Prefill of the gated delta rule in chunks of 64 tokens, aligned to boundaries.

Within a chunk, with G the inclusive sums of g, D_ij = exp(G_i - G_j) for j <= i and 0 above, E_i = exp(G_i), and S the
state before the chunk, all updates u at once solve a unit lower triangular system:

    (I + A) U = diag(beta) (V - diag(E) K S),   A = strictly lower part of diag(beta) (K K^T * D)
    O = diag(E) Q S + (Q K^T * D) U
    S <- E_last S + (diag(exp(G_last - G)) K)^T U

What does not depend on S, the inverse of I + A above all, is computed for many chunks of all rows together; then S goes
from chunk to chunk, rows together. Chunks are taken in groups whose temporaries fit the processor's cache, which also
bounds memory for any number of tokens.

Differences of G are formed in float64 and exponentiated only where they are not positive, so that strongly decaying
heads lose nothing. A partial last chunk is filled up with zeros, which change nothing; the state after it is not used.

Letters beside the package's: N chunks, c tokens of a chunk (64).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from deltaserve.ops.rows import PrefillRows

CHUNK = 64

# How many [64, 64] float32 matrices one group holds of each kind; 32 of them are half a MiB.
GROUP_MATRICES = 32

# Triangular blocks up to this size are inverted row by row, larger ones by halves.
INVERSE_BLOCK = 8


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens [start, stop) of the step: chunk `index` of prefill row `row`."""

    row: int
    index: int
    start: int
    stop: int

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a group of chunks needs beside the state, float32.

    seen_NHXK    E k, then E q (X = 2c): times S, what the tokens see of the state
    solve_NHcc   (I + A)^-1 diag(beta)
    qk_NHcc      q_i . k_j D_ij for j <= i, 0 above
    v_NHcV
    k_end_NHcK   exp(G_last - G) k
    last_NH11    E_last
    """

    seen_NHXK: Tensor
    solve_NHcc: Tensor
    qk_NHcc: Tensor
    v_NHcV: Tensor
    k_end_NHcK: Tensor
    last_NH11: Tensor


def prefill(
    q_TJK: Tensor,
    k_TJK: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    states: Tensor,
    ring_k: Tensor,
    ring_u: Tensor,
    ring_g: Tensor,
    rows: PrefillRows,
) -> Tensor:
    order, steps = _schedule(rows)
    slots_at_cut = _slots_at_cut(rows)
    ring_rows = rows.rows_R.tolist()
    o_THV = torch.empty_like(v_THV)
    state_RHKV = states.index_select(0, rows.slots_in_R).float()[order]
    for group in _groups(steps, v_THV.shape[1]):
        chunks = [chunk for step in group for chunk in step]
        prepared = _prepare(*(_split(x, chunks) for x in (q_TJK, k_TJK, v_THV, g_TH, beta_TH)))
        first = 0
        for step in group:
            u_RHcV, o_RHcV, state_RHKV = _advance(prepared, slice(first, first + len(step)), state_RHKV[: len(step)])
            first += len(step)
            # A state is rounded where it would be stored, so that a cut changes nothing.
            state_RHKV = state_RHKV.to(states.dtype).float()
            for place, chunk in enumerate(step):
                tokens = slice(chunk.start, chunk.stop)
                o_THV[tokens] = o_RHcV[place, :, : chunk.num_tokens].transpose(0, 1)
                for slot in slots_at_cut.get((chunk.row, chunk.index), ()):
                    states[slot] = state_RHKV[place]
                if chunk.num_tokens < CHUNK:
                    entries = ring_rows[chunk.row], slice(0, chunk.num_tokens)
                    ring_k[entries] = k_TJK[tokens]
                    ring_u[entries] = u_RHcV[place, :, : chunk.num_tokens].transpose(0, 1)
                    ring_g[entries] = g_TH[tokens]
    return o_THV


def decay_matrix(g: Tensor) -> Tensor:
    """[..., n] log decays -> [..., n, n] float32: exp of the sum of g over (j, i] for j <= i, 0 above."""
    return _decay_matrix(g.cumsum(-1, dtype=torch.float64))


def _decay_matrix(sums: Tensor) -> Tensor:
    size = sums.shape[-1]
    above = torch.full((size, size), -torch.inf, device=sums.device).triu_(1)
    return torch.sub(sums.unsqueeze(-1), sums.unsqueeze(-2)).float().add_(above).exp_()


def _schedule(rows: PrefillRows) -> tuple[list[int], list[list[_Chunk]]]:
    """Rows from longest to shortest, and for each chunk index the chunks of the rows that reach it, in that order."""
    lengths = [stop - start for start, stop in zip(rows.offsets, rows.offsets[1:], strict=False)]
    order = sorted(range(rows.num_rows), key=lambda row: -lengths[row])
    steps = []
    for done in range(0, max(lengths), CHUNK):
        starts = ((row, rows.offsets[row] + done) for row in order if lengths[row] > done)
        steps.append([_Chunk(row, done // CHUNK, at, min(at + CHUNK, rows.offsets[row + 1])) for row, at in starts])
    return order, steps


def _slots_at_cut(rows: PrefillRows) -> dict[tuple[int, int], list[int]]:
    """(row, index of the chunk that ends at the cut) -> slots."""
    slots: dict[tuple[int, int], list[int]] = {}
    for row, position, slot in rows.cuts:
        num_tokens = rows.offsets[row + 1] - rows.offsets[row]
        assert 0 < position <= num_tokens and position % CHUNK == 0, f"cut {position} of a row of {num_tokens} tokens"
        slots.setdefault((row, position // CHUNK - 1), []).append(slot)
    return slots


def _groups(steps: list[list[_Chunk]], num_heads: int) -> Iterator[list[list[_Chunk]]]:
    """Consecutive steps of together at most GROUP_MATRICES heads of chunks, but at least one step."""
    group: list[list[_Chunk]] = []
    num_chunks = 0
    for step in steps:
        if group and (num_chunks + len(step)) * num_heads > GROUP_MATRICES:
            yield group
            group, num_chunks = [], 0
        group.append(step)
        num_chunks += len(step)
    yield group


def _split(x_Th: Tensor, chunks: list[_Chunk]) -> Tensor:
    """[T, heads, ...] -> float32 [N, heads, c, ...], contiguous, zeros beyond a row's last token."""
    first, last = chunks[0], chunks[-1]
    if first.row == last.row and last.stop - first.start == len(chunks) * CHUNK:
        x_Th = x_Th[first.start : last.stop]
    else:
        fill = x_Th.new_zeros(CHUNK, *x_Th.shape[1:])
        x_Th = torch.cat([p for c in chunks for p in (x_Th[c.start : c.stop], fill[c.num_tokens :])])
    return x_Th.unflatten(0, (-1, CHUNK)).transpose(1, 2).float().contiguous()


def _prepare(q_NJcK: Tensor, k_NJcK: Tensor, v_NHcV: Tensor, g_NHc: Tensor, beta_NHc: Tensor) -> _Prepared:
    heads = (k_NJcK.shape[1], v_NHcV.shape[1] // k_NJcK.shape[1])
    sums_NHc = g_NHc.cumsum(-1, dtype=torch.float64)
    from_start = sums_NHc.exp().float()
    to_end = torch.sub(sums_NHc[..., -1:], sums_NHc).exp_().float()
    decays = _decay_matrix(sums_NHc).unflatten(1, heads)
    kq_NJXK = torch.cat((k_NJcK, q_NJcK), dim=2)
    kk, qk = torch.matmul(kq_NJXK, k_NJcK.transpose(2, 3)).unsqueeze(2).split(CHUNK, dim=3)
    system_NHcc = (kk * decays).flatten(1, 2).mul_(beta_NHc.unsqueeze(-1))
    return _Prepared(
        seen_NHXK=(kq_NJXK.unsqueeze(2) * from_start.repeat(1, 1, 2).unflatten(1, heads).unsqueeze(-1)).flatten(1, 2),
        solve_NHcc=_unit_lower_inverse(system_NHcc).mul_(beta_NHc.unsqueeze(-2)),
        qk_NHcc=(qk * decays).flatten(1, 2),
        v_NHcV=v_NHcV,
        k_end_NHcK=(k_NJcK.unsqueeze(2) * to_end.unflatten(1, heads).unsqueeze(-1)).flatten(1, 2),
        last_NH11=from_start[:, :, -1:, None],
    )


def _unit_lower_inverse(x: Tensor) -> Tensor:
    """(I + strictly lower part of x)^-1 of matrices [..., n, n], n a power of 2.

    Diagonal blocks row by row, all at once with the matrices in the last dim; then blocks of twice the size from
    [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]].
    """
    inverse = torch.zeros_like(x)
    size = INVERSE_BLOCK
    block_ijm = -_diagonal_blocks(x, size).movedim((-2, -1), (0, 1)).flatten(2)
    solved_ijm = torch.zeros_like(block_ijm)
    solved_ijm.diagonal().fill_(1.0)
    for i in range(1, size):
        torch.sum(block_ijm[i, :i, None] * solved_ijm[:i, :i], dim=0, out=solved_ijm[i, :i])
    blocks = _diagonal_blocks(inverse, size)
    blocks.copy_(solved_ijm.permute(2, 0, 1).view(blocks.shape))
    while size < x.shape[-1]:
        pairs, corner = _diagonal_blocks(inverse, 2 * size), _diagonal_blocks(x, 2 * size)[..., size:, :size]
        first, second = pairs[..., :size, :size], pairs[..., size:, size:]
        pairs[..., size:, :size] = torch.matmul(torch.matmul(second, corner), first).neg_()
        size *= 2
    return inverse


def _diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """[..., n, n] -> a view [..., n / size, size, size]."""
    count = x.shape[-1] // size
    return x.unflatten(-1, (count, size)).unflatten(-3, (count, size)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _advance(prepared: _Prepared, chunks: slice, state_RHKV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u and o [R, H, c, V] of one chunk of each row, and the states after them."""
    state = state_RHKV.flatten(0, 1)
    v, last = prepared.v_NHcV[chunks].flatten(0, 1), prepared.last_NH11[chunks].flatten(0, 1)
    seen_k, seen_q = torch.bmm(prepared.seen_NHXK[chunks].flatten(0, 1), state).split(CHUNK, dim=1)
    u = torch.bmm(prepared.solve_NHcc[chunks].flatten(0, 1), v - seen_k)
    o = torch.baddbmm(seen_q, prepared.qk_NHcc[chunks].flatten(0, 1), u)
    state = torch.baddbmm(state * last, prepared.k_end_NHcK[chunks].flatten(0, 1).transpose(1, 2), u)
    by_row = state_RHKV.shape[:2]
    return u.unflatten(0, by_row), o.unflatten(0, by_row), state.unflatten(0, by_row)
