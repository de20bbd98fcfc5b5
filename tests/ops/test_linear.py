"""Linear layers and dequantisation against loops over single elements."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from deltaserve.core.errors import ConfigError
from deltaserve.ops import linear

FP8 = torch.float8_e4m3fn


def test_linear_multiplies_by_the_transpose() -> None:
    x, weight = torch.randn(3, 5), torch.randn(7, 5)
    y = linear.linear(x, weight)
    assert y.shape == (3, 7)
    for t, o in itertools.product(range(3), range(7)):
        expected = sum(float(x[t, i]) * float(weight[o, i]) for i in range(5))
        assert float(y[t, o]) == pytest.approx(expected, abs=1e-5)


def test_silu_mul_gates_with_the_first_half() -> None:
    gate_up = torch.randn(4, 6, dtype=torch.float64)
    y = linear.silu_mul(gate_up)
    for t, f in itertools.product(range(4), range(3)):
        gate, up = float(gate_up[t, f]), float(gate_up[t, f + 3])
        assert float(y[t, f]) == pytest.approx(gate / (1 + math.exp(-gate)) * up)


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 127), (5, 300), (300, 5), (256, 384)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_block_scales_each_block(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = (torch.randn(shape) * 50).to(FP8)
    scale = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128)).to(dtype)
    values = linear.dequantize_fp8_block(weight, scale)
    rows, columns = torch.arange(shape[0]) // 128, torch.arange(shape[1]) // 128
    assert values.dtype == torch.float32
    assert torch.equal(values, weight.float() * scale.float()[rows[:, None], columns[None, :]])


@pytest.mark.parametrize("scale_shape", [(7, 1), (7,)])
def test_fp8_channel_scales_each_row(scale_shape: tuple[int, ...]) -> None:
    weight, scale = torch.randn(7, 9).to(FP8), torch.rand(scale_shape).bfloat16()
    values = linear.dequantize_fp8_channel(weight, scale)
    for row in range(7):
        assert torch.equal(values[row], weight[row].float() * float(scale.flatten()[row]))


@pytest.mark.parametrize("scale_shape", [(), (1,)])
def test_fp8_tensor_has_one_scale_for_any_shape(scale_shape: tuple[int, ...]) -> None:
    weight = torch.randn(6, 1, 4).to(FP8)
    values = linear.dequantize_fp8_tensor(weight, torch.full(scale_shape, 0.37))
    assert torch.equal(values, weight.float() * torch.tensor(0.37))


def _e2m1(nibble: int) -> float:
    """Sign, two exponent bits with bias 1, one bit of fraction; exponent 0 is subnormal."""
    exponent, fraction = nibble >> 1 & 3, nibble & 1
    size = fraction * 0.5 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
    return -size if nibble & 8 else size


def _by_nibble(packed: Tensor, scale: Tensor) -> list[list[float]]:
    rows: list[list[float]] = []
    for bytes_of_row, scales in zip(packed.tolist(), scale.float().tolist(), strict=True):
        nibbles = [nibble for byte in bytes_of_row for nibble in (byte & 15, byte >> 4)]
        rows.append([_e2m1(nibble) * scales[i // 16] for i, nibble in enumerate(nibbles)])
    return rows


@pytest.mark.parametrize("divide", [False, True])
def test_nvfp4_equals_a_loop_over_nibbles(divide: bool) -> None:
    every_byte = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    packed = torch.cat([every_byte, every_byte.flip(0, 1), torch.randint(0, 256, (3, 32), dtype=torch.uint8)])
    scale = (torch.rand(19, 4) * 100).to(FP8)
    factor = torch.tensor([0.0123])
    values = linear.dequantize_nvfp4(packed, scale, factor, divide=divide)
    steps = torch.tensor(_by_nibble(packed, scale))
    assert values.shape == (19, 64)
    assert torch.equal(values, steps / factor if divide else steps * factor)


def test_nvfp4_takes_a_scalar_of_any_rank() -> None:
    packed, scale = torch.randint(0, 256, (2, 8), dtype=torch.uint8), torch.ones(2, 1).to(FP8)
    one, none = (linear.dequantize_nvfp4(packed, scale, torch.full(shape, 0.5)) for shape in ((1,), ()))
    assert torch.equal(one, none)


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ConfigError, match="no implementation 'fast'"):
        linear.linear(torch.ones(1, 1), torch.ones(1, 1), force="fast")
