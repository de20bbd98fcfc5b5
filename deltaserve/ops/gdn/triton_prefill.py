"""Prefill of the gated delta rule in Triton, in chunks of 64 tokens (the algebra is that of `chunked`).

| kernel   | one program takes                     | writes                                                          |
| -------- | ------------------------------------- | --------------------------------------------------------------- |
| _prepare | a chunk of a head                     | solve = (I + A)^-1 diag(beta); qk = Q K^T * D; decays           |
| _advance | a row, a head, a block of values; it  | o; states at cuts; of a partial last chunk the ring entries     |
|          | goes from chunk to chunk with S in    |                                                                 |
|          | registers                             |                                                                 |

Chunks lie on the 64-token grid, so S after a chunk is the state at a boundary: cuts cost their writing and nothing
else. A partial last chunk is filled up with zeros; S after it is not used.

Operands of the matrix products that meet S: for float32 inputs three tf32 products, which keep float32's accuracy; for
16-bit inputs what `operands` says, and tf32 in the triangular inverse. With bfloat16 operands a program must take 64
values or more: narrower ones read outside of shared memory and give wrong numbers (Triton 3.6 on Hopper, seen with
compute-sanitizer at 32 and 16), so a smaller head is filled up.

Letters: N chunks, c tokens of a chunk (64), J key heads, H value heads, K and V head sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops import triton_common as common
from deltaserve.ops.rows import PrefillRows

EXACT, TF32, BF16 = 2, 1, 0  # kinds of operands


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
    operands: int | None = None,
    block: int | None = None,
    num_warps: int = 4,
    num_stages: int = 2,
    prepare_warps: int = 4,
) -> Tensor:
    """See the package. `operands`, `block` (values of a program) and what follows are for measurements."""
    common.check_rows(q_TJK, k_TJK, v_THV, g_TH, beta_TH, states, ring_k, ring_u, ring_g)
    chunks = common.chunks(rows)
    (num_key_heads, key_size), (num_heads, value_size) = k_TJK.shape[1:], v_THV.shape[1:]
    if operands is None:
        operands = EXACT if v_THV.dtype == torch.float32 else BF16
    device, keys = v_THV.device, common.padded(key_size)
    kind = torch.bfloat16 if operands == BF16 else torch.float32
    shape = (chunks.num_chunks, num_heads, common.CHUNK)
    solve_NHcc, qk_NHcc = torch.empty(2, *shape, common.CHUNK, dtype=kind, device=device).unbind()
    from_start_NHc, to_end_NHc = torch.empty(2, *shape, device=device).unbind()
    _prepare[(num_heads, chunks.num_chunks)](
        q_TJK, k_TJK, g_TH, beta_TH, solve_NHcc, qk_NHcc, from_start_NHc, to_end_NHc,
        chunks.token_N, chunks.count_N, q_TJK.stride(0), k_TJK.stride(0), g_TH.stride(0), beta_TH.stride(0),
        num_key_heads, num_heads, key_size, keys,
        "tf32x3" if operands == EXACT else "tf32", num_warps=prepare_warps,
    )  # fmt: skip
    o_THV = torch.empty(v_THV.shape, dtype=v_THV.dtype, device=device)
    block = block or (64 if operands == BF16 else min(32, common.padded(value_size)))
    _advance[(triton.cdiv(value_size, block), num_heads, rows.num_rows)](
        q_TJK, k_TJK, v_THV, g_TH, solve_NHcc, qk_NHcc, from_start_NHc, to_end_NHc,
        states, ring_k, ring_u, ring_g, o_THV, rows.rows_R, rows.slots_in_R,
        chunks.token_N, chunks.count_N, chunks.first_R1,
        chunks.stretch_first_R1, chunks.stretch_end, chunks.stretch_slot,
        q_TJK.stride(0), k_TJK.stride(0), v_THV.stride(0), g_TH.stride(0),
        states.stride(0), ring_k.stride(0), ring_u.stride(0), ring_g.stride(0),
        num_key_heads, num_heads, key_size, value_size, keys, block, operands, num_stages,
        num_warps=num_warps,
    )  # fmt: skip
    return o_THV


@triton.jit
def _unit_lower_inverse(a, PRECISION: tl.constexpr):
    """(I + a)^-1 of a strictly lower [64, 64] matrix: 4 diagonal blocks of 16 row by row, then twice by halves.

    With X the inverses of the diagonal blocks and C what lies below them inside blocks of twice the size, the inverse
    of the larger blocks is X - X C X.
    """
    i = tl.arange(0, 64)
    r = tl.arange(0, 16)
    own_block = (i // 16)[:, None, None] == tl.arange(0, 4)[None, :, None]
    a_is = tl.sum(tl.where(own_block, tl.reshape(a, [64, 4, 16]), 0.0), 1)
    a_brs = tl.reshape(a_is, [4, 16, 16])
    x_brs = tl.where((r[:, None] == r[None, :])[None, :, :], 1.0, 0.0) + tl.zeros([4, 16, 16], tl.float32)
    for row in range(1, 16):
        row_bs = tl.sum(tl.where((r == row)[None, :, None], a_brs, 0.0), 1)
        seen_bs = tl.sum(row_bs[:, :, None] * x_brs, 1)
        x_brs = tl.where((r == row)[None, :, None], x_brs - seen_bs[:, None, :], x_brs)
    x = tl.reshape(tl.where(own_block, tl.reshape(x_brs, [64, 16])[:, None, :], 0.0), [64, 64])
    for size in tl.static_range(16, 48, 16):
        below = (i[:, None] // size != i[None, :] // size) & (i[:, None] // (2 * size) == i[None, :] // (2 * size))
        cx = tl.dot(tl.where(below, a, 0.0), x, input_precision=PRECISION)
        x -= tl.dot(x, cx, input_precision=PRECISION)
    return x


@triton.jit
def _prepare(
    q_ptr, k_ptr, g_ptr, beta_ptr, solve_ptr, qk_ptr, from_start_ptr, to_end_ptr, token_ptr, count_ptr,
    q_stride, k_stride, g_stride, beta_stride,
    J: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    h, n = tl.program_id(0), tl.program_id(1)
    j = h // (H // J)
    i = tl.arange(0, 64)
    kd = tl.arange(0, KEYS)
    t = tl.load(token_ptr + n).to(tl.int64) + i
    real = i < tl.load(count_ptr + n)
    mask = real[:, None] & (kd < K)[None, :]
    k = tl.load(k_ptr + t[:, None] * k_stride + j * K + kd[None, :], mask=mask, other=0.0)
    q = tl.load(q_ptr + t[:, None] * q_stride + j * K + kd[None, :], mask=mask, other=0.0)
    g = tl.load(g_ptr + t * g_stride + h, mask=real, other=0.0).to(tl.float64)
    beta = tl.load(beta_ptr + t * beta_stride + h, mask=real, other=0.0)
    sums = tl.cumsum(g, 0)
    total = tl.sum(g, 0)
    # Differences of float64 sums, from two float32 halves of each.
    high = sums.to(tl.float32)
    low = (sums - high).to(tl.float32)
    between = (high[:, None] - high[None, :]) + (low[:, None] - low[None, :])
    decay = tl.exp(tl.where(i[:, None] >= i[None, :], between, -float("inf")))
    kk = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * beta[:, None]
    qk = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
    solve = _unit_lower_inverse(tl.where(i[:, None] > i[None, :], kk, 0.0), PRECISION) * beta[None, :]
    head = (n.to(tl.int64) * H + h) * 64
    place = (head + i)[:, None] * 64 + i[None, :]
    tl.store(solve_ptr + place, solve.to(solve_ptr.dtype.element_ty))
    tl.store(qk_ptr + place, qk.to(qk_ptr.dtype.element_ty))
    tl.store(from_start_ptr + head + i, tl.exp(sums.to(tl.float32)))
    tl.store(to_end_ptr + head + i, tl.exp((total - sums).to(tl.float32)))


@triton.jit
def _product(a, b, OPERANDS: tl.constexpr):
    if OPERANDS == 0:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    elif OPERANDS == 1:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32")
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")


@triton.jit
def _chunk(
    s, n, h, j, vd, i, kd, q_ptr, k_ptr, v_ptr, solve_ptr, qk_ptr, from_start_ptr, to_end_ptr, o_ptr, token_ptr,
    q_stride, k_stride, v_stride, count,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, OPERANDS: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """o of one chunk; its keys, its updates, and S after it."""
    t = tl.load(token_ptr + n).to(tl.int64) + i
    keys, values = (kd < K)[None, :], (vd < V)[None, :]
    if not IS_WHOLE:
        keys = keys & (i < count)[:, None]
        values = values & (i < count)[:, None]
    k = tl.load(k_ptr + t[:, None] * k_stride + j * K + kd[None, :], mask=keys, other=0.0)
    q = tl.load(q_ptr + t[:, None] * q_stride + j * K + kd[None, :], mask=keys, other=0.0)
    v = tl.load(v_ptr + t[:, None] * v_stride + h * V + vd[None, :], mask=values, other=0.0)
    place = (n * H + h.to(tl.int64)) * 64
    solve = tl.load(solve_ptr + (place + i)[:, None] * 64 + tl.arange(0, 64)[None, :])
    qk = tl.load(qk_ptr + (place + i)[:, None] * 64 + tl.arange(0, 64)[None, :])
    from_start = tl.load(from_start_ptr + place + i)
    to_end = tl.load(to_end_ptr + place + i)
    last = tl.load(from_start_ptr + place + 63)
    missing = v.to(tl.float32) - from_start[:, None] * _product(k, s, OPERANDS)
    u = _product(solve, missing, OPERANDS)
    o = from_start[:, None] * _product(q, s, OPERANDS) + _product(qk, u, OPERANDS)
    tl.store(o_ptr + (t[:, None] * H + h) * V + vd[None, :], o.to(o_ptr.dtype.element_ty), mask=values)
    k_end = tl.trans(k.to(tl.float32) * to_end[:, None])
    s = s * last + _product(k_end, u, OPERANDS)
    return k, u, s


@triton.jit
def _advance(
    q_ptr, k_ptr, v_ptr, g_ptr, solve_ptr, qk_ptr, from_start_ptr, to_end_ptr,
    states_ptr, ring_k_ptr, ring_u_ptr, ring_g_ptr, o_ptr, rows_ptr, slots_ptr,
    token_ptr, count_ptr, first_ptr, stretch_first_ptr, stretch_end_ptr, stretch_slot_ptr,
    q_stride, k_stride, v_stride, g_stride, state_stride, ring_k_stride, ring_u_stride, ring_g_stride,
    J: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    OPERANDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    h, r = tl.program_id(1), tl.program_id(2)
    j = h // (H // J)
    i = tl.arange(0, 64)
    kd = tl.arange(0, KEYS)
    vd = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = (h * K + kd)[:, None] * V + vd[None, :]
    stored = (kd < K)[:, None] & (vd < V)[None, :]
    s = tl.load(states_ptr + tl.load(slots_ptr + r) * state_stride + head, mask=stored, other=0.0).to(tl.float32)
    begin = tl.load(first_ptr + r)
    for stretch in range(tl.load(stretch_first_ptr + r), tl.load(stretch_first_ptr + r + 1)):
        end = tl.load(stretch_end_ptr + stretch)
        for n in tl.range(begin, end, num_stages=STAGES):
            _, _, s = _chunk(
                s, n, h, j, vd, i, kd, q_ptr, k_ptr, v_ptr, solve_ptr, qk_ptr, from_start_ptr, to_end_ptr, o_ptr,
                token_ptr, q_stride, k_stride, v_stride, 64, H, K, V, OPERANDS, True,
            )  # fmt: skip
            s = s.to(states_ptr.dtype.element_ty).to(tl.float32)
        begin = end
        slot = tl.load(stretch_slot_ptr + stretch).to(tl.int64)
        if slot >= 0:
            tl.store(states_ptr + slot * state_stride + head, s.to(states_ptr.dtype.element_ty), mask=stored)
    if begin < tl.load(first_ptr + r + 1):
        count = tl.load(count_ptr + begin)
        k, u, s = _chunk(
            s, begin, h, j, vd, i, kd, q_ptr, k_ptr, v_ptr, solve_ptr, qk_ptr, from_start_ptr, to_end_ptr, o_ptr,
            token_ptr, q_stride, k_stride, v_stride, count, H, K, V, OPERANDS, False,
        )  # fmt: skip
        row = tl.load(rows_ptr + r)
        real = (i < count)[:, None]
        place = ring_u_ptr + row * ring_u_stride + (i[:, None] * H + h) * V + vd[None, :]
        tl.store(place, u, mask=real & (vd < V)[None, :])
        if tl.program_id(0) == 0:
            t = tl.load(token_ptr + begin).to(tl.int64) + i
            g = tl.load(g_ptr + t * g_stride + h, mask=i < count, other=0.0)
            tl.store(ring_g_ptr + row * ring_g_stride + i * H + h, g, mask=i < count)
            if h % (H // J) == 0:
                key_place = ring_k_ptr + row * ring_k_stride + (i[:, None] * J + j) * K + kd[None, :]
                tl.store(key_place, k.to(ring_k_ptr.dtype.element_ty), mask=real & (kd < K)[None, :])
