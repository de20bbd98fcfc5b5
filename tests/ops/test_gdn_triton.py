"""The gated delta rule in Triton against the references on the same pools: outputs, states, rings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.triton_case import MARK, ON_GPU, both, move, pick

# isort: split
from deltaserve.ops.gdn import reference
from deltaserve.ops.gdn import triton as gdn
from deltaserve.ops.testing import (
    TOLERANCES,
    GdnInputs,
    GdnPools,
    GdnSizes,
    compare,
    extend_rows,
    generator,
    nan_empty,
    prefill_rows,
    relative_error,
)

pytestmark = MARK
ODD = GdnSizes()
SHIPPED = GdnSizes(4, 8, 32, 48)
LARGE = GdnSizes(16, 64, 128, 128)
SIZES = pick([ODD, SHIPPED, LARGE], [GdnSizes(1, 2, 24, 40)])


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within the tolerance where both are numbers, and NaN in the same places."""
    assert actual.isnan().equal(expected.isnan())
    assert relative_error(actual.nan_to_num(), expected.nan_to_num()) <= tolerance


def filled(sizes: GdnSizes, num_ring: list[int], ring_rows: list[int], dtype: torch.dtype = torch.float32) -> GdnPools:
    """States in slots 1 .. 4, and rings of the given lengths; NaN elsewhere."""
    pools = GdnPools.empty(sizes, num_slots=8, num_rows=9, state_dtype=dtype)
    pools.states[1:5] = torch.randn(4, *pools.states.shape[1:], generator=generator(5)).to(dtype)
    for seed, (row, length) in enumerate(zip(ring_rows, num_ring, strict=True)):
        inputs = GdnInputs.random(max(length, 1), sizes, seed=100 + seed)
        for pool, values in ((pools.ring_k, inputs.k), (pools.ring_u, inputs.v), (pools.ring_g, inputs.g)):
            pool[row, :, :length] = values[:length]
    return pools


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("width", pick([1, 2, 4, 8], [1, 4]))
def test_extend_rows_of_different_ring_lengths(sizes: GdnSizes, width: int) -> None:
    num_ring, ring_rows = [0, 1, 30, 64 - width, 17], [7, 2, 8, 1, 4]
    num_new = [width, 1, max(1, width - 1), width, 1]
    pools = filled(sizes, num_ring, ring_rows)
    inputs = GdnInputs.random(5 * width, sizes, seed=width)
    rows = extend_rows([64 + n for n in num_ring], num_new, width=width, rows=ring_rows, slots=[1, 0, 2, 4, 2])
    with nan_empty():
        expected, after, actual, after_kernel = both(
            reference.extend, gdn.extend, *inputs.take(slice(None)), *pools.layer(1), rows
        )
    real = [row * width + t for row in range(5) for t in range(num_new[row])]
    compare(actual[real], expected[real], torch.float32)
    assert actual.isfinite().all()
    for kernel_pool, pool in zip(after_kernel[5:9], after[5:9], strict=True):
        close(kernel_pool, pool, TOLERANCES[torch.float32])


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_fold_takes_all_layers(sizes: GdnSizes, state_dtype: torch.dtype) -> None:
    pools = filled(sizes, [64, 64], [3, 8], state_dtype)
    rows = extend_rows([128], [1], folds=[(3, 1, 6, 128), (8, 4, 7, 192)])
    arguments = (pools.states, pools.ring_k, pools.ring_u, pools.ring_g, rows)
    _, after, _, after_kernel = both(reference.fold, gdn.fold, *arguments)
    close(after_kernel[0].float(), after[0].float(), TOLERANCES[state_dtype])


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("lengths", pick([[1], [63], [64], [65], [1000], [65, 1, 200, 64, 130]], [[65, 1]]))
def test_prefill_with_cuts_and_tails(sizes: GdnSizes, lengths: list[int]) -> None:
    count = len(lengths)
    pools = filled(sizes, [], [])
    cuts = [(row, at, 5 + row) for row, n in enumerate(lengths[:2]) for at in [n // 64 * 64] if at]
    if lengths[-1] == 130:
        cuts += [(4, 64, 7), (4, 128, 6)]
    rows = prefill_rows(lengths, rows=[7, 2, 8, 1, 4][:count], slots_in=[2, 0, 1, 0, 3][:count], cuts=cuts)
    inputs = GdnInputs.random(sum(lengths), sizes, seed=3)
    with nan_empty():
        expected, after, actual, after_kernel = both(
            reference.prefill, gdn.prefill, *inputs.take(slice(None)), *pools.layer(1), rows
        )
    compare(actual, expected, torch.float32)
    for kernel_pool, pool in zip(after_kernel[5:9], after[5:9], strict=True):
        close(kernel_pool, pool, TOLERANCES[torch.float32])


@pytest.mark.parametrize("decay", pick([40.0, 5.0, 1e-4], [40.0]))
@pytest.mark.parametrize("width", [1, 4])
def test_strong_and_weak_decay_are_exact_in_every_head(decay: float, width: int) -> None:
    sizes = pick([ODD], [GdnSizes(1, 2, 24, 40)])[0]
    inputs = GdnInputs.random(64 + width, sizes, seed=3, decay=decay)
    inputs.g[10:14] = -300.0
    inputs.g[64:66] = -300.0
    pools = GdnPools.empty(sizes)
    rows = prefill_rows([60], slots_in=[0])
    expected, after, actual, _ = both(reference.prefill, gdn.prefill, *inputs.take(slice(0, 60)), *pools.layer(1), rows)
    for head in range(sizes.num_value_heads):
        close(actual[:, head], expected[:, head], TOLERANCES[torch.float32])
    rows = extend_rows([60], [width], slots=[0])
    tokens = slice(64, 64 + width)
    expected, _, actual, _ = both(reference.extend, gdn.extend, *inputs.take(tokens), *after[5:9], rows)
    for head in range(sizes.num_value_heads):
        close(actual[:, head], expected[:, head], TOLERANCES[torch.float32])


@pytest.mark.skipif(not ON_GPU, reason="the interpreter's 16-bit products say nothing about the card's")
@pytest.mark.parametrize("sizes", SIZES)
def test_16_bit_inputs(sizes: GdnSizes) -> None:
    pools = filled(sizes, [20, 45], [1, 2])
    pools = GdnPools(pools.states, pools.ring_k.bfloat16(), pools.ring_u, pools.ring_g)
    inputs = GdnInputs.random(500, sizes, seed=4)
    q, k, v = (x.bfloat16() for x in (inputs.q, inputs.k, inputs.v))
    rows = prefill_rows([500], rows=[4], slots_in=[1], cuts=[(0, 448, 6)])
    expected, after, actual, after_kernel = both(
        reference.prefill, gdn.prefill, q, k, v, inputs.g, inputs.beta, *pools.layer(0), rows
    )
    compare(actual, expected)
    close(after_kernel[5], after[5], TOLERANCES[torch.bfloat16])
    for width in (1, 4):
        rows = extend_rows([20, 45], [width, 1], width=width, slots=[1, 3])
        tokens = slice(0, 2 * width)
        expected, _, actual, _ = both(
            reference.extend, gdn.extend, q[tokens], k[tokens], v[tokens], inputs.g[tokens], inputs.beta[tokens],
            *pools.layer(0), rows,
        )  # fmt: skip
        real = [*range(width), width]
        compare(actual[real], expected[real])


def test_gates_and_normalize() -> None:
    a, b = torch.randn(2, 7, 12, generator=generator(0)).unbind()
    a, b = (a * 30)[:, :6], b[:, 6:]
    A_log, dt_bias = torch.randn(2, 6, generator=generator(1))
    expected, _, actual, _ = both(reference.gates, gdn.gates, a, b, A_log, dt_bias)
    for one, other in zip(actual, expected, strict=True):
        compare(one, other)
    assert ((actual[0] - expected[0]).abs() <= 1e-5 * expected[0].abs()).all()
    q, k = torch.randn(9, 2, 2, 24, generator=generator(0)).mul(torch.logspace(-5, 2, 9)[:, None, None, None]).unbind(1)
    q[0] = 0
    expected, _, actual, _ = both(reference.normalize, gdn.normalize, q, k)
    for one, other in zip(actual, expected, strict=True):
        compare(one, other)


def test_a_transposed_state_is_refused() -> None:
    inputs = move(GdnInputs.random(64, ODD))
    states, *rings = move(GdnPools.empty(ODD)).layer(0)
    tokens = inputs.take(slice(None))
    with pytest.raises(RuntimeError):
        gdn.prefill(*tokens, states.transpose(2, 3), *rings, move(prefill_rows([64])))
