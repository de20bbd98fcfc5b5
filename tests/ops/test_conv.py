"""The GDN convolution against a naive one, over splits, rings of every width, windows and padding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deltaserve.ops import conv
from deltaserve.ops.testing import LENGTHS, compare, extend_rows, fill_nan, generator, nan_empty, prefill_rows

CHANNELS, TAPS = 10, 4
WEIGHT = torch.randn(CHANNELS, TAPS, generator=generator(7))


@pytest.fixture(autouse=True)
def fresh_tensors_are_nan() -> Iterator[None]:
    with nan_empty():
        yield


def inputs_of(num_tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(num_tokens, CHANNELS, generator=generator(seed))


def naive(x_TC: Tensor) -> Tensor:
    """Token by token in float64, from zeros before position 0."""
    padded = torch.cat((torch.zeros(TAPS - 1, CHANNELS), x_TC)).double()
    weight = WEIGHT.double()
    sums = [sum(padded[t + tap] * weight[:, tap] for tap in range(TAPS)) for t in range(len(x_TC))]
    y = torch.stack([torch.as_tensor(s) for s in sums])
    return y / (1 + (-y).exp())


def pools(num_drafts: int = 0, num_slots: int = 6, num_rows: int = 4) -> tuple[Tensor, Tensor]:
    """Windows [S, LG, W-1, C] and conv ring [R, LG, W + drafts, C] of two layers, NaN but for slot 0."""
    windows = fill_nan(torch.zeros(num_slots, 2, TAPS - 1, CHANNELS))
    windows[0] = 0
    return windows, fill_nan(torch.zeros(num_rows, 2, TAPS + num_drafts, CHANNELS))


@pytest.mark.parametrize("num_tokens", [*LENGTHS, 2, 3, 4])
def test_prefill_is_the_naive_convolution(num_tokens: int) -> None:
    x = inputs_of(num_tokens)
    windows, ring = pools()
    compare(conv.prefill(x, WEIGHT, windows[:, 1], ring[:, 1], prefill_rows([num_tokens])), naive(x))


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 7])
@pytest.mark.parametrize("prompt", [1, 2, 3, 5, 64, 66])
def test_prefill_then_extend_round_the_ring(prompt: int, num_drafts: int) -> None:
    x = inputs_of(140)
    windows, ring = pools(num_drafts)
    y = [conv.prefill(x[:prompt], WEIGHT, windows[:, 1], ring[:, 1], prefill_rows([prompt]))]
    position, width = prompt, 1 + num_drafts
    while position < 140 - width:
        new = 1 + position % width
        tokens = x[position : position + width]
        out = conv.extend(tokens, WEIGHT, ring[:, 1], extend_rows([position], [new], width=width))
        assert out.isfinite().all()
        y.append(out[:new])
        position += new
    compare(torch.cat(y), naive(x)[:position])
    assert ring[[0, 2, 3]].isnan().all()
    assert ring[:, 0].isnan().all()


def test_chunks_and_cuts() -> None:
    x = inputs_of(200)
    windows, ring = pools()
    layer = windows[:, 1], ring[:, 1]
    first = conv.prefill(x[:128], WEIGHT, *layer, prefill_rows([128], cuts=[(0, 64, 2), (0, 128, 3)]))
    second = conv.prefill(x[128:], WEIGHT, *layer, prefill_rows([72], starts=[128], slots_in=[3], cuts=[(0, 64, 4)]))
    compare(torch.cat((first, second)), naive(x))
    for slot, boundary in ((2, 64), (3, 128), (4, 192)):
        assert windows[slot, 1].equal(x[boundary - 3 : boundary])
    assert windows[[1, 5]].isnan().all()
    resumed = conv.prefill(x[64:100], WEIGHT, *layer, prefill_rows([36], starts=[64], slots_in=[2], rows=[3]))
    compare(resumed, naive(x)[64:100])


@pytest.mark.parametrize("width", [1, 4])
def test_rows_do_not_meet_and_padding_writes_nothing(width: int) -> None:
    lengths = [1, 65, 2, 130]
    parts = [inputs_of(n + width, seed=n) for n in lengths]
    windows, ring = pools(num_drafts=width - 1, num_rows=9)
    rows = [8, 3, 1, 5]
    packed = torch.cat([x[:n] for x, n in zip(parts, lengths, strict=True)])
    y = conv.prefill(packed, WEIGHT, windows[:, 0], ring[:, 0], prefill_rows(lengths, rows=rows, cuts=[(3, 64, 5)]))
    compare(y, torch.cat([naive(x[:n]) for x, n in zip(parts, lengths, strict=True)]))
    assert windows[5, 0].equal(parts[3][61:64])
    before = ring.clone()
    num_new = [width, 1, width, 1]
    tokens = torch.cat([x[n:] for x, n in zip(parts, lengths, strict=True)])
    out = conv.extend(tokens, WEIGHT, ring[:, 0], extend_rows(lengths, num_new, rows=rows, width=width))
    assert out.isfinite().all()
    for row, y_row in enumerate(out.split(width)):
        n, new = lengths[row], num_new[row]
        compare(y_row[:new], naive(parts[row])[n : n + new])
        written = [(n + i) % ring.shape[2] for i in range(new)]
        assert ring[rows[row], 0, written].equal(parts[row][n : n + new])
        untouched = [entry for entry in range(ring.shape[2]) if entry not in written]
        kept, was = ring[rows[row], 0, untouched], before[rows[row], 0, untouched]
        assert kept.view(torch.int32).equal(was.view(torch.int32))
    assert ring[[0, 2, 4, 6, 7]].isnan().all()


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_fold_takes_the_last_inputs_of_all_layers(num_drafts: int) -> None:
    x = inputs_of(129)
    windows, ring = pools(num_drafts)
    for layer in (0, 1):
        scaled = x * (layer + 1)
        conv.prefill(scaled[:126], WEIGHT, windows[:, layer], ring[:, layer], prefill_rows([126], rows=[2]))
        for position in (126, 127):
            conv.extend(scaled[[position]], WEIGHT, ring[:, layer], extend_rows([position], [1], rows=[2]))
    conv.fold(windows, ring, extend_rows([128], [1], rows=[2], folds=[(2, 1, 4, 128)]))
    assert windows[4].equal(torch.stack((x[125:128], x[125:128] * 2)))
    assert windows[[1, 2, 3, 5]].isnan().all()


def test_rejected_drafts_are_overwritten() -> None:
    x, wrong = inputs_of(20), inputs_of(20, seed=1)
    windows, ring = pools(num_drafts=3)
    conv.prefill(x[:10], WEIGHT, windows[:, 0], ring[:, 0], prefill_rows([10]))
    conv.extend(torch.cat((x[10:11], wrong[11:14])), WEIGHT, ring[:, 0], extend_rows([10], [4]))
    compare(conv.extend(x[11:15], WEIGHT, ring[:, 0], extend_rows([11], [4])), naive(x)[11:15])


def test_a_weight_kept_the_other_way_round_gives_the_same() -> None:
    x = inputs_of(9)
    weight = WEIGHT.t().contiguous().t()
    outputs = []
    for w in (WEIGHT, weight):
        windows, ring = pools()
        outputs.append(conv.prefill(x, w, windows[:, 0], ring[:, 0], prefill_rows([9])))
    assert outputs[0].equal(outputs[1])
