"""Paged attention against dense softmax in float64: shuffled pages, NaN wherever nobody may read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deltaserve.ops import attention
from deltaserve.ops.testing import (
    LENGTHS,
    compare,
    extend_rows,
    fill_nan,
    generator,
    kv_slots,
    nan_empty,
    page_table,
    prefill_rows,
)

pytestmark = pytest.mark.usefixtures("implementation")
HEADS, KV_HEADS, HEAD_DIM, SCALE = 6, 2, 24, 0.3
KV_DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def fresh_tensors_are_nan() -> Iterator[None]:
    with nan_empty():
        yield


class Sequence:
    """q, k and v of one row, and what attention must give."""

    def __init__(self, num_tokens: int, seed: int = 0) -> None:
        draw = generator(seed)
        self.q = torch.randn(num_tokens, HEADS, HEAD_DIM, generator=draw)
        self.k, self.v = torch.randn(2, num_tokens, KV_HEADS, HEAD_DIM, generator=draw)

    def expected(self, kv_dtype: torch.dtype = torch.float32) -> Tensor:
        """Dense causal attention [T, H, D] in float64, on k and v as `kv_dtype` holds them."""
        group = HEADS // KV_HEADS
        k, v = (x.to(kv_dtype).double().repeat_interleave(group, 1) for x in (self.k, self.v))
        scores = torch.einsum("thd,shd->hts", self.q.double(), k) * SCALE
        causal = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        return torch.einsum("hts,shd->thd", scores.masked_fill(~causal, -torch.inf).softmax(-1), v)


def make_pages(num_pages: int, kv_dtype: torch.dtype = torch.float32) -> Tensor:
    """[P, 3 layers, G, 2, 64, D], all NaN, the dummy page too."""
    return fill_nan(torch.zeros(num_pages, 3, KV_HEADS, 2, 64, HEAD_DIM).to(kv_dtype))


def store(pages: Tensor, table_RP: Tensor, row: int, sequence: Sequence, start: int, stop: int) -> None:
    slots = kv_slots(table_RP, row, range(start, stop))
    attention.write(sequence.k[start:stop], sequence.v[start:stop], pages[:, 1], slots)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_prefill_is_dense_attention(num_tokens: int) -> None:
    sequence = Sequence(num_tokens)
    table_RP, num_pages = page_table([num_tokens])
    pages = make_pages(num_pages)
    store(pages, table_RP, 0, sequence, 0, num_tokens)
    o = attention.prefill(sequence.q, pages[:, 1], prefill_rows([num_tokens], table_RP=table_RP), SCALE)
    compare(o, sequence.expected())
    assert pages[:, [0, 2]].isnan().all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("chunk", [64, 192])
def test_chunks_on_a_long_prefix(chunk: int, kv_dtype: torch.dtype) -> None:
    sequence = Sequence(450)
    table_RP, num_pages = page_table([450])
    pages = make_pages(num_pages, kv_dtype)
    outputs = []
    for start in range(0, 450, chunk):
        stop = min(start + chunk, 450)
        store(pages, table_RP, 0, sequence, start, stop)
        rows = prefill_rows([stop - start], starts=[start], table_RP=table_RP)
        outputs.append(attention.prefill(sequence.q[start:stop], pages[:, 1], rows, SCALE))
    compare(torch.cat(outputs), sequence.expected(kv_dtype))


def test_a_chunked_prompt_gives_the_bits_of_the_whole_one() -> None:
    sequence = Sequence(450)
    table_RP, num_pages = page_table([450])
    pages = make_pages(num_pages)
    store(pages, table_RP, 0, sequence, 0, 450)
    whole = attention.prefill(sequence.q, pages[:, 1], prefill_rows([450], table_RP=table_RP), SCALE)
    rows = prefill_rows([450 - 192], starts=[192], table_RP=table_RP)
    assert attention.prefill(sequence.q[192:], pages[:, 1], rows, SCALE).equal(whole[192:])


def test_packed_prefill_rows_do_not_meet() -> None:
    lengths, starts = [65, 1, 200], [64, 128, 0]
    sequences = [Sequence(start + n, seed=n) for start, n in zip(starts, lengths, strict=True)]
    table_RP, num_pages = page_table([len(s.q) for s in sequences])
    pages = make_pages(num_pages)
    for row, sequence in enumerate(sequences):
        store(pages, table_RP, row, sequence, 0, len(sequence.q))
    q = torch.cat([s.q[start:] for s, start in zip(sequences, starts, strict=True)])
    o = attention.prefill(q, pages[:, 1], prefill_rows(lengths, starts=starts, table_RP=table_RP), SCALE)
    compare(o, torch.cat([s.expected()[start:] for s, start in zip(sequences, starts, strict=True)]))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("width", [1, 4, 8])
def test_extend_rows_of_different_contexts(width: int, kv_dtype: torch.dtype) -> None:
    starts = [0, 63, 64, 129, 300]
    num_new = [1 + row % width for row in range(len(starts))]
    sequences = [Sequence(start + width, seed=start) for start in starts]
    contexts = [start + new for start, new in zip(starts, num_new, strict=True)]
    table_RP, num_pages = page_table(contexts)
    pages = make_pages(num_pages, kv_dtype)
    for row, (sequence, context) in enumerate(zip(sequences, contexts, strict=True)):
        store(pages, table_RP, row, sequence, 0, context)
    q = torch.cat([s.q[start:] for s, start in zip(sequences, starts, strict=True)])
    o = attention.extend(q, pages[:, 1], extend_rows(starts, num_new, width=width, table_RP=table_RP), SCALE)
    assert o.isfinite().all()
    for row, (start, new) in enumerate(zip(starts, num_new, strict=True)):
        expected = sequences[row].expected(kv_dtype)[start : start + new]
        compare(o[row * width : row * width + new], expected)


def test_a_decode_row_gives_the_same_bits_alone_and_in_a_batch() -> None:
    contexts = [200, 5, 130]
    sequences = [Sequence(n, seed=n) for n in contexts]
    table_RP, num_pages = page_table(contexts)
    pages = make_pages(num_pages)
    for row, sequence in enumerate(sequences):
        store(pages, table_RP, row, sequence, 0, len(sequence.q))
    q = torch.cat([s.q[-1:] for s in sequences])
    starts = [n - 1 for n in contexts]
    together = attention.extend(q, pages[:, 1], extend_rows(starts, [1, 1, 1], table_RP=table_RP), SCALE)
    for row, start in enumerate(starts):
        rows = extend_rows([start], [1], table_RP=table_RP[[row]])
        assert attention.extend(q[[row]], pages[:, 1], rows, SCALE).equal(together[[row]])


def test_write_clamps_what_fp8_cannot_hold() -> None:
    pages = make_pages(2, torch.float8_e4m3fn)
    k = torch.full((1, KV_HEADS, HEAD_DIM), 1e4)
    attention.write(k, -k, pages[:, 1], torch.tensor([64 + 5]))
    assert (pages[1, 1, :, 0, 5].float() == 448).all()
    assert (pages[1, 1, :, 1, 5].float() == -448).all()
    assert pages[0].float().isnan().all()
    assert pages[1, 1, :, :, [4, 6]].float().isnan().all()
    assert (k == 1e4).all(), "the caller's tensor stays as it was"


@pytest.mark.parametrize("first_key", [1, 3])
def test_keys_before_the_first_are_not_seen(first_key: int) -> None:
    sequence = Sequence(130)
    scores = torch.einsum("thd,shd->hts", sequence.q.double(), sequence.k.double().repeat_interleave(3, 1)) * SCALE
    visible = torch.ones(130, 130, dtype=torch.bool).tril()
    visible[:, :first_key] = False
    visible |= torch.eye(130, dtype=torch.bool) & (torch.arange(130) < first_key)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    expected = torch.einsum("hts,shd->thd", weights, sequence.v.double().repeat_interleave(3, 1))
    table_RP, num_pages = page_table([130])
    pages = make_pages(num_pages)
    store(pages, table_RP, 0, sequence, 0, 130)
    layer = pages[:, 1]
    rows = prefill_rows([130], table_RP=table_RP)
    compare(attention.prefill(sequence.q, layer, rows, SCALE, first_key=first_key), expected)
    rows = prefill_rows([66], starts=[64], table_RP=table_RP)
    compare(attention.prefill(sequence.q[64:], layer, rows, SCALE, first_key=first_key), expected[64:])
    for start, new in ((0, 1), (0, 5), (2, 1), (2, 2), (129, 1), (120, 4)):
        rows = extend_rows([start], [new], table_RP=table_RP)
        o = attention.extend(sequence.q[start : start + new], layer, rows, SCALE, first_key=first_key)
        compare(o, expected[start : start + new])


def test_a_swapped_head_or_page_order_would_show() -> None:
    sequence = Sequence(130)
    table_RP, num_pages = page_table([130])
    pages = make_pages(num_pages)
    store(pages, table_RP, 0, sequence, 0, 130)
    for wrong in (pages.flip(2), pages.flip(3)):
        o = attention.prefill(sequence.q, wrong[:, 1], prefill_rows([130], table_RP=table_RP), SCALE)
        with pytest.raises(AssertionError):
            compare(o, sequence.expected())


def test_16_bit_queries_give_16_bit_outputs() -> None:
    sequence = Sequence(70)
    table_RP, num_pages = page_table([70])
    pages = make_pages(num_pages, torch.bfloat16)
    store(pages, table_RP, 0, sequence, 0, 70)
    rows = prefill_rows([70], table_RP=table_RP)
    o = attention.prefill(sequence.q.bfloat16(), pages[:, 1], rows, SCALE)
    assert o.dtype == torch.bfloat16
    compare(o, sequence.expected(torch.bfloat16))
