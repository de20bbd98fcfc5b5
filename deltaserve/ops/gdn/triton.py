"""The gated delta rule in Triton: gates, normalisation, extend and fold. Prefill is in `triton_prefill`.

Extend reads S at the boundary once for all tokens of a row, and the ring up to the row's own length. The vectors x are
the keys of the new tokens, then their queries; 16 of them are what a matrix product takes.

| kernel  | one program takes      | does                                                                          |
| ------- | ---------------------- | ----------------------------------------------------------------------------- |
| _weigh  | a row and a key head   | what knows no values: how x sees each ring entry (decayed k_i . x), the state |
|         |                        | and the other new tokens; the new entries of the ring's k and g               |
| _extend | a row, a value head, a | sums of S and of the ring's u by those weights, then token after token;       |
|         | block of values        | o, and the new entries of the ring's u                                        |

_extend is bound by reading S: one token a row needs no matrix units. Products of float32 on these are three of tf32,
which keeps float32's accuracy. Decays are exponentials of sums that end at the last entry and are formed from it
alone, each at most 1; no difference of prefix sums is formed in float32.

Letters: R rows, J key heads, H value heads, K and V head sizes, X vectors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops import triton_common as common
from deltaserve.ops.gdn.triton_prefill import prefill
from deltaserve.ops.rows import ExtendRows

__all__ = ["extend", "fold", "gates", "normalize", "prefill"]

MOST_TOKENS = 8


def gates(a_TH: Tensor, b_TH: Tensor, A_log_H: Tensor, dt_bias_H: Tensor) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads = a_TH.shape
    g_TH, beta_TH = torch.empty(2, num_tokens, num_heads, dtype=torch.float32, device=a_TH.device).unbind()
    if num_tokens:
        heads = triton.next_power_of_2(num_heads)
        tokens = max(1, 1024 // heads)
        _gates[(triton.cdiv(num_tokens, tokens),)](
            a_TH, b_TH, A_log_H, dt_bias_H, g_TH, beta_TH, a_TH.stride(0), b_TH.stride(0), num_tokens,
            num_heads, tokens, heads,
        )  # fmt: skip
    return g_TH, beta_TH


def normalize(q_TJK: Tensor, k_TJK: Tensor) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, size = q_TJK.shape
    q, k = torch.empty(2, num_tokens, num_heads, size, dtype=q_TJK.dtype, device=q_TJK.device).unbind()
    width = triton.next_power_of_2(size)
    heads = max(1, min(triton.next_power_of_2(num_heads), 2048 // width))
    if num_tokens:
        _normalize[(num_tokens, triton.cdiv(num_heads, heads), 2)](
            q_TJK, k_TJK, q, k, *q_TJK.stride()[:2], *k_TJK.stride()[:2], size**-0.5, num_heads, size, heads, width
        )
    return q, k


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
    block: int | None = None,
    piece: int = 8,
    num_warps: int | None = None,
    weigh_warps: int = 1,
) -> Tensor:
    """See the package. At most MOST_TOKENS tokens a row. `block` (values of a program) and the rest are to measure."""
    assert rows.width <= MOST_TOKENS, f"{rows.width} tokens a row; this kernel takes {MOST_TOKENS}"
    common.check_rows(q_TJK, k_TJK, v_THV, g_TH, beta_TH, states, ring_k, ring_u, ring_g)
    (num_key_heads, key_size), (num_heads, value_size) = k_TJK.shape[1:], v_THV.shape[1:]
    o_THV = torch.empty(v_THV.shape, dtype=v_THV.dtype, device=v_THV.device)
    keys = common.padded(key_size)
    block = block or _value_block(value_size, rows.num_rows * num_heads, rows.width)
    shape = (rows.num_rows, num_heads, 16)
    weights, among, scales = (torch.empty(*shape, n, device=v_THV.device) for n in (common.CHUNK, MOST_TOKENS, 1))
    of_rows, new_R = (rows.rows_R, rows.slots_R, rows.num_ring_R), common.num_new(rows)
    _weigh[(num_key_heads, rows.num_rows)](
        q_TJK, k_TJK, g_TH, ring_k, ring_g, weights, among, scales, rows.rows_R, rows.num_ring_R, new_R,
        q_TJK.stride(0), k_TJK.stride(0), g_TH.stride(0), ring_k.stride(0), ring_g.stride(0),
        rows.width, num_key_heads, num_heads, key_size, keys, num_warps=weigh_warps,
    )  # fmt: skip
    _extend[(triton.cdiv(value_size, block), num_heads, rows.num_rows)](
        q_TJK, k_TJK, v_THV, beta_TH, states, ring_u, weights, among, scales, o_THV, *of_rows, new_R,
        q_TJK.stride(0), k_TJK.stride(0), v_THV.stride(0), beta_TH.stride(0), states.stride(0), ring_u.stride(0),
        rows.width, num_key_heads, num_heads, key_size, value_size, keys, block, piece,
        num_warps=num_warps or (4 if rows.width == 1 else 2),
    )  # fmt: skip
    return o_THV


def fold(states: Tensor, ring_k: Tensor, ring_u: Tensor, ring_g: Tensor, rows: ExtendRows) -> None:
    if not rows.fold_ends:
        return
    num_layers, num_heads, key_size, value_size = states.shape[1:]
    piece, block = min(128, common.padded(key_size)), min(64, common.padded(value_size))
    grid = (triton.cdiv(value_size, block) * triton.cdiv(key_size, piece) * num_heads, num_layers, len(rows.fold_ends))
    _fold[grid](
        states, ring_k, ring_u, ring_g, rows.fold_rows_F, rows.fold_in_F, rows.fold_out_F,
        *states.stride()[:2], *ring_k.stride()[:2], *ring_u.stride()[:2], *ring_g.stride()[:2],
        ring_k.shape[3], num_heads, key_size, value_size, piece, block,
    )  # fmt: skip


def _value_block(value_size: int, num_heads: int, width: int) -> int:
    """Values of one program: few where there are few heads, so that all of the GPU reads."""
    block = 32 if width == 1 or num_heads < 256 else 64
    return min(block, common.padded(value_size))


@triton.jit
def _gates(
    a_ptr, b_ptr, A_log_ptr, bias_ptr, g_ptr, beta_ptr, a_stride, b_stride, num_tokens,
    H: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    h = tl.arange(0, HEADS)
    mask = (t < num_tokens)[:, None] & (h < H)[None, :]
    x = tl.load(a_ptr + t[:, None] * a_stride + h[None, :], mask=mask, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
    # log(1 + e^x), from the side on which nothing overflows; log1p(e) is log(u) e / (u - 1) of the rounded u = 1 + e.
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    rate = tl.exp(tl.load(A_log_ptr + h, mask=h < H, other=0.0).to(tl.float32))
    g = -rate[None, :] * (tl.maximum(x, 0.0) + log1p)
    b = tl.load(b_ptr + t[:, None] * b_stride + h[None, :], mask=mask, other=0.0).to(tl.float32)
    place = t[:, None] * H + h[None, :]
    tl.store(g_ptr + place, g, mask=mask)
    tl.store(beta_ptr + place, tl.sigmoid(b), mask=mask)


@triton.jit
def _normalize(
    q_ptr, k_ptr, q_out, k_out, q_token, q_head, k_token, k_head, q_scale,
    J: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    mask = (j < J)[:, None] & (d < K)[None, :]
    place = (t * J + j[:, None]) * K + d[None, :]
    if tl.program_id(2) == 0:
        x = tl.load(q_ptr + t * q_token + j[:, None] * q_head + d[None, :], mask=mask, other=0.0).to(tl.float32)
        y = x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None] * q_scale
        tl.store(q_out + place, y.to(q_out.dtype.element_ty), mask=mask)
    else:
        x = tl.load(k_ptr + t * k_token + j[:, None] * k_head + d[None, :], mask=mask, other=0.0).to(tl.float32)
        y = x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
        tl.store(k_out + place, y.to(k_out.dtype.element_ty), mask=mask)


@triton.jit
def _vectors(q_ptr, k_ptr, first, q_stride, k_stride, j, kd, WIDTH: tl.constexpr, K: tl.constexpr):
    """[16, keys]: keys of up to 8 tokens, then their queries; rows without a token are 0."""
    x = tl.arange(0, 16)
    t = x % 8
    real = (t < WIDTH)[:, None] & (kd < K)[None, :]
    place = (first + t)[:, None]
    k = tl.load(k_ptr + place * k_stride + j * K + kd[None, :], mask=real & (x < 8)[:, None], other=0.0)
    return k + tl.load(q_ptr + place * q_stride + j * K + kd[None, :], mask=real & (x >= 8)[:, None], other=0.0)


@triton.jit
def _weigh(
    q_ptr, k_ptr, g_ptr, ring_k_ptr, ring_g_ptr, weights_ptr, among_ptr, scales_ptr,
    rows_ptr, num_ring_ptr, num_new_ptr, q_stride, k_stride, g_stride, ring_k_stride, ring_g_stride,
    WIDTH: tl.constexpr, J: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    j, r = tl.program_id(0), tl.program_id(1)
    kd = tl.arange(0, KEYS)
    c = tl.arange(0, 64)
    x = tl.arange(0, 16)
    i = tl.arange(0, 16)  # tokens as columns, 8 of them
    t = x % 8
    row = tl.load(rows_ptr + r)
    num_ring = tl.load(num_ring_ptr + r).to(tl.int32)
    num_new = tl.load(num_new_ptr + r)
    first = r.to(tl.int64) * WIDTH
    ring_k = ring_k_ptr + row * ring_k_stride + j * K
    in_ring = (c < num_ring)[:, None]
    keys = tl.load(ring_k + c[:, None] * (J * K) + kd[None, :], mask=in_ring & (kd < K)[None, :], other=0.0)
    kq = _vectors(q_ptr, k_ptr, first, q_stride, k_stride, j, kd, WIDTH, K)
    scores = tl.dot(kq.to(keys.dtype), tl.trans(keys), input_precision="tf32x3")
    new_scores = tl.dot(kq, tl.trans(kq), input_precision="tf32x3")
    sees = (i[None, :] < t[:, None]) | ((i[None, :] == t[:, None]) & (x >= 8)[:, None])
    for member in tl.static_range(H // J):
        h = j * (H // J) + member
        # Of the ring: entry c decays by what comes after it, the state by all of it.
        ring_g = ring_g_ptr + row * ring_g_stride + h
        later = tl.cumsum(tl.load(ring_g + (c + 1) * H, mask=c + 1 < num_ring, other=0.0), 0, reverse=True)
        decay = tl.where(c < num_ring, tl.exp(later), 0.0)
        ring_sum = tl.sum(tl.load(ring_g + c * H, mask=c < num_ring, other=0.0), 0)
        # Sums of g over the new tokens, in float64: their differences are sums too, and must be as exact.
        g = tl.load(g_ptr + (first + i) * g_stride + h, mask=i < WIDTH, other=0.0)
        wide = g.to(tl.float64)
        sums = tl.sum(tl.where(i[None, :] <= t[:, None], wide[None, :], 0.0), 1)
        between = (sums[:, None] - tl.cumsum(wide, 0)[None, :]).to(tl.float32)
        new_decay = tl.exp(sums.to(tl.float32))
        head = (r.to(tl.int64) * H + h) * 16
        weights = scores * decay[None, :] * new_decay[:, None]
        among = new_scores * tl.exp(tl.where(sees, between, -float("inf")))
        tl.store(weights_ptr + (head + x)[:, None] * 64 + c[None, :], weights)
        tl.store(among_ptr + (head + x)[:, None] * 8 + i[None, :], among, mask=(i < 8)[None, :])
        tl.store(scales_ptr + head + x, new_decay * tl.exp(ring_sum))
        tl.store(ring_g + (num_ring + i) * H, g, mask=i < num_new)
    new_place = ring_k + (num_ring + t)[:, None] * (J * K) + kd[None, :]
    mine = (kd < K)[None, :] & ((x < 8) & (t < num_new))[:, None]
    tl.store(new_place, kq.to(ring_k_ptr.dtype.element_ty), mask=mine)


@triton.jit
def _see_one(
    q_ptr, k_ptr, state, ring_u, weights_ptr, scales_ptr, num_ring, vd,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """What one token's key and query see of state and ring, elementwise: sums over tiles, reduced at the end."""
    p = tl.arange(0, PIECE)
    of_k = tl.zeros([PIECE, BLOCK], tl.float32)
    of_q = tl.zeros([PIECE, BLOCK], tl.float32)
    for start in tl.range(0, KEYS, PIECE, loop_unroll_factor=4):
        kd = start + p
        s = tl.load(state + kd[:, None] * V + vd[None, :], mask=(kd < K)[:, None] & (vd < V)[None, :], other=0.0)
        of_k += s.to(tl.float32) * tl.load(k_ptr + kd, mask=kd < K, other=0.0).to(tl.float32)[:, None]
        of_q += s.to(tl.float32) * tl.load(q_ptr + kd, mask=kd < K, other=0.0).to(tl.float32)[:, None]
    of_k *= tl.load(scales_ptr)
    of_q *= tl.load(scales_ptr + 8)
    for start in range(0, num_ring, PIECE):
        c = start + p
        mask = (c < num_ring)[:, None] & (vd < V)[None, :]
        u = tl.load(ring_u + c[:, None] * (H * V) + vd[None, :], mask=mask, other=0.0)
        of_k += u * tl.load(weights_ptr + c)[:, None]
        of_q += u * tl.load(weights_ptr + 8 * 64 + c)[:, None]
    return tl.sum(of_k, 0), tl.sum(of_q, 0)


@triton.jit
def _see_many(
    q_ptr, k_ptr, state, ring_u, weights_ptr, scales_ptr, num_ring, vd, first, j, q_stride, k_stride,
    WIDTH: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What all vectors see of state and ring, on matrix units: [16, BLOCK]."""
    x = tl.arange(0, 16)
    piece: tl.constexpr = 32 if KEYS >= 32 else KEYS
    past = tl.zeros([16, BLOCK], tl.float32)
    for start in tl.range(0, KEYS, piece, num_stages=3):
        kd = start + tl.arange(0, piece)
        s = tl.load(state + kd[:, None] * V + vd[None, :], mask=(kd < K)[:, None] & (vd < V)[None, :], other=0.0)
        kq = _vectors(q_ptr, k_ptr, first, q_stride, k_stride, j, kd, WIDTH, K).to(tl.float32)
        past = tl.dot(kq, s.to(tl.float32), past, input_precision="tf32x3")
    past *= tl.load(scales_ptr + x)[:, None]
    for start in tl.range(0, num_ring, 32, num_stages=2):
        c = start + tl.arange(0, 32)
        mask = (c < num_ring)[:, None] & (vd < V)[None, :]
        u = tl.load(ring_u + c[:, None] * (H * V) + vd[None, :], mask=mask, other=0.0)
        weights = tl.load(weights_ptr + x[:, None] * 64 + c[None, :])
        past = tl.dot(weights, u, past, input_precision="tf32x3")
    return past


@triton.jit
def _extend(
    q_ptr, k_ptr, v_ptr, beta_ptr, states_ptr, ring_u_ptr, weights_ptr, among_ptr, scales_ptr, o_ptr,
    rows_ptr, slots_ptr, num_ring_ptr, num_new_ptr,
    q_stride, k_stride, v_stride, beta_stride, state_stride, ring_u_stride,
    WIDTH: tl.constexpr, J: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    KEYS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    h, r = tl.program_id(1), tl.program_id(2)
    j = h // (H // J)
    vd = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.arange(0, 16)[:, None]
    num_ring = tl.load(num_ring_ptr + r).to(tl.int32)
    num_new = tl.load(num_new_ptr + r)
    first = r.to(tl.int64) * WIDTH
    head = (r.to(tl.int64) * H + h) * 16
    state = states_ptr + tl.load(slots_ptr + r) * state_stride + h * K * V
    ring_u = ring_u_ptr + tl.load(rows_ptr + r) * ring_u_stride + h * V
    if WIDTH == 1:
        past_k, past_q = _see_one(
            q_ptr + first * q_stride + j * K, k_ptr + first * k_stride + j * K, state, ring_u,
            weights_ptr + head * 64, scales_ptr + head, num_ring, vd, H, K, V, KEYS, BLOCK, PIECE,
        )  # fmt: skip
    else:
        past = _see_many(
            q_ptr, k_ptr, state, ring_u, weights_ptr + head * 64, scales_ptr + head, num_ring, vd, first, j,
            q_stride, k_stride, WIDTH, H, K, V, KEYS, BLOCK,
        )  # fmt: skip
    # Among themselves, token after token.
    updates = ()
    for token in tl.static_range(WIDTH):
        if WIDTH > 1:
            past_k = tl.sum(tl.where(x == token, past, 0.0), 0)
            past_q = tl.sum(tl.where(x == token + 8, past, 0.0), 0)
        v = tl.load(v_ptr + (first + token) * v_stride + h * V + vd, mask=vd < V, other=0.0).to(tl.float32)
        rest = v - past_k
        o = past_q
        for earlier in tl.static_range(token):
            rest -= tl.load(among_ptr + (head + token) * 8 + earlier) * updates[earlier]
            o += tl.load(among_ptr + (head + 8 + token) * 8 + earlier) * updates[earlier]
        u_new = tl.load(beta_ptr + (first + token) * beta_stride + h) * rest
        o += tl.load(among_ptr + (head + 8 + token) * 8 + token) * u_new
        updates = updates + (u_new,)
        tl.store(ring_u + (num_ring + token) * (H * V) + vd, u_new, mask=(vd < V) & (token < num_new))
        o_place = o_ptr + ((first + token) * H + h) * V + vd
        tl.store(o_place, o.to(o_ptr.dtype.element_ty), mask=vd < V)


@triton.jit
def _fold(
    states_ptr, ring_k_ptr, ring_u_ptr, ring_g_ptr, rows_ptr, in_ptr, out_ptr,
    state_slot, state_layer, ring_k_row, ring_k_layer, ring_u_row, ring_u_layer, ring_g_row, ring_g_layer,
    J: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile, layer, f = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    pieces: tl.constexpr = (K + PIECE - 1) // PIECE
    h = tile // (blocks * pieces)
    kd = tile // blocks % pieces * PIECE + tl.arange(0, PIECE)
    vd = tile % blocks * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, 64)
    mask = (kd < K)[:, None] & (vd < V)[None, :]
    row = tl.load(rows_ptr + f)
    head = layer * state_layer + (h * K + kd)[:, None] * V + vd[None, :]
    s = tl.load(states_ptr + tl.load(in_ptr + f) * state_slot + head, mask=mask, other=0.0).to(tl.float32)
    place = ring_k_ptr + row * ring_k_row + layer * ring_k_layer + h // (H // J) * K
    keys = tl.load(place + c[:, None] * (J * K) + kd[None, :], mask=(kd < K)[None, :], other=0.0).to(tl.float32)
    place = ring_u_ptr + row * ring_u_row + layer * ring_u_layer + h * V
    updates = tl.load(place + c[:, None] * (H * V) + vd[None, :], mask=(vd < V)[None, :], other=0.0)
    place = ring_g_ptr + row * ring_g_row + layer * ring_g_layer + h
    total = tl.sum(tl.load(place + c * H), 0)
    later = tl.cumsum(tl.load(place + (c + 1) * H, mask=c < 63, other=0.0), 0, reverse=True)
    updates *= tl.exp(later)[:, None]
    s = tl.dot(tl.trans(keys), updates, s * tl.exp(total), input_precision="tf32x3")
    tl.store(states_ptr + tl.load(out_ptr + f) * state_slot + head, s.to(states_ptr.dtype.element_ty), mask=mask)
