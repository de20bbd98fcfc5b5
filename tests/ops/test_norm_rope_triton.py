"""RMS norms and rotary embedding in Triton against the references, on strided views too."""

from __future__ import annotations

import pytest
import torch

from tests.ops.triton_case import MARK, both, pick

# isort: split
from deltaserve.ops.norm import reference as norm_reference
from deltaserve.ops.norm import triton as norm
from deltaserve.ops.rope import reference as rope_reference
from deltaserve.ops.rope import triton as rope
from deltaserve.ops.testing import compare, generator, nan_empty

pytestmark = MARK
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = pick([(1, 2048), (65, 24), (7, 3072), (3, 8192), (1000, 256)], [(1, 40), (5, 24)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norms(shape: tuple[int, int], dtype: torch.dtype) -> None:
    draw = generator(0)
    x, residual = torch.randn(2, *shape, generator=draw).to(dtype)
    scale = torch.randn(shape[1], generator=draw)
    with nan_empty():
        expected, _, actual, _ = both(norm_reference.rms_norm, norm.rms_norm, x, scale, 1e-6)
        compare(actual, expected)
        expected, _, actual, _ = both(norm_reference.add_rms_norm, norm.add_rms_norm, x, residual, scale, 1e-6)
    for one, other in zip(actual, expected, strict=True):
        compare(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "size"), pick([(1, 32, 128), (65, 8, 48), (33, 64, 256)], [(3, 2, 24)]))
def test_gated_norm_of_strided_views(tokens: int, heads: int, size: int, dtype: torch.dtype) -> None:
    draw = generator(1)
    x = torch.randn(tokens, heads, 2 * size, generator=draw).to(dtype)[..., :size]
    gate = torch.randn(tokens, 3 + heads * size, generator=draw).to(dtype)[:, 3:].view(tokens, heads, size)
    scale = torch.randn(size, generator=draw)
    expected, _, actual, _ = both(norm_reference.gated_rms_norm, norm.gated_rms_norm, x, gate, scale, 1e-6)
    compare(actual, expected)
    expected, _, actual, _ = both(norm_reference.rms_norm, norm.rms_norm, x, scale, 1e-6)
    compare(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "size", "rotary"),
    pick([(1, 32, 256, 64), (65, 6, 40, 12), (130, 2, 64, 16), (9, 3, 64, 64)], [(3, 3, 24, 12)]),
)
def test_rope_with_and_without_norm(tokens: int, heads: int, size: int, rotary: int, dtype: torch.dtype) -> None:
    draw = generator(2)
    x = torch.randn(tokens, heads, 2 * size, generator=draw).to(dtype)[..., :size]
    cos, sin = rope_reference.cos_sin(torch.arange(250_000, 250_000 + tokens), rotary, 1e7)
    expected, _, actual, _ = both(rope_reference.apply_rope, rope.apply_rope, x, cos, sin)
    compare(actual, expected)
    scale = torch.randn(size, generator=draw)

    def norm_then_rope(x: torch.Tensor, scale: torch.Tensor, eps: float, *angles: torch.Tensor) -> torch.Tensor:
        return rope_reference.apply_rope(norm_reference.rms_norm(x.float(), scale, eps), *angles).to(x.dtype)

    expected, _, actual, _ = both(norm_then_rope, rope.norm_rope, x, scale, 1e-6, cos, sin)
    compare(actual, expected)
