"""Routing and experts in Triton against the references; FP8 products against their dequantised weights in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.triton_case import MARK, ON_GPU, back, both, move, pick

# isort: split
from deltaserve.ops.linear import reference as linear_reference
from deltaserve.ops.linear import triton as linear
from deltaserve.ops.moe import reference
from deltaserve.ops.moe import triton as moe
from deltaserve.ops.testing import compare, fill_nan, generator, nan_empty, relative_error

pytestmark = MARK


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), pick([(7, 3), (16, 4), (256, 8), (512, 10)], [(7, 3)]))
def test_route_with_ties(num_experts: int, top_k: int, renormalize: bool) -> None:
    draw = generator(0)
    count = pick([40], [4])[0]
    for logits in (
        torch.randn(count, num_experts, generator=draw) * 5,
        torch.randint(0, 3, (count, num_experts), generator=draw).float(),
        torch.randn(count, num_experts, generator=draw).bfloat16(),
    ):
        expected, _, actual, _ = both(reference.route, moe.route, logits, top_k, renormalize)
        assert actual[1].equal(expected[1])
        compare(actual[0], expected[0])


def weights(num_experts: int, width: int, ffn: int) -> tuple[Tensor, Tensor]:
    gate_up = torch.randn(num_experts, 2 * ffn, width, generator=generator(1)) * width**-0.5
    return gate_up, torch.randn(num_experts, width, ffn, generator=generator(2)) * ffn**-0.5


@pytest.mark.parametrize("dtype", pick([torch.float32, torch.bfloat16], [torch.float32]))
@pytest.mark.parametrize("sizes", pick([(7, 3, 20, 12), (16, 4, 256, 48), (64, 8, 512, 128)], [(7, 3, 20, 12)]))
@pytest.mark.parametrize("num_tokens", pick([1, 2, 63, 65, 1000], [1, 9]))
def test_experts(num_tokens: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    num_experts, top_k, width, ffn = sizes
    gate_up, down = (x.to(dtype) for x in weights(num_experts, width, ffn))
    x = torch.randn(num_tokens, width, generator=generator(num_tokens)).to(dtype)
    logits = torch.randn(num_tokens, num_experts, generator=generator(3))
    logits[:, -1] = -torch.inf
    gate_up[-1], down[-1] = torch.nan, torch.nan
    chosen, experts = reference.route(logits, top_k, True)
    expected = reference.experts(x.float(), chosen, experts, gate_up.float(), down.float())
    with nan_empty():
        actual = back(moe.experts(*move((x, chosen, experts, gate_up, down))))
    assert actual.dtype == dtype
    compare(actual.float(), expected, dtype)


def block_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """float8 weight [..., O, I] and a scale per 128 x 128 block."""
    rows, columns = -(-weight.shape[-2] // 128), -(-weight.shape[-1] // 128)
    scale = torch.rand(*weight.shape[:-2], rows, columns, generator=generator(8)) * 0.01 + 0.001
    wide = scale.repeat_interleave(128, -1).repeat_interleave(128, -2)[..., : weight.shape[-2], : weight.shape[-1]]
    return (weight / wide * 0.1).clamp(-448, 448).to(torch.float8_e4m3fn), scale


@pytest.mark.skipif(not ON_GPU, reason="the interpreter has no float8 products")
@pytest.mark.parametrize("sizes", [(16, 4, 256, 128), (64, 8, 512, 384)])
@pytest.mark.parametrize("num_tokens", [1, 32, 65, 1000, 3000])
def test_experts_fp8(num_tokens: int, sizes: tuple[int, int, int, int]) -> None:
    num_experts, top_k, width, ffn = sizes
    (gate_up, gate_up_scale), (down, down_scale) = (block_fp8(w) for w in weights(num_experts, width, ffn))
    x = torch.randn(num_tokens, width, generator=generator(num_tokens)).bfloat16()
    logits = torch.randn(num_tokens, num_experts, generator=generator(3))
    chosen, experts = reference.route(logits, top_k, True)
    wide = [
        torch.stack([linear_reference.dequantize_fp8_block(w, s) for w, s in zip(ws, ss, strict=True)])
        for ws, ss in ((gate_up, gate_up_scale), (down, down_scale))
    ]
    expected = reference.experts(x.float(), chosen, experts, *wide)
    actual = back(moe.experts_fp8(*move((x, chosen, experts, gate_up, gate_up_scale, down, down_scale))))
    compare(actual.float(), expected, torch.float8_e4m3fn)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter has no float8 products")
@pytest.mark.parametrize("shape", [(384, 256), (1024, 512), (640, 2048)])
@pytest.mark.parametrize("num_tokens", [1, 2, 31, 65, 130, 1000])
def test_linear_fp8(num_tokens: int, shape: tuple[int, int]) -> None:
    weight, scale = block_fp8(torch.randn(*shape, generator=generator(1)) * shape[1] ** -0.5)
    x = torch.randn(num_tokens, shape[1], generator=generator(2)).bfloat16()
    expected = x.float() @ linear_reference.dequantize_fp8_block(weight, scale).T
    actual = back(linear.linear_fp8(*move((x, weight, scale))))
    assert actual.dtype == torch.bfloat16
    compare(actual.float(), expected, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul(dtype: torch.dtype) -> None:
    for shape in pick([(1, 96), (65, 40), (7, 3, 2048)], [(3, 40)]):
        x = torch.randn(shape, generator=generator(0)).to(dtype)
        expected, _, actual, _ = both(linear_reference.silu_mul, linear.silu_mul, x)
        compare(actual, expected)


@pytest.mark.skipif(not ON_GPU, reason="the interpreter's float8 rounding is its own")
def test_quantize() -> None:
    x = torch.randn(65, 640, generator=generator(0)) * torch.logspace(-3, 3, 65)[:, None]
    x[3] = 0
    for dtype in (torch.float32, torch.bfloat16):
        values, scales = back(linear.quantize(move(x.to(dtype))))
        assert relative_error(values.float() * scales.repeat_interleave(128, 1), x) < 4e-2
        half, half_scales = back(linear.silu_mul_quantize(move(x.to(dtype))))
        wide = half.float() * half_scales.repeat_interleave(128, 1)[:, :320]
        assert relative_error(wide, linear_reference.silu_mul(x)) < 4e-2


def test_experts_of_nan_neighbours_stay_whole() -> None:
    """A token of NaN spoils itself alone."""
    gate_up, down = weights(7, 20, 12)
    x = torch.randn(4, 20, generator=generator(0))
    fill_nan(x[2])
    chosen, experts = reference.route(torch.randn(4, 7, generator=generator(1)), 3, True)
    actual = back(moe.experts(*move((x, chosen, experts, gate_up, down))))
    assert actual[[0, 1, 3]].isfinite().all()
