"""y = x W^T of a float8 weight with a scale per 128 x 128 block, in bfloat16; the weight stays float8 in memory.

x is quantised on the way in, a scale per token and 128 columns, so that products run on 8-bit matrix units:

| tokens     | by                                                                                             |
| ---------- | ---------------------------------------------------------------------------------------------- |
| up to 64   | `_tall`: reads the weight once; the weight is the tall operand; columns split over programs where |
|            | the weight has few rows, partial sums added by a second kernel in a fixed order                |
| more       | torch._scaled_mm (its 1 x 128 / 128 x 128 recipe), or `_tall` in blocks of 64 tokens where the  |
|            | inputs are no multiple of 512: cuBLAS then misreads the weight's scales                         |

Letters: T tokens, N outputs, I inputs, S parts of the inputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltaserve.ops import triton_common as common

FEW_TOKENS = 64
FP8_MAX = 448.0
GROUP = 128


def quantize(x_TI: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3 [T, I] and scales [T, ceil(I / 128)] float32 with x = values * scale."""
    return _quantize_rows(x_TI, x_TI.shape[1], False)


def silu_mul_quantize(gate_up_T2F: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize` of `silu_mul`, [T, F], without the product in memory."""
    return _quantize_rows(gate_up_T2F, gate_up_T2F.shape[1] // 2, True)


def linear_fp8(x_TI: Tensor, weight_NI: Tensor, scale_inv: Tensor, parts: int | None = None) -> Tensor:
    """[T, N] bfloat16. weight float8_e4m3, scale_inv [ceil(N / 128), ceil(I / 128)] float32, I a multiple of 128."""
    assert weight_NI.shape[1] % GROUP == 0, f"inputs must be a multiple of {GROUP}, not {weight_NI.shape[1]}"
    if len(x_TI) > FEW_TOKENS and weight_NI.shape[0] % 16 == 0 and weight_NI.shape[1] % (4 * GROUP) == 0:
        return _scaled_mm(x_TI, weight_NI, scale_inv)
    return few(*quantize(x_TI), weight_NI, scale_inv, parts)


def few(
    x8_TI: Tensor,
    x_scale: Tensor,
    weight_NI: Tensor,
    scale_inv: Tensor,
    parts: int | None = None,
    tile: int | None = None,
    num_stages: int = 5,
) -> Tensor:
    """The product of quantised x with `_tall`; any number of tokens, best for few."""
    num_tokens, num_inputs = x8_TI.shape
    num_outputs = len(weight_NI)
    block = min(64, common.padded(num_tokens))
    tile = tile or (128 if num_outputs >= 128 * 256 else 64)
    tiles = triton.cdiv(num_outputs, tile)
    parts = parts or max(1, min(8, 264 // tiles, num_inputs // GROUP // 4))
    y = torch.empty(num_tokens, num_outputs, dtype=torch.bfloat16, device=x8_TI.device)
    out = y if parts == 1 else torch.empty(parts, num_tokens, num_outputs, device=y.device)
    weight = common.matrix_descriptor(weight_NI, tile, GROUP)
    _tall[(tiles, parts, triton.cdiv(num_tokens, block))](
        x8_TI, x_scale, weight, scale_inv, out, num_tokens, x8_TI.stride(0), scale_inv.stride(0),
        num_outputs, num_inputs, parts, block, tile, num_stages, num_warps=4,
    )  # fmt: skip
    if parts > 1:
        _add_parts[(triton.cdiv(y.numel(), 1024),)](out, y, y.numel(), parts, 1024)
    return y


def _scaled_mm(x_TI: Tensor, weight_NI: Tensor, scale_inv: Tensor) -> Tensor:
    """Rows are padded to what cuBLAS takes, with whatever is there: a row's result knows no other row.

    It wants the scales of x with tokens next to each other.
    """
    num_tokens, padded = len(x_TI), -(-len(x_TI) // 16) * 16
    x8, x_scale = _quantize_rows(x_TI, x_TI.shape[1], False, padded)
    y = torch._scaled_mm(x8, weight_NI.t(), x_scale, scale_inv.t(), out_dtype=torch.bfloat16)
    return y[:num_tokens]


def _quantize_rows(x: Tensor, size: int, has_gate: bool, padded: int | None = None) -> tuple[Tensor, Tensor]:
    """With `padded`, that many rows, and scales lie token by token; else group by group."""
    num_groups = triton.cdiv(size, GROUP)
    y = torch.empty(padded or len(x), size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(len(x), num_groups, device=x.device)
    if padded:
        scales = torch.empty(num_groups, padded, device=x.device).t()
    groups = min(8, triton.next_power_of_2(num_groups))
    if len(x):
        grid = (len(x), triton.cdiv(num_groups, groups))
        _quantize[grid](x, y, scales, x.stride(0), *scales.stride(), size, num_groups, has_gate, groups)
    return y, scales


@triton.jit
def _quantize(
    x_ptr, y_ptr, scale_ptr, stride, scale_token, scale_group,
    SIZE: tl.constexpr, NUM_GROUPS: tl.constexpr, SILU: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    i = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + t * stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    if SILU:
        x = x * tl.sigmoid(x) * tl.load(x_ptr + t * stride + SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1), 1e-8) / 448.0
    tl.store(y_ptr + t * SIZE + i, (x / scale[:, None]).to(tl.float8e4nv), mask=i < SIZE)
    tl.store(scale_ptr + t * scale_token + group * scale_group, scale, mask=group < NUM_GROUPS)


@triton.jit
def _tall(
    x_ptr, x_scale_ptr, weight, scale_ptr, y_ptr, num_tokens, x_stride, scale_stride,
    N: tl.constexpr, I: tl.constexpr, S: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,  # noqa: E741
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    t = tl.program_id(2) * BM + tl.arange(0, BM)
    n = tile * BN + tl.arange(0, BN)
    i = tl.arange(0, 128)
    steps: tl.constexpr = I // 128
    share: tl.constexpr = (steps + S - 1) // S
    real = t < num_tokens
    x_place = x_ptr + t[:, None].to(tl.int64) * x_stride + i[None, :]
    w_scale = scale_ptr + (tile * BN) // 128 * scale_stride
    acc = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(part * share, tl.minimum(part * share + share, steps), num_stages=STAGES):
        w = weight.load([tile * BN, step * 128])
        x = tl.load(x_place + step * 128, mask=real[:, None], other=0.0)
        scale = tl.load(x_scale_ptr + t * steps + step, mask=real, other=0.0) * tl.load(w_scale + step)
        acc += tl.dot(w, tl.trans(x)) * scale[None, :]
    place = (part * num_tokens + t[:, None]).to(tl.int64) * N + n[None, :]
    tl.store(y_ptr + place, tl.trans(acc).to(y_ptr.dtype.element_ty), mask=real[:, None] & (n < N)[None, :])


@triton.jit
def _add_parts(parts_ptr, y_ptr, numel, S: tl.constexpr, BLOCK: tl.constexpr):
    place = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(S):
        total += tl.load(parts_ptr + part * numel + place, mask=place < numel, other=0.0)
    tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty), mask=place < numel)
