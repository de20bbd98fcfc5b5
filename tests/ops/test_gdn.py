"""The gated delta rule: prefill, extend and fold against the plain recurrence in float64, over all ways to split."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deltaserve.ops import gdn
from deltaserve.ops.testing import (
    LENGTHS,
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

pytestmark = pytest.mark.usefixtures("implementation")
SIZES = GdnSizes()


@pytest.fixture(autouse=True)
def fresh_tensors_are_nan() -> Iterator[None]:
    with nan_empty():
        yield


def recurrence(inputs: GdnInputs, round_to: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """o [T, H, V] and the states after 0, 64, 128, ... tokens [B, H, K, V], token by token in float64."""
    q, k, v, g, beta = (x.double() for x in inputs.take(slice(None)))
    group = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    state = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
    outputs, states = [], [state]
    for t in range(len(v)):
        state = state * g[t].exp()[:, None, None]
        u = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], u)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
        if (t + 1) % 64 == 0:
            state = state if round_to is None else state.to(round_to).double()
            states.append(state)
    return torch.stack(outputs), torch.stack(states)


class Request:
    """One request on its own ring row and layer: prefills, then extends. The state at boundary b has its own slot."""

    def __init__(
        self, inputs: GdnInputs, pools: GdnPools, *, row: int = 1, layer: int = 1, first_slot: int = 0
    ) -> None:
        self.inputs, self.pools, self.row, self.layer, self.first_slot = inputs, pools, row, layer, first_slot
        self.position = self.boundary = 0
        self.outputs: list[Tensor] = []

    def slot(self, boundary: int) -> int:
        return 0 if boundary == 0 else self.first_slot + boundary // 64

    def prefill(self, num_tokens: int) -> None:
        tokens = slice(self.position, self.position + num_tokens)
        cuts = [(0, end, self.slot(self.position + end)) for end in range(64, num_tokens + 1, 64)]
        slots_in = [self.slot(self.position)]
        rows = prefill_rows([num_tokens], starts=[self.position], rows=[self.row], slots_in=slots_in, cuts=cuts)
        self.outputs.append(gdn.prefill(*self.inputs.take(tokens), *self.pools.layer(self.layer), rows))
        assert self.outputs[-1].is_contiguous()
        self.position += num_tokens
        self.boundary = self.position // 64 * 64

    def folds(self) -> list[tuple[int, int, int, int]]:
        """What must be folded before the next extend; the request then counts as folded."""
        if self.position - self.boundary < 64:
            return []
        before, self.boundary = self.boundary, self.position
        return [(self.row, self.slot(before), self.slot(self.position), self.position)]

    def extend(self, num_new: int, width: int | None = None) -> None:
        folds = self.folds()
        rows = extend_rows(
            [self.position], [num_new], width=width, rows=[self.row], slots=[self.slot(self.boundary)], folds=folds
        )
        gdn.fold(self.pools.states, self.pools.ring_k, self.pools.ring_u, self.pools.ring_g, rows)
        tokens = torch.arange(self.position, self.position + rows.width) % len(self.inputs.v)
        o = gdn.extend(*self.inputs.take(tokens), *self.pools.layer(self.layer), rows)
        assert o.isfinite().all()
        assert o.is_contiguous()
        self.outputs.append(o[:num_new])
        self.position += num_new

    def extend_to(self, end: int, width: int) -> None:
        """Steps of `width` tokens, fewer before a boundary and at the end."""
        while self.position < end:
            self.extend(min(width, 64 - self.position % 64, end - self.position), width)

    def check(self, expected: tuple[Tensor, Tensor]) -> None:
        expected_o, expected_states = expected
        o = torch.cat(self.outputs)
        compare(o, expected_o[self.position - len(o) : self.position])
        for boundary in range(64, self.boundary + 1, 64):
            compare(self.pools.states[self.slot(boundary), self.layer], expected_states[boundary // 64])


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_prefill_is_the_recurrence(num_tokens: int) -> None:
    inputs = GdnInputs.random(num_tokens, SIZES)
    request = Request(inputs, GdnPools.empty(SIZES, num_slots=20))
    request.prefill(num_tokens)
    request.check(recurrence(inputs))


@pytest.fixture(scope="module")
def long() -> tuple[GdnInputs, tuple[Tensor, Tensor]]:
    inputs = GdnInputs.random(260, SIZES, seed=1)
    return inputs, recurrence(inputs)


Long = tuple[GdnInputs, tuple[Tensor, Tensor]]


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("prompt", [1, 63, 64, 65, 127, 128, 130])
def test_prefill_then_extend_over_boundaries(long: Long, prompt: int, width: int) -> None:
    inputs, expected = long
    request = Request(inputs, GdnPools.empty(SIZES))
    request.prefill(prompt)
    request.extend_to(260, width)
    request.check(expected)


@pytest.mark.parametrize("chunk", [64, 128, 192])
def test_chunked_prefill_is_the_whole(long: Long, chunk: int) -> None:
    inputs, expected = long
    request = Request(inputs, GdnPools.empty(SIZES))
    for start in range(0, 260, chunk):
        request.prefill(min(chunk, 260 - start))
    request.check(expected)
    request.extend_to(260, 1)


def test_one_cut_is_enough(long: Long) -> None:
    inputs, (expected_o, expected_states) = long
    pools = GdnPools.empty(SIZES)
    o = gdn.prefill(*inputs.take(slice(None)), *pools.layer(0), prefill_rows([260], cuts=[(0, 128, 5), (0, 128, 6)]))
    compare(o, expected_o)
    compare(pools.states[5, 0], expected_states[2])
    assert pools.states[6, 0].equal(pools.states[5, 0])
    assert pools.states[[1, 2, 3, 4, 7]].isnan().all()
    assert not pools.states[0].any()


def pack(parts: list[GdnInputs], tokens: list[Tensor]) -> list[Tensor]:
    """q, k, v, g and beta of the named tokens of each part, one part after the other."""
    taken = [part.take(picked) for part, picked in zip(parts, tokens, strict=True)]
    return [torch.cat(tensors) for tensors in zip(*taken, strict=True)]


@pytest.mark.parametrize("sizes", [SIZES, GdnSizes(num_key_heads=3, num_value_heads=3, key_size=40, value_size=24)])
def test_rows_of_different_lengths_do_not_meet(sizes: GdnSizes) -> None:
    lengths, num_new, ring_rows = [65, 1, 200, 64, 130], [5, 1, 3, 4, 5], [7, 2, 8, 1, 4]
    parts = [GdnInputs.random(n + 5, sizes, seed=n) for n in lengths]
    expected = [recurrence(part)[0] for part in parts]
    pools = GdnPools.empty(sizes, num_slots=10, num_rows=9)
    cuts = [(4, 64, 9), (0, 64, 1), (2, 192, 2), (3, 64, 3), (4, 128, 4)]
    prompts = pack(parts, [torch.arange(n) for n in lengths])
    o = gdn.prefill(*prompts, *pools.layer(0), prefill_rows(lengths, rows=ring_rows, cuts=cuts)).split(lengths)
    for row, n in enumerate(lengths):
        compare(o[row], expected[row][:n])

    behind = [(row, 0, slice(n % 64 + new, None)) for row, n, new in zip(ring_rows, lengths, num_new, strict=True)]
    rings_before, states_before = [pools.ring_u[place].clone() for place in behind], pools.states.clone()
    rows = extend_rows(lengths, num_new, rows=ring_rows, slots=[1, 0, 2, 3, 4])
    o = gdn.extend(*pack(parts, [torch.arange(n, n + 5) for n in lengths]), *pools.layer(0), rows).split(5)
    for row, (n, new) in enumerate(zip(lengths, num_new, strict=True)):
        compare(o[row][:new], expected[row][n : n + new])
        assert o[row].isfinite().all()
    for before, place in zip(rings_before, behind, strict=True):
        assert_same_bits(pools.ring_u[place], before)
    assert_same_bits(pools.states, states_before)
    assert pools.ring_k[[0, 3, 5, 6]].isnan().all()


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal, NaN included."""
    assert actual.view(torch.int32).equal(expected.view(torch.int32))


def test_decode_rows_share_a_borrowed_slot(long: Long) -> None:
    inputs, (expected_o, _) = long
    pools = GdnPools.empty(SIZES)
    first = Request(inputs, pools, row=1)
    first.prefill(130)
    second = Request(inputs, pools, row=3)
    second.position = second.boundary = 128
    second.extend(2)
    rows = extend_rows([130, 130], [1, 1], rows=[3, 1], slots=[2, 2])
    o = gdn.extend(*inputs.take(torch.tensor([130, 130])), *pools.layer(1), rows)
    compare(o, expected_o[[130, 130]])


def test_rejected_drafts_are_overwritten(long: Long) -> None:
    inputs, (expected_o, _) = long
    pools = GdnPools.empty(SIZES)
    request = Request(inputs, pools)
    request.prefill(100)
    wrong = GdnInputs.random(4, SIZES, seed=9)
    gdn.extend(*wrong.take(slice(None)), *pools.layer(1), extend_rows([100], [4], slots=[1]))
    request.extend_to(150, 4)
    compare(torch.cat(request.outputs), expected_o[:150])


def test_fold_takes_all_layers_of_the_named_rows() -> None:
    pools = GdnPools.empty(SIZES)
    parts = {(row, layer): GdnInputs.random(128, SIZES, seed=2 * row + layer) for row in (1, 3) for layer in (0, 1)}
    for (row, layer), inputs in parts.items():
        request = Request(inputs, pools, row=row, layer=layer, first_slot=row)
        request.prefill(127)
        request.extend(1)
    folds = [(1, 2, 6, 128), (3, 4, 7, 128)]
    gdn.fold(pools.states, pools.ring_k, pools.ring_u, pools.ring_g, extend_rows([128], [1], folds=folds))
    for (row, layer), inputs in parts.items():
        compare(pools.states[6 if row == 1 else 7, layer], recurrence(inputs)[1][2])
    assert pools.states[[1, 3]].isnan().all()


def test_fold_without_full_rings_touches_nothing() -> None:
    pools = GdnPools.empty(SIZES)
    gdn.fold(pools.states, pools.ring_k, pools.ring_u, pools.ring_g, extend_rows([3], [1]))
    assert pools.states[1:].isnan().all()


@pytest.mark.parametrize("width", [1, 6])
@pytest.mark.parametrize("decay", [5.0, 40.0, 1e-4])
def test_strong_and_weak_decay_are_exact_in_every_head(decay: float, width: int) -> None:
    inputs = GdnInputs.random(200, SIZES, seed=3, decay=decay)
    expected_o, expected_states = recurrence(inputs)
    request = Request(inputs, GdnPools.empty(SIZES))
    request.prefill(100)
    request.extend_to(200, width)
    o = torch.cat(request.outputs)
    for head in range(SIZES.num_value_heads):
        compare(o[:, head], expected_o[:, head])
        compare(request.pools.states[3, 1, head], expected_states[3, head])


def test_a_burst_of_decay_does_not_blur_what_follows() -> None:
    inputs = GdnInputs.random(64, SIZES, seed=4, decay=1e-3)
    inputs.g[10:14] = -300.0
    request = Request(inputs, GdnPools.empty(SIZES))
    request.prefill(64)
    compare(request.outputs[0][14:], recurrence(inputs)[0][14:])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_16_bit_state_is_rounded_at_every_boundary_on_every_path(long: Long, dtype: torch.dtype) -> None:
    inputs, exact = long
    expected_o, expected_states = recurrence(inputs, round_to=dtype)
    effect_on_o = relative_error(exact[0], expected_o)
    effect_on_state = relative_error(exact[1][4], expected_states[4])
    assert min(effect_on_o, effect_on_state) > 1e-4, "rounding must show, or this test shows nothing"
    for prompt, width in ((260, 1), (128, 1), (70, 4), (1, 1)):
        request = Request(inputs, GdnPools.empty(SIZES, state_dtype=dtype))
        request.prefill(prompt)
        request.extend_to(260, width)
        # A few elements on the edge round the other way, which later boundaries carry on.
        # A path that does not round shows the whole effect.
        assert relative_error(torch.cat(request.outputs), expected_o) < effect_on_o / 2
        assert relative_error(request.pools.states[4, 1], expected_states[4]) < effect_on_state / 2


def test_a_transposed_state_is_refused() -> None:
    inputs = GdnInputs.random(64, SIZES)
    states, *rings = GdnPools.empty(SIZES).layer(0)
    with pytest.raises(RuntimeError):
        gdn.prefill(*inputs.take(slice(None)), states.transpose(2, 3), *rings, prefill_rows([64]))
    with pytest.raises(RuntimeError):
        gdn.extend(*inputs.take(slice(1)), states.transpose(2, 3), *rings, extend_rows([0], [1], slots=[0]))


def test_inputs_of_16_bits_give_outputs_of_16_bits(long: Long) -> None:
    inputs, (expected_o, _) = long
    q, k, v, g, beta = inputs.take(slice(130))
    o = gdn.prefill(
        q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta, *GdnPools.empty(SIZES).layer(0), prefill_rows([130])
    )
    compare(o, expected_o[:130])
    assert o.dtype == torch.bfloat16


def test_gates() -> None:
    a, b = torch.randn(2, 7, 6, generator=generator(0)) * 10
    A_log, dt_bias = torch.randn(2, 6, generator=generator(1))
    g, beta = gdn.gates(a, b, A_log, dt_bias)
    compare(g, -A_log.double().exp() * torch.log1p((a + dt_bias).double().exp()))
    compare(beta, 1 / (1 + (-b.double()).exp()))


def test_normalize() -> None:
    q, k = torch.randn(2, 9, 2, 24, generator=generator(0)) * torch.logspace(-5, 2, 9)[:, None, None]
    q[0] = 0
    q_unit, k_unit = gdn.normalize(q, k)
    compare(q_unit, q / (q.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() / 24**0.5)
    compare(k_unit, k / (k.double().square().sum(-1, keepdim=True) + 1e-6).sqrt())
    assert not q_unit[0].any()
    assert gdn.normalize(q.bfloat16(), k.bfloat16())[1].dtype == torch.bfloat16
