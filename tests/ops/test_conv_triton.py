"""The convolution in Triton against the reference: outputs, windows and rings bit by bit where nothing is computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.triton_case import MARK, both, pick

# isort: split
from deltaserve.ops.conv import reference
from deltaserve.ops.conv import triton as conv
from deltaserve.ops.testing import compare, extend_rows, fill_nan, generator, nan_empty, prefill_rows

pytestmark = MARK
TAPS = 4
CHANNELS = pick([10, 640, 8192], [10])
DTYPES = [torch.float32, torch.bfloat16]


def pools(channels: int, dtype: torch.dtype, num_drafts: int = 0) -> tuple[Tensor, Tensor]:
    """Windows and conv ring of two layers, NaN but for slot 0."""
    windows = fill_nan(torch.zeros(6, 2, TAPS - 1, channels, dtype=dtype))
    windows[0] = 0
    return windows, fill_nan(torch.zeros(9, 2, TAPS + num_drafts, channels, dtype=dtype))


def same(actual: Tensor, expected: Tensor) -> None:
    assert torch.equal(actual.nan_to_num(777.0), expected.nan_to_num(777.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", CHANNELS)
def test_prefill_rows_windows_cuts_and_rings(channels: int, dtype: torch.dtype) -> None:
    lengths = pick([[1, 65, 2, 130, 64, 1000]], [[1, 65, 2]])[0]
    draw = generator(0)
    x = torch.randn(sum(lengths), channels + 5, generator=draw).to(dtype)[:, :channels]
    weight = torch.randn(channels, TAPS, generator=draw).to(dtype)
    windows, ring = pools(channels, dtype)
    windows[3] = torch.randn(2, TAPS - 1, channels, generator=draw).to(dtype)
    count = len(lengths)
    starts, slots = [0, 64, 128, 0, 640, 0][:count], [0, 3, 3, 0, 3, 0][:count]
    cuts = [(1, 64, 1), (1, 64, 2)] + ([(3, 128, 4), (5, 960, 5)] if count > 3 else [])
    rows = prefill_rows(lengths, starts=starts, slots_in=slots, cuts=cuts, rows=[8, 3, 1, 5, 2, 6][:count])
    with nan_empty():
        expected, after, actual, after_kernel = both(
            reference.prefill, conv.prefill, x, weight, windows[:, 1], ring[:, 1], rows
        )
    compare(actual, expected)
    same(after_kernel[2], after[2])
    same(after_kernel[3], after[3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("width", pick([1, 2, 4, 8], [1, 4]))
def test_extend_and_fold(width: int, channels: int, dtype: torch.dtype) -> None:
    draw = generator(1)
    starts = [0, 63, 64, 5]
    num_new = [width, 1, max(1, width - 1), 1]
    x = torch.randn(4 * width, channels + 3, generator=draw).to(dtype)[:, :channels]
    weight = torch.randn(channels, TAPS, generator=draw).to(dtype)
    windows, ring = pools(channels, dtype, width - 1)
    ring[[2, 3, 4, 7]] = torch.randn(4, *ring.shape[1:], generator=draw).to(dtype)
    folds = [(3, 0, 4, 64), (7, 0, 5, 128)]
    rows = extend_rows(starts, num_new, width=width, rows=[2, 3, 4, 7], folds=folds)
    expected, after, actual, after_kernel = both(reference.extend, conv.extend, x, weight, ring[:, 0], rows)
    real = [row * width + t for row in range(4) for t in range(num_new[row])]
    compare(actual[real], expected[real])
    assert actual.isfinite().all()
    same(after_kernel[2], after[2])
    _, after, _, after_kernel = both(reference.fold, conv.fold, windows, ring, rows)
    same(after_kernel[0], after[0])
