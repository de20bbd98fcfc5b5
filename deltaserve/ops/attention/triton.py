"""Paged attention in Triton: one kernel for prefill, decode and verify. See the package for shapes.

A program takes one KV head and a *tile*: some consecutive tokens of a row, each with its r = H / G query heads, packed
into the rows of a matrix, so that keys and values are read once for all of them. It goes over its part of the row's
pages; where one part is not all, results are merged by their log-sum-exp in a second kernel.

| tokens        | tile                          | parts                                                    |
| ------------- | ----------------------------- | -------------------------------------------------------- |
| decode/verify | a row's tokens, up to 8       | as many as fill the GPU                                  |
| prefill       | BM / r tokens, heaviest first | 1; more where a short turn on a long context has few tiles |

Pages that every token of the tile sees whole take the short way; the first (where first_key hides part of it) and
those at the end are masked. What lies beyond the row's context is never used, NaN included. With a gate [T, H, D] the
result is multiplied by sigmoid(gate) before it is stored.

Products are in bfloat16, or float16 where pages are float8 (one instruction widens a pair), or float32.

Letters: T tokens, H query heads, G KV heads, D head size, M rows of a tile, S parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deltaserve.ops import triton_common as common
from deltaserve.ops.rows import ExtendRows, PrefillRows

PAGE = 64
TILE_ROWS = 128
MOST_PARTS = 64
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Tiles:
    """int32: first token of each tile, how many, its row of the page table, position of the first, context of the row.

    `longest` bounds the contexts; `tokens` the tokens of a tile.
    """

    token_N: Tensor
    count_N: Tensor
    row_N: Tensor
    position_N: Tensor
    context_N: Tensor
    longest: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a launch is cut up; None: by the sizes."""

    tile_rows: int | None = None
    parts: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    use_bulk_copies: bool = True


BY_SIZE = Tuning()


def write(k_TGD: Tensor, v_TGD: Tensor, pages: Tensor, kv_slots_T: Tensor) -> None:
    num_tokens, num_heads, size = k_TGD.shape
    assert pages[0].is_contiguous() and k_TGD.stride(2) == 1 and v_TGD.stride(2) == 1
    if num_tokens:
        heads, width = triton.next_power_of_2(num_heads), triton.next_power_of_2(size)
        _write[(num_tokens,)](
            k_TGD, v_TGD, pages, kv_slots_T, *k_TGD.stride()[:2], *v_TGD.stride()[:2], pages.stride(0),
            num_heads, size, heads, width, pages.dtype == torch.float8_e4m3fn,
        )  # fmt: skip


def prefill(
    q_THD: Tensor,
    pages: Tensor,
    rows: PrefillRows,
    scale: float,
    first_key: int = 0,
    gate_THD: Tensor | None = None,
    tuning: Tuning = BY_SIZE,
) -> Tensor:
    group = q_THD.shape[1] // pages.shape[1]
    tokens = max(1, (tuning.tile_rows or TILE_ROWS) // group)
    tiles = common.once(rows, f"tiles of {tokens}", lambda: _prefill_tiles(rows, tokens))
    return _attend(q_THD, pages, rows.page_table_RP, tiles, scale, first_key, gate_THD, tuning)


def extend(
    q_THD: Tensor,
    pages: Tensor,
    rows: ExtendRows,
    scale: float,
    first_key: int = 0,
    gate_THD: Tensor | None = None,
    tuning: Tuning = BY_SIZE,
) -> Tensor:
    tiles = common.once(rows, "tiles", lambda: _extend_tiles(rows))
    return _attend(q_THD, pages, rows.page_table_RP, tiles, scale, first_key, gate_THD, tuning)


def _prefill_tiles(rows: PrefillRows, tokens: int) -> Tiles:
    tiles = []
    for row, (start, first, stop) in enumerate(zip(rows.starts, rows.offsets, rows.offsets[1:], strict=False)):
        tiles += [
            (start + at - first, at, min(tokens, stop - at), row, start + stop - first)
            for at in range(first, stop, tokens)
        ]
    tiles.sort(reverse=True)
    columns = [list(column) for column in zip(*tiles, strict=True)]
    positions, tokens_at, counts, rows_at, contexts = common.to_device(columns, rows.rows_R.device)
    return Tiles(tokens_at, counts, rows_at, positions, contexts, max(columns[-1]), tokens)


def _extend_tiles(rows: ExtendRows) -> Tiles:
    """All from device tensors. The page table bounds the contexts, so that a replayed graph has room to grow."""
    starts_R, num_new_R = rows.starts_R.int(), common.num_new(rows)
    places_R = torch.arange(rows.num_rows, dtype=torch.int32, device=starts_R.device)
    counts_R = torch.full_like(places_R, rows.width)
    longest = rows.page_table_RP.shape[1] * PAGE
    return Tiles(places_R * rows.width, counts_R, places_R, starts_R, starts_R + num_new_R, longest, rows.width)


def _attend(
    q_THD: Tensor,
    pages: Tensor,
    page_table_RP: Tensor,
    tiles: Tiles,
    scale: float,
    first_key: int,
    gate_THD: Tensor | None,
    tuning: Tuning,
) -> Tensor:
    (num_heads, size), num_kv_heads = q_THD.shape[1:], pages.shape[1]
    assert q_THD.stride(2) == 1 and pages[0].is_contiguous()
    group, num_tiles = num_heads // num_kv_heads, len(tiles.token_N)
    tile_rows = common.padded(tiles.tokens * group)
    parts = tuning.parts or _num_parts(num_tiles * num_kv_heads, tiles.longest, q_THD.device)
    o_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    partial = torch.empty(0 if parts == 1 else q_THD.numel() * parts, device=q_THD.device)
    sums = torch.empty(0 if parts == 1 else q_THD.shape[0] * num_heads * parts, device=q_THD.device)
    width = common.padded(size)
    kind, precision = _operands(q_THD.dtype, pages.dtype)
    bulk = _descriptor(pages, width) if tuning.use_bulk_copies else None
    gate = q_THD if gate_THD is None else gate_THD
    _attention[(num_tiles, num_kv_heads, parts)](
        q_THD, pages if bulk is None else bulk, page_table_RP, gate, o_THD, partial, sums,
        tiles.token_N, tiles.count_N, tiles.row_N, tiles.position_N, tiles.context_N,
        scale * LOG2_E, *q_THD.stride()[:2], *gate.stride()[:2], pages.stride(0), page_table_RP.stride(0),
        num_heads, num_kv_heads, size, width, tile_rows, parts, first_key, kind, precision,
        bulk is not None, gate_THD is not None, tuning.num_stages or _num_stages(tile_rows, width, pages.dtype),
        num_warps=tuning.num_warps or (8 if tile_rows * width >= 128 * 256 else 4),
    )  # fmt: skip
    if parts > 1:
        _merge[(q_THD.shape[0] * num_heads,)](
            partial, sums, gate, o_THD, *gate.stride()[:2], num_heads, size, width, parts,
            triton.next_power_of_2(parts), gate_THD is not None,
        )  # fmt: skip
    return o_THD


def _num_parts(num_programs: int, longest: int, device: torch.device) -> int:
    """Parts of a row's pages: enough to fill the GPU about twice, each of at least 4 pages."""
    if device.type != "cuda":
        return 2 if longest > PAGE else 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if num_programs >= processors:
        wanted = 1 if num_programs >= 4 * processors else 2 * processors // num_programs
    else:
        wanted = 2 * processors // num_programs
    return max(1, min(wanted, MOST_PARTS, math.ceil(longest / PAGE / 4)))


def _num_stages(tile_rows: int, width: int, kv_dtype: torch.dtype) -> int:
    """Pages in flight: what shared memory and, where pages are widened, registers hold beside a tile."""
    page_bytes = 2 * PAGE * width * kv_dtype.itemsize
    if page_bytes > 65536:
        return 1
    return 3 if tile_rows <= (16 if kv_dtype.itemsize == 1 else 64) else 2


def _operands(q_dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[tl.dtype, str]:
    if torch.float32 in (q_dtype, kv_dtype):
        return tl.float32, "tf32x3"
    return (tl.float16 if kv_dtype.itemsize == 1 or q_dtype == torch.float16 else tl.bfloat16), "tf32"


def _descriptor(pages: Tensor, width: int) -> TensorDescriptor | None:
    """The layer's pages as one matrix whose rows are [head size] numbers, for bulk copies of a page's keys or values.

    None where the copy engine cannot take them.
    """
    num_pages, num_kv_heads, _, _, size = pages.shape
    if not common.takes_bulk_copies(pages) or size != width:
        return None
    num_rows = ((num_pages - 1) * pages.stride(0) + num_kv_heads * 2 * PAGE * size) // size
    return TensorDescriptor(pages, [num_rows, size], [size, 1], [PAGE, width])


@triton.jit
def _write(
    k_ptr, v_ptr, pages_ptr, slots_ptr, k_token, k_head, v_token, v_head, page_stride,
    G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    mask = (g < G) & (d < D)
    slot = tl.load(slots_ptr + t)
    place = pages_ptr + slot // 64 * page_stride + (g * 128 + slot % 64) * D + d
    k = tl.load(k_ptr + t * k_token + g * k_head + d, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + t * v_token + g * v_head + d, mask=mask, other=0.0).to(tl.float32)
    if CLAMP:
        k = tl.minimum(tl.maximum(k, -448.0), 448.0)
        v = tl.minimum(tl.maximum(v, -448.0), 448.0)
    tl.store(place, k.to(pages_ptr.dtype.element_ty), mask=mask)
    tl.store(place + 64 * D, v.to(pages_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _page(pages, page, page_stride, g, which, D: tl.constexpr, WIDTH: tl.constexpr, BULK: tl.constexpr):
    """[64, WIDTH]: the keys (which 0) or values (1) of a page's head."""
    if BULK:
        return pages.load([(page * (page_stride // D) + (g * 2 + which) * 64).to(tl.int32), 0])
    else:
        c = tl.arange(0, 64)[:, None]
        d = tl.arange(0, WIDTH)[None, :]
        place = pages + page * page_stride + ((g * 2 + which) * 64 + c) * D + d
        return tl.load(place, mask=d < D, other=0.0)


@triton.jit
def _attention(
    q_ptr, pages, table_ptr, gate_ptr, o_ptr, partial_ptr, sums_ptr,
    token_ptr, count_ptr, row_ptr, position_ptr, context_ptr,
    scale_log2, q_token, q_head, gate_token, gate_head, page_stride, table_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, S: tl.constexpr,
    FIRST_KEY: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr,
    BULK: tl.constexpr, GATE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, g, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m = tl.arange(0, M)
    d = tl.arange(0, WIDTH)[None, :]
    c = tl.arange(0, 64)
    first_position = tl.load(position_ptr + tile)
    count = tl.load(count_ptr + tile)
    context = tl.load(context_ptr + tile)
    table = table_ptr + tl.load(row_ptr + tile) * table_stride
    t = (tl.load(token_ptr + tile) + m // (H // G)).to(tl.int64)
    h = g * (H // G) + m % (H // G)
    inside = (m < count * (H // G))[:, None] & (d < D)
    q = tl.load(q_ptr + t[:, None] * q_token + h[:, None] * q_head + d, mask=inside, other=0.0).to(KIND)
    position = first_position + m // (H // G)
    num_pages = tl.cdiv(tl.minimum(first_position + count, context), 64)
    share = tl.cdiv(num_pages, S)
    begin = part * share
    end = tl.minimum(begin + share, num_pages)
    whole = tl.minimum(first_position, context) // 64  # pages before this one are seen whole by all, save for FIRST_KEY
    top = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, WIDTH], tl.float32)
    from_page = begin
    if FIRST_KEY > 0:
        from_page = tl.maximum(begin, 1)
    for p in tl.range(from_page, tl.minimum(end, whole), num_stages=STAGES):
        page = tl.load(table + p)
        k = _page(pages, page, page_stride, g, 0, D, WIDTH, BULK).to(KIND)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 1)
        top = new_top
        v = _page(pages, page, page_stride, g, 1, D, WIDTH, BULK).to(KIND)
        acc = tl.dot(weight.to(KIND), v, acc * shrink[:, None], input_precision=PRECISION)
    # The masked pages: those from `whole` on, and page 0 where part of it is hidden.
    from_page = tl.maximum(begin, whole)
    num_masked = tl.maximum(end - from_page, 0)
    hides_first = 0
    if FIRST_KEY > 0:
        hides_first = ((begin == 0) & (end > 0) & (from_page > 0)).to(tl.int32)
    for step in tl.range(0, num_masked + hides_first, num_stages=1):
        p = tl.where(step < hides_first, 0, from_page + step - hides_first)
        page = tl.load(table + p)
        k = _page(pages, page, page_stride, g, 0, D, WIDTH, BULK).to(KIND)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        at = p * 64 + c
        sees = at[None, :] <= position[:, None]
        if FIRST_KEY > 0:
            sees = sees & ((at >= FIRST_KEY)[None, :] | (at[None, :] == position[:, None]))
        score = tl.where(sees & (at < context)[None, :], score, -1e30)
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp2(score - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 1)
        top = new_top
        v = _page(pages, page, page_stride, g, 1, D, WIDTH, BULK).to(KIND)
        v = tl.where((at < context)[:, None], v, 0.0).to(KIND)
        acc = tl.dot(weight.to(KIND), v, acc * shrink[:, None], input_precision=PRECISION)
    total = tl.maximum(total, 1e-30)
    o = acc / total[:, None]
    if S == 1:
        if GATE:
            gate = tl.load(gate_ptr + t[:, None] * gate_token + h[:, None] * gate_head + d, mask=inside, other=0.0)
            o *= tl.sigmoid(gate.to(tl.float32))
        tl.store(o_ptr + (t * H + h)[:, None] * D + d, o.to(o_ptr.dtype.element_ty), mask=inside)
    else:
        place = (t * H + h) * S + part
        tl.store(partial_ptr + place[:, None] * D + d, o, mask=inside)
        tl.store(sums_ptr + place, top + tl.log2(total), mask=m < count * (H // G))


@triton.jit
def _merge(
    partial_ptr, sums_ptr, gate_ptr, o_ptr, gate_token, gate_head,
    H: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, PARTS: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, PARTS)
    d = tl.arange(0, WIDTH)
    sums = tl.load(sums_ptr + n * S + s, mask=s < S, other=-float("inf"))
    weight = tl.exp2(sums - tl.max(sums, 0))
    weight = weight / tl.sum(weight, 0)
    mask = (s < S)[:, None] & (d < D)[None, :]
    o = tl.sum(tl.load(partial_ptr + (n * S + s)[:, None] * D + d[None, :], mask=mask, other=0.0) * weight[:, None], 0)
    if GATE:
        gate = tl.load(gate_ptr + n // H * gate_token + n % H * gate_head + d, mask=d < D, other=0.0)
        o *= tl.sigmoid(gate.to(tl.float32))
    tl.store(o_ptr + n * D + d, o.to(o_ptr.dtype.element_ty), mask=d < D)
