"""The testing aids themselves: they must fail where they should."""

from __future__ import annotations

import pytest
import torch

from deltaserve.ops.testing import compare, extend_rows, fill_nan, kv_slots, nan_empty, page_table, prefill_rows


def test_nan_empty_fills_and_restores() -> None:
    original = torch.empty
    x = torch.ones(3)
    with nan_empty():
        assert torch.empty(2).isnan().all()
        assert torch.empty_like(x).isnan().all()
        assert x.new_empty(2, 2).isnan().all()
        assert torch.empty(2, dtype=torch.float8_e4m3fn).float().isnan().all()
        assert torch.empty(2, dtype=torch.int64).shape == (2,)
    assert torch.empty is original
    assert torch.Tensor.new_empty(x, 1).shape == (1,)


def test_compare_fails_on_error_shape_and_nan() -> None:
    expected = torch.linspace(1, 2, 100)
    compare(expected * (1 + 1e-6), expected)
    compare((expected * (1 + 1e-3)).bfloat16(), expected)
    for wrong in (expected * (1 + 1e-4), expected[:99], fill_nan(expected.clone()), expected.roll(1)):
        with pytest.raises(AssertionError):
            compare(wrong, expected)


def test_pages_are_disjoint_and_never_the_dummy() -> None:
    table_RP, num_pages = page_table([1, 64, 65, 200])
    used = table_RP[table_RP > 0].tolist()
    assert sorted(used) == list(range(1, num_pages))
    assert kv_slots(table_RP, 2, [0, 63, 64]).tolist() == [
        table_RP[2, 0] * 64,
        table_RP[2, 0] * 64 + 63,
        table_RP[2, 1] * 64,
    ]


def test_rows_are_consistent() -> None:
    prefill = prefill_rows([3, 70], cuts=[(1, 64, 5)])
    assert prefill.offsets == (0, 3, 73)
    assert prefill.num_tokens == 73
    extend = extend_rows([65, 10], [2, 1], width=4)
    assert extend.num_tokens == 8
    assert extend.contexts == (67, 11)
    assert extend.num_ring_R.tolist() == [1, 10]
