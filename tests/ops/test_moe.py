"""Routing with its ties, and experts against a loop over tokens in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from deltaserve.ops import moe
from deltaserve.ops.testing import compare, generator, nan_empty

EXPERTS, TOP_K, WIDTH, FFN = 7, 3, 20, 12
GATE_UP = torch.randn(EXPERTS, 2 * FFN, WIDTH, generator=generator(1))
DOWN = torch.randn(EXPERTS, WIDTH, FFN, generator=generator(2))


@pytest.fixture(autouse=True)
def fresh_tensors_are_nan() -> Iterator[None]:
    with nan_empty():
        yield


def naive(x_TD: Tensor, weights_Tk: Tensor, experts_Tk: Tensor) -> Tensor:
    y_TD = torch.zeros_like(x_TD, dtype=torch.float64)
    for t, x in enumerate(x_TD.double()):
        for weight, expert in zip(weights_Tk[t].double(), experts_Tk[t].tolist(), strict=True):
            gate, up = (GATE_UP[expert].double() @ x).split(FFN)
            y_TD[t] += weight * (DOWN[expert].double() @ (gate / (1 + (-gate).exp()) * up))
    return y_TD


def other_way_round(weight: Tensor) -> Tensor:
    """The same matrices with rows and columns swapped in memory."""
    return weight.mT.contiguous().mT


LAYOUTS = [torch.clone, other_way_round]


@pytest.mark.parametrize("lay", LAYOUTS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 16, 17, 65, 130])
def test_experts_are_the_naive_loop(num_tokens: int, lay: Callable[[Tensor], Tensor]) -> None:
    draw = generator(num_tokens)
    x = torch.randn(num_tokens, WIDTH, generator=draw)
    weights, experts = moe.route(torch.randn(num_tokens, EXPERTS, generator=draw), TOP_K, renormalize=True)
    compare(moe.experts(x, weights, experts, lay(GATE_UP), lay(DOWN)), naive(x, weights, experts))


@pytest.mark.parametrize("lay", LAYOUTS)
def test_only_chosen_experts_are_touched(lay: Callable[[Tensor], Tensor]) -> None:
    gate_up, down = lay(GATE_UP), lay(DOWN)
    gate_up[[0, 3, 6]] = torch.nan
    down[[0, 3, 6]] = torch.nan
    for num_tokens in (1, 9, 20):
        x = torch.randn(num_tokens, WIDTH, generator=generator(num_tokens))
        experts = torch.tensor([[5, 1, 2]]).expand(num_tokens, 3)
        weights = torch.rand(num_tokens, 3, generator=generator(0))
        compare(moe.experts(x, weights, experts, gate_up, down), naive(x, weights, experts))


@pytest.mark.parametrize("lay", LAYOUTS)
def test_a_token_gets_the_same_alone_and_in_a_batch(lay: Callable[[Tensor], Tensor]) -> None:
    matrices = lay(GATE_UP), lay(DOWN)
    x = torch.randn(20, WIDTH, generator=generator(0))
    weights, experts = moe.route(torch.randn(20, EXPERTS, generator=generator(1)), TOP_K, renormalize=True)
    for num_tokens in (9, 20):
        first = slice(0, num_tokens)
        together = moe.experts(x[first], weights[first], experts[first], *matrices)
        for t in range(num_tokens):
            row = slice(t, t + 1)
            compare(moe.experts(x[row], weights[row], experts[row], *matrices), together[row])


def test_16_bit_inputs() -> None:
    x = torch.randn(5, WIDTH, generator=generator(0)).bfloat16()
    weights, experts = moe.route(torch.randn(5, EXPERTS, generator=generator(1)), TOP_K, renormalize=True)
    for rows in (slice(0, 5), slice(0, 1)):
        y = moe.experts(x[rows], weights[rows], experts[rows], GATE_UP.bfloat16(), DOWN.bfloat16())
        assert y.dtype == torch.bfloat16
        compare(y, naive(x[rows], weights[rows], experts[rows]))


@pytest.mark.parametrize("renormalize", [True, False])
def test_route_is_softmax_then_the_largest(renormalize: bool) -> None:
    logits = torch.randn(50, EXPERTS, generator=generator(0)) * 5
    weights, experts = moe.route(logits, TOP_K, renormalize)
    probabilities = logits.double().softmax(-1)
    expected, order = probabilities.topk(TOP_K)
    if renormalize:
        expected = expected / expected.sum(-1, keepdim=True)
    assert experts.equal(order)
    compare(weights, expected)
    assert weights.dtype == torch.float32
    assert experts.dtype == torch.int64


@pytest.mark.parametrize("num_experts", [7, 64, 512])
def test_equal_logits_go_to_the_lowest_expert_in_every_batch(num_experts: int) -> None:
    logits = torch.randint(0, 3, (40, num_experts), generator=generator(0)).float()
    _, experts = moe.route(logits, 5, renormalize=True)
    for row, chosen in zip(logits.tolist(), experts.tolist(), strict=True):
        assert chosen == sorted(range(num_experts), key=lambda e: (-row[e], e))[:5]
    for t in range(40):
        assert moe.route(logits[t : t + 1], 5, renormalize=True)[1].equal(experts[t : t + 1])
    assert moe.route(torch.zeros(2, num_experts), 3, renormalize=False)[1].tolist() == [[0, 1, 2]] * 2
