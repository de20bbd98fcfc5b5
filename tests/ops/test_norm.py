"""RMS norms against their formula in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from deltaserve.ops import norm
from deltaserve.ops.testing import compare, generator, nan_empty

pytestmark = pytest.mark.usefixtures("implementation")
EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def fresh_tensors_are_nan() -> Iterator[None]:
    with nan_empty():
        yield


def formula(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * scale.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 48), (65, 48), (7, 3, 24)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    magnitudes = torch.logspace(-4, 2, shape[0]).view(-1, *[1] * (len(shape) - 1))
    x = (torch.randn(shape, generator=generator(0)) * magnitudes).to(dtype)
    scale = torch.randn(shape[-1], generator=generator(1))
    y = norm.rms_norm(x, scale, EPS)
    assert y.dtype == dtype
    compare(y, formula(x, scale))
    for row in range(shape[0]):
        compare(y[row], formula(x[row], scale))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_a_strided_view(dtype: torch.dtype) -> None:
    x = torch.randn(5, 3, 48, generator=generator(0)).to(dtype)[..., :24]
    scale = torch.randn(24, generator=generator(1))
    compare(norm.rms_norm(x, scale, EPS), formula(x, scale))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_returns_the_sum_too(dtype: torch.dtype) -> None:
    x, residual = (torch.randn(2, 9, 48, generator=generator(0)) * 3).to(dtype)
    scale = torch.randn(48, generator=generator(1))
    before = x.clone(), residual.clone()
    y, total = norm.add_rms_norm(x, residual, scale, EPS)
    assert total.equal(x + residual)
    assert total.dtype == dtype
    compare(y, formula(total, scale))
    assert x.equal(before[0])
    assert residual.equal(before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_rms_norm_gates_after_the_norm(dtype: torch.dtype) -> None:
    x, gate = (torch.randn(2, 9, 3, 40, generator=generator(0)) * 3).to(dtype)
    scale = torch.randn(40, generator=generator(1))
    y = norm.gated_rms_norm(x, gate, scale, EPS)
    assert y.dtype == dtype
    compare(y, formula(x, scale) * gate.double() / (1 + (-gate.double()).exp()))


def test_zeros_stay_zeros() -> None:
    assert not norm.rms_norm(torch.zeros(2, 8), torch.ones(8), EPS).any()
