"""Paged attention in Triton against the reference on the same pages, NaN wherever nobody may read."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.ops.triton_case import DEVICE, MARK, ON_GPU, both, move, pick

# isort: split
from deltaserve.ops.attention import reference
from deltaserve.ops.attention import triton as attention
from deltaserve.ops.testing import compare, extend_rows, fill_nan, generator, kv_slots, page_table, prefill_rows

pytestmark = MARK
SCALE = 0.3
SIZES = pick([(6, 2, 24), (8, 2, 64), (32, 2, 256), (24, 4, 256)], [(6, 2, 24)])
# Of queries and pages. The interpreter multiplies no bfloat16, and rounds to float8 in its own way.
KINDS = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)]
KINDS += pick(
    [
        (torch.float32, torch.float8_e4m3fn),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float8_e4m3fn),
    ],
    [],
)

# Large heads with float32 products take long to compile, and are of no use.
CASES = [(sizes, kinds) for sizes in SIZES for kinds in KINDS if sizes[2] < 256 or kinds[0] == torch.bfloat16]


def make_pages(
    contexts: list[int], kv_heads: int, size: int, q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Pages [P, 3 layers, G, 2, 64, D] with the rows' keys and values in layer 1, NaN elsewhere; the page table."""
    table_RP, num_pages = page_table(contexts)
    pages = fill_nan(torch.zeros(num_pages, 3, kv_heads, 2, 64, size).to(kv_dtype))
    for row, context in enumerate(contexts):
        k, v = torch.randn(2, context, kv_heads, size, generator=generator(row)).to(q_dtype)
        reference.write(k, v, pages[:, 1], kv_slots(table_RP, row, range(context)))
    return pages, table_RP


def queries(num_tokens: int, heads: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Queries, and a gate that lies beside them as in a projection's output."""
    q, gate = torch.randn(num_tokens, heads, 2 * size, generator=generator(99)).to(dtype).chunk(2, -1)
    return q.contiguous(), gate


def check(actual: Tensor, expected: Tensor, q_dtype: torch.dtype) -> None:
    assert actual.isfinite().all()
    compare(actual, expected, q_dtype)


@pytest.mark.parametrize("kinds", pick(KINDS, KINDS[:1]))
def test_write_is_the_reference(kinds: tuple[torch.dtype, torch.dtype]) -> None:
    for heads, size in pick([(2, 24), (3, 64), (4, 256)], [(2, 24)]):
        k = (torch.randn(70, heads, 2 * size, generator=generator(0)) * 200).to(kinds[0])[..., :size]
        v = torch.randn(70, heads * size + 1, generator=generator(1)).to(kinds[0])[:, 1:].view(70, heads, size)
        pages = fill_nan(torch.zeros(4, 2, heads, 2, 64, size).to(kinds[1]))
        slots = 64 + torch.randperm(128, generator=generator(2))[:70]
        _, after, _, after_kernel = both(reference.write, attention.write, k, v, pages[:, 1], slots)
        assert after_kernel[2].float().nan_to_num(777.0).equal(after[2].float().nan_to_num(777.0))


@pytest.mark.parametrize(("sizes", "kinds"), CASES)
def test_prefill_of_packed_rows_on_prefixes(
    sizes: tuple[int, int, int], kinds: tuple[torch.dtype, torch.dtype]
) -> None:
    heads, kv_heads, size = sizes
    lengths, starts = pick([([65, 1, 200, 1000], [64, 128, 0, 448])], [([65, 1], [64, 0])])[0]
    contexts = [start + n for start, n in zip(starts, lengths, strict=True)]
    pages, table_RP = make_pages(contexts, kv_heads, size, *kinds)
    q, _ = queries(sum(lengths), heads, size, kinds[0])
    rows = prefill_rows(lengths, starts=starts, table_RP=table_RP)
    for first_key, parts in ((1, 1), (0, 3)):
        kernel = partial(attention.prefill, tuning=attention.Tuning(parts=parts))
        expected, _, actual, _ = both(reference.prefill, kernel, q, pages[:, 1], rows, SCALE, first_key)
        check(actual, expected, kinds[0])


@pytest.mark.parametrize(("sizes", "kinds"), CASES)
@pytest.mark.parametrize("width", pick([1, 4, 8], [1, 4]))
def test_extend_rows_of_different_contexts(
    sizes: tuple[int, int, int], kinds: tuple[torch.dtype, torch.dtype], width: int
) -> None:
    heads, kv_heads, size = sizes
    starts = pick([[0, 63, 64, 129, 1000, 62]], [[0, 62]])[0]
    num_new = [1 + row % width for row in range(len(starts))]
    contexts = [start + new for start, new in zip(starts, num_new, strict=True)]
    pages, table_RP = make_pages(contexts, kv_heads, size, *kinds)
    q, _ = queries(len(starts) * width, heads, size, kinds[0])
    rows = extend_rows(starts, num_new, width=width, table_RP=table_RP)
    real = [row * width + t for row, new in enumerate(num_new) for t in range(new)]
    for first_key, parts in ((0, 1), (1, 4)):
        kernel = partial(attention.extend, tuning=attention.Tuning(parts=parts))
        expected, _, actual, _ = both(reference.extend, kernel, q, pages[:, 1], rows, SCALE, first_key)
        assert actual.isfinite().all()
        check(actual[real], expected[real], kinds[0])


@pytest.mark.parametrize("parts", [1, 2])
def test_the_gate_is_applied_last(parts: int) -> None:
    heads, kv_heads, size = SIZES[0]
    pages, table_RP = make_pages([130], kv_heads, size, torch.float32, torch.float32)
    q, gate = queries(2, heads, size, torch.float32)
    rows = extend_rows([128], [2], table_RP=table_RP)
    expected = reference.extend(q, pages[:, 1], rows, SCALE, 0) * gate.sigmoid()
    tuning = attention.Tuning(parts=parts)
    actual = attention.extend(*move((q, pages))[:1], move(pages)[:, 1], move(rows), SCALE, 0, move(gate), tuning)
    compare(actual.cpu(), expected)


@pytest.mark.skipif(not ON_GPU, reason="too long for the interpreter")
def test_a_quarter_of_a_million_positions() -> None:
    heads, kv_heads, size = 16, 2, 256
    context = 250_000
    num_pages = -(-context // 64)
    pages = torch.randn(1 + num_pages, 1, kv_heads, 2, 64, size, generator=generator(0)).bfloat16()
    table_RP = 1 + torch.randperm(num_pages, generator=generator(1))[None]
    q, _ = queries(4, heads, size, torch.bfloat16)
    rows = extend_rows([context - 4], [4], table_RP=table_RP)
    expected = reference.extend(q, pages[:, 0], rows, SCALE, 0)
    actual = attention.extend(q.to(DEVICE), pages.to(DEVICE)[:, 0], move(rows), SCALE, 0)
    compare(actual.cpu(), expected)
