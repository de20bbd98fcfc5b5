"""Rotary embedding against complex rotation in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deltaserve.ops import rope
from deltaserve.ops.testing import compare, generator, nan_empty

pytestmark = pytest.mark.usefixtures("implementation")
ROTARY_DIM, HEAD_DIM, THETA = 12, 20, 1e7


@pytest.fixture(autouse=True)
def fresh_tensors_are_nan() -> Iterator[None]:
    with nan_empty():
        yield


def rotated(x_THD: Tensor, positions_T: Tensor) -> Tensor:
    """Pair (i, i + R) as one complex number, turned by position * theta^(-2i / 2R)."""
    pairs = ROTARY_DIM // 2
    x = x_THD.double()
    frequencies = torch.tensor([THETA ** (-i / pairs) for i in range(pairs)], dtype=torch.float64)
    angles = positions_T.double()[:, None] * frequencies
    turns = torch.polar(torch.ones_like(angles), angles)[:, None]
    turned = torch.complex(x[..., :pairs], x[..., pairs:ROTARY_DIM]) * turns
    return torch.cat((turned.real, turned.imag, x[..., ROTARY_DIM:]), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [[0], [5], list(range(70)), [0, 262143, 131071, 17]])
def test_rotation(positions: list[int], dtype: torch.dtype) -> None:
    positions_T = torch.tensor(positions)
    x = torch.randn(len(positions), 3, HEAD_DIM, generator=generator(0)).to(dtype)
    before = x.clone()
    y = rope.apply_rope(x, *rope.cos_sin(positions_T, ROTARY_DIM, THETA))
    assert y.dtype == dtype
    compare(y, rotated(x, positions_T))
    assert x.equal(before)
    assert y[..., ROTARY_DIM:].equal(x[..., ROTARY_DIM:])


def test_a_head_that_turns_whole() -> None:
    x = torch.randn(4, 2, ROTARY_DIM, generator=generator(0))
    positions_T = torch.arange(4)
    compare(rope.apply_rope(x, *rope.cos_sin(positions_T, ROTARY_DIM, THETA)), rotated(x, positions_T))


def test_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, HEAD_DIM, generator=generator(0))

    def score(at_q: int, at_k: int) -> Tensor:
        turned = [
            rope.apply_rope(x, *rope.cos_sin(torch.tensor([at]), ROTARY_DIM, THETA)) for x, at in ((q, at_q), (k, at_k))
        ]
        return (turned[0] * turned[1]).sum()

    compare(score(250_010, 250_000), score(10, 0))


def test_cos_sin_are_float32_of_the_asked_size() -> None:
    cos, sin = rope.cos_sin(torch.tensor([3, 9]), ROTARY_DIM, THETA)
    assert cos.shape == sin.shape == (2, ROTARY_DIM // 2)
    assert cos.dtype == sin.dtype == torch.float32
