"""Routing and experts in Triton, bfloat16 or block-scaled float8. See the package for shapes.

Pairs (token, one of its experts) are sorted into blocks of BM pairs of one expert; a product runs a program for each
block and N tile and reads only the experts that were chosen. Up to about 1,024 tokens this is bound by reading the
weights, so the weight is the tall operand (SWAP) and blocks are small. No order within an expert is promised, and none
shows: each pair's result depends on its own row alone. Sums over a token's experts are in the order of its routing.

    pairs --rank in expert--> blocks --gate_up--> [n, 2F] --silu * up--> [n, F] --down--> [n, D] --sum--> [T, D]

Letters: T tokens, k experts per token, n = T k pairs, E experts, D width, F expert width, N and I outputs and inputs
of one product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops import triton_common as common
from deltaserve.ops.linear.triton import quantize, silu_mul, silu_mul_quantize


@dataclass(frozen=True, slots=True)
class Tuning:
    """Pairs of a block, outputs of a tile, inputs of a step, and how it is launched; None: by the number of pairs."""

    block: int | None = None
    tile: int | None = None
    step: int | None = None
    swap: bool | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    use_bulk_copies: bool = True


BY_SIZE = Tuning()


@dataclass(frozen=True, slots=True)
class Blocks:
    """pairs sorted by expert, expert e's at first_E[e] .. + counts_E[e], each expert's beginning on a whole block.

    experts_B names the expert of each block; blocks from num_blocks (device) on hold nothing.
    """

    pairs: Tensor
    counts_E: Tensor
    first_E: Tensor
    experts_B: Tensor
    num_blocks: Tensor
    block: int


def route(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    num_tokens, num_experts = logits_TE.shape
    weights_Tk = torch.empty(num_tokens, top_k, device=logits_TE.device)
    experts_Tk = torch.empty(num_tokens, top_k, dtype=torch.int64, device=logits_TE.device)
    if num_tokens:
        width = triton.next_power_of_2(num_experts)
        _route[(num_tokens,)](
            logits_TE, weights_Tk, experts_Tk, logits_TE.stride(0), num_experts, width,
            top_k, triton.next_power_of_2(top_k), renormalize, num_warps=1 if width <= 256 else 4,
        )  # fmt: skip
    return weights_Tk, experts_Tk


def experts(
    x_TD: Tensor,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    tuning: Tuning = BY_SIZE,
) -> Tensor:
    top_k = experts_Tk.shape[1]
    blocks = sort_pairs(experts_Tk, gate_up_E2FD.shape[0], False, tuning)
    h_n2F = product(x_TD, None, gate_up_E2FD, None, blocks, top_k, tuning)
    y_nD = product(silu_mul(h_n2F), None, down_EDF, None, blocks, 1, tuning)
    return _sum(y_nD, weights_Tk, x_TD.dtype)


def experts_fp8(
    x_TD: Tensor,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    gate_up_E2FD: Tensor,
    gate_up_scale: Tensor,
    down_EDF: Tensor,
    down_scale: Tensor,
    tuning: Tuning = BY_SIZE,
) -> Tensor:
    """`experts` of float8_e4m3 weights with scales [E, ceil(rows / 128), ceil(columns / 128)] float32."""
    top_k = experts_Tk.shape[1]
    blocks = sort_pairs(experts_Tk, gate_up_E2FD.shape[0], True, tuning)
    x8_TD, x_scale = quantize(x_TD)
    h_n2F = product(x8_TD, x_scale, gate_up_E2FD, gate_up_scale, blocks, top_k, tuning)
    y_nD = product(*silu_mul_quantize(h_n2F), down_EDF, down_scale, blocks, 1, tuning)
    return _sum(y_nD, weights_Tk, x_TD.dtype)


def sort_pairs(experts_Tk: Tensor, num_experts: int, is_fp8: bool, tuning: Tuning = BY_SIZE) -> Blocks:
    num_pairs, device = experts_Tk.numel(), experts_Tk.device
    block = tuning.block or _block(num_pairs, num_experts, is_fp8)
    most_blocks = num_pairs if num_pairs < num_experts else num_pairs // block + num_experts
    counts_E = torch.zeros(num_experts, dtype=torch.int32, device=device)
    rank_n = torch.empty(num_pairs, dtype=torch.int32, device=device)
    first_E = torch.empty_like(counts_E)
    experts_B, num_blocks = torch.empty(most_blocks + 1, dtype=torch.int32, device=device).split((most_blocks, 1))
    pairs = torch.empty(most_blocks * block, dtype=torch.int32, device=device)
    experts_Tk = experts_Tk.contiguous()
    grid = (triton.cdiv(num_pairs, 1024),)
    _rank[grid](experts_Tk, counts_E, rank_n, num_pairs, 1024)
    _place[grid](
        experts_Tk, counts_E, rank_n, first_E, pairs, experts_B, num_blocks, num_pairs,
        num_experts, triton.next_power_of_2(num_experts), block, 1024,
    )  # fmt: skip
    return Blocks(pairs, counts_E, first_E, experts_B, num_blocks, block)


def product(
    x_nI: Tensor,
    x_scale: Tensor | None,
    weight_ENI: Tensor,
    weight_scale: Tensor | None,
    blocks: Blocks,
    top_k: int,
    tuning: Tuning = BY_SIZE,
) -> Tensor:
    """[pairs, N]: row p is x[p // top_k] W^T of the pair's expert; bfloat16 for float8 operands, else x's dtype."""
    num_outputs, num_inputs = weight_ENI.shape[1:]
    assert weight_ENI.stride(2) == 1 and x_nI.stride(1) == 1
    is_fp8 = x_scale is not None and weight_scale is not None
    num_pairs = len(x_nI) * top_k
    y = torch.empty(num_pairs, num_outputs, dtype=torch.bfloat16 if is_fp8 else x_nI.dtype, device=x_nI.device)
    is_few = blocks.block <= 16
    swap = is_few if tuning.swap is None else tuning.swap
    step = 128 if is_fp8 else tuning.step or min(64 if x_nI.dtype.itemsize < 4 else 32, common.padded(num_inputs))
    tile = tuning.tile or min(64 if is_few else 128, common.padded(num_outputs))
    scales, scale_strides = (x_nI, x_nI), (0, 0, 0)
    if x_scale is not None and weight_scale is not None:
        scales, scale_strides = (x_scale, weight_scale), (x_scale.shape[1], *weight_scale.stride()[:2])
    bulk = tuning.use_bulk_copies and common.takes_bulk_copies(weight_ENI) and weight_ENI.is_contiguous()
    weight = common.matrix_descriptor(weight_ENI, tile, step) if bulk else weight_ENI
    _product[(triton.cdiv(num_outputs, tile), len(blocks.experts_B))](
        x_nI, weight, y, *scales, blocks.pairs, blocks.counts_E, blocks.first_E, blocks.experts_B,
        blocks.num_blocks, x_nI.stride(0), *weight_ENI.stride()[:2], *scale_strides,
        num_outputs, num_inputs, top_k, blocks.block, tile, step, swap, is_fp8, bulk,
        "tf32x3" if x_nI.dtype == torch.float32 else "tf32", tuning.num_stages or (5 if is_few else 4 if is_fp8 else 3),
        num_warps=tuning.num_warps or (4 if blocks.block * tile <= 8192 else 8),
    )  # fmt: skip
    return y


def _block(num_pairs: int, num_experts: int, is_fp8: bool) -> int:
    """Pairs of a block, from how many an expert gets."""
    mean = num_pairs / num_experts
    return 16 if mean <= 12 else 64 if is_fp8 or mean <= 96 else 128


def _sum(y_nD: Tensor, weights_Tk: Tensor, dtype: torch.dtype) -> Tensor:
    num_tokens, top_k = weights_Tk.shape
    size = y_nD.shape[1]
    y_TD = torch.empty(num_tokens, size, dtype=dtype, device=y_nD.device)
    block = min(1024, triton.next_power_of_2(size))
    if num_tokens:
        _combine[(num_tokens, triton.cdiv(size, block))](y_nD, weights_Tk, y_TD, top_k, size, block)
    return y_TD


@triton.jit
def _route(
    logits_ptr, weights_ptr, experts_ptr, stride,
    E: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr, TOP_WIDTH: tl.constexpr, RENORMALIZE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, WIDTH)
    i = tl.arange(0, TOP_WIDTH)
    logits = tl.load(logits_ptr + t * stride + e, mask=e < E, other=-float("inf")).to(tl.float32)
    peak = tl.max(logits, 0)
    total = tl.sum(tl.exp(logits - peak), 0)
    # Each expert once: a taken one gives up its place, so that experts of equal logits come by id, -inf included.
    taken = e >= E
    chosen = tl.zeros([TOP_WIDTH], tl.int32)
    values = tl.full([TOP_WIDTH], -float("inf"), tl.float32)
    for place in tl.static_range(TOP):
        best = tl.max(tl.where(taken, -float("inf"), logits), 0)
        expert = tl.min(tl.where((taken == 0) & (logits == best), e, WIDTH), 0)
        expert = tl.minimum(expert, E - 1)  # only where logits are NaN
        taken = taken | (e == expert)
        chosen = tl.where(i == place, expert, chosen)
        values = tl.where(i == place, best, values)
    weight = tl.exp(values - peak)
    if RENORMALIZE:
        total = tl.sum(weight, 0)
    tl.store(weights_ptr + t * TOP + i, weight / total, mask=i < TOP)
    tl.store(experts_ptr + t * TOP + i, chosen.to(tl.int64), mask=i < TOP)


@triton.jit
def _rank(experts_ptr, counts_ptr, rank_ptr, num_pairs, BLOCK: tl.constexpr):
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = n < num_pairs
    expert = tl.load(experts_ptr + n, mask=mask, other=0)
    rank = tl.atomic_add(counts_ptr + expert, 1, mask=mask, sem="relaxed")
    tl.store(rank_ptr + n, rank, mask=mask)


@triton.jit
def _place(
    experts_ptr, counts_ptr, rank_ptr, first_ptr, pairs_ptr, block_experts_ptr, num_blocks_ptr, num_pairs,
    E: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, WIDTH)
    blocks = tl.cdiv(tl.load(counts_ptr + e, mask=e < E, other=0), BM)
    first_block = tl.cumsum(blocks, 0) - blocks
    # Every program writes the same numbers, and reads back only its own.
    tl.store(first_ptr + e, first_block * BM, mask=e < E)
    tl.store(num_blocks_ptr, tl.sum(blocks, 0))
    tl.debug_barrier()
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = n < num_pairs
    expert = tl.load(experts_ptr + n, mask=mask, other=0)
    place = tl.load(first_ptr + expert, mask=mask, other=0) + tl.load(rank_ptr + n, mask=mask, other=0)
    tl.store(pairs_ptr + place, n, mask=mask)
    tl.store(block_experts_ptr + place // BM, expert.to(tl.int32), mask=mask & (place % BM == 0))


@triton.jit
def _product(
    x_ptr, weight, y_ptr, x_scale_ptr, w_scale_ptr, pairs_ptr, counts_ptr, first_ptr, block_experts_ptr, num_blocks_ptr,
    x_stride, w_expert, w_row, x_scale_stride, w_scale_expert, w_scale_row,
    N: tl.constexpr, I: tl.constexpr, TOP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BI: tl.constexpr,  # noqa: E741
    SWAP: tl.constexpr, FP8: tl.constexpr, BULK: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    if block >= tl.load(num_blocks_ptr):
        return
    expert = tl.load(block_experts_ptr + block).to(tl.int64)
    m = block * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    i = tl.arange(0, BI)
    real = m < tl.load(first_ptr + expert) + tl.load(counts_ptr + expert)
    pair = tl.load(pairs_ptr + m, mask=real, other=0).to(tl.int64)
    x_row = pair // TOP
    # Columns of the last tile beyond N repeat column 0 and are not stored: no mask in the loop.
    w_row_0 = (expert * N).to(tl.int32) + tl.program_id(0) * BN
    if not BULK:
        w_place = weight + expert * w_expert + tl.where(n < N, n, 0)[:, None].to(tl.int64) * w_row + i[None, :]
    x_place = x_ptr + x_row[:, None] * x_stride + i[None, :]
    x_scale = x_scale_ptr + x_row * x_scale_stride
    w_scale = w_scale_ptr + expert * w_scale_expert + (tl.program_id(0) * BN) // 128 * w_scale_row
    if SWAP:
        acc = tl.zeros([BN, BM], tl.float32)
    else:
        acc = tl.zeros([BM, BN], tl.float32)
    for step in tl.range(0, tl.cdiv(I, BI), num_stages=STAGES):
        if BULK:
            w = weight.load([w_row_0, step * BI])
        elif I % BI == 0:
            w = tl.load(w_place + step * BI)
        else:
            w = tl.load(w_place + step * BI, mask=(step * BI + i < I)[None, :], other=0.0)
        if I % BI == 0:
            x = tl.load(x_place + step * BI, mask=real[:, None], other=0.0)
        else:
            x = tl.load(x_place + step * BI, mask=real[:, None] & (step * BI + i < I)[None, :], other=0.0)
        if FP8:
            scale = tl.load(x_scale + step) * tl.load(w_scale + step)
            if SWAP:
                acc += tl.dot(w, tl.trans(x)) * scale[None, :]
            else:
                acc += tl.dot(x, tl.trans(w)) * scale[:, None]
        elif SWAP:
            acc = tl.dot(w, tl.trans(x), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)
    if SWAP:
        acc = tl.trans(acc)
    place = y_ptr + pair[:, None] * N + n[None, :]
    tl.store(place, acc.to(y_ptr.dtype.element_ty), mask=real[:, None] & (n < N)[None, :])


@triton.jit
def _combine(y_ptr, weights_ptr, out_ptr, TOP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP):
        y = tl.load(y_ptr + (t * TOP + k) * D + d, mask=d < D, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + t * TOP + k) * y
    tl.store(out_ptr + t * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)
