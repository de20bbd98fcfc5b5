"""The long prompts' account, by hand and under a simulated clock that the account cannot see."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from deltaserve.scheduler.share import MAX_DEBT_S, MIN_CHUNK, STALL_STEPS, LongPrefillShare, StepMix

BUDGET = 2048


def mix(num_decode_rows: int = 0, num_short: int = 0, num_long: int = 0, has_long: bool = True) -> StepMix:
    is_contended = bool(num_decode_rows or num_short)
    return StepMix(num_decode_rows, num_short, num_long, is_contended, has_long)


@dataclass
class Clock:
    """What steps really take: so much a decode row, so much a token, more far into a prompt, and noise."""

    rng: random.Random
    row_s: float = 0.0012
    step_s: float = 0.004
    token_s: float = 50e-6
    noise: float = 0.1
    depth: int = 0

    def decode_s(self, num_rows: int) -> float:
        return self.step_s + self.row_s * num_rows if num_rows else 0.0

    def long_s(self, num_tokens: int) -> float:
        return num_tokens * self.token_s * (1 + self.depth / 65_536)

    def elapsed_s(self, mix: StepMix) -> float:
        self.depth = (self.depth + mix.num_long_tokens) % 262_144
        true_s = self.decode_s(mix.num_decode_rows) + mix.num_short_tokens * self.token_s
        return (true_s + self.long_s(mix.num_long_tokens)) * (1 + self.rng.uniform(-self.noise, self.noise))


def test_what_is_long() -> None:
    share = LongPrefillShare(0.5, 4096, BUDGET)
    assert [share.is_long(num) for num in (1, 4095, 4096, 100_000)] == [False, False, True, True]
    assert not LongPrefillShare(1.0, 4096, BUDGET).is_long(100_000), "all of the time is no limit"


def test_without_a_clock_nothing_is_limited() -> None:
    share = LongPrefillShare(0.1, 4096, BUDGET)
    assert share.is_long(5_000)
    share.record(mix(8, num_long=BUDGET), elapsed_s=1.0)
    assert share.allowance(num_decode_rows=8) == 0
    share.record(mix(8), elapsed_s=None)
    assert share.allowance(num_decode_rows=8) == BUDGET
    assert not share.is_long(5_000)


def test_a_chunk_is_paid_before_it_starts() -> None:
    """10 ms decode steps, 100 us a token: 384 tokens take about 4 steps, and 4 decoding steps pay for them."""
    share = LongPrefillShare(0.5, 4096, BUDGET)
    for _ in range(9):
        share.record(mix(8, has_long=False), elapsed_s=0.010)
    share.record(mix(num_long=2000), elapsed_s=0.2)
    granted = []
    for _ in range(12):
        allowance = share.allowance(num_decode_rows=8)
        granted.append(allowance)
        share.record(mix(8, num_long=allowance), elapsed_s=0.010 + allowance * 1e-4)
    assert granted == [0, 0, 0, 384] * 3


def test_a_chunk_is_neither_a_long_stall_nor_inefficient() -> None:
    for decode_s, token_s, expected in ((0.012, 50e-6, 960), (0.001, 50e-6, MIN_CHUNK), (0.1, 50e-6, BUDGET // 2)):
        share = LongPrefillShare(0.9, 4096, BUDGET)
        for _ in range(9):
            share.record(mix(8), elapsed_s=decode_s)
            share.record(mix(8, num_long=512), elapsed_s=decode_s + 512 * token_s)
        for _ in range(99):
            share.record(mix(8), elapsed_s=decode_s)
        assert share.allowance(num_decode_rows=8) in (expected, expected - 64)
        assert expected == MIN_CHUNK or expected * token_s <= STALL_STEPS * decode_s * 1.001


@pytest.mark.parametrize("budget", [64, 100, 128, 300])
def test_small_budgets_bound_the_chunk(budget: int) -> None:
    share = LongPrefillShare(0.5, 64, budget)
    share.record(mix(1), elapsed_s=0.01)
    assert share.allowance(num_decode_rows=1) == min(budget, MIN_CHUNK) // 64 * 64


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("seed", range(4))
def test_share_is_kept_over_every_window(fraction: float, seed: int) -> None:
    """Rows join and leave, prompts end and begin; what long chunks really took stays below the share in any window."""
    rng = random.Random(seed)
    clock = Clock(rng, token_s=rng.choice((20e-6, 50e-6, 400e-6)))
    share = LongPrefillShare(fraction, 4096, BUDGET)
    num_rows = 8
    steps: list[tuple[float, float]] = []
    for _ in range(9):
        share.record(mix(num_rows, has_long=False), clock.elapsed_s(mix(num_rows)))
    while sum(elapsed_s for elapsed_s, _ in steps[-4_000:]) < 30:
        if rng.random() < 0.02:
            num_rows = rng.randint(4, 12)
        allowance = share.allowance(num_rows)
        assert allowance % 64 == 0
        long_s = clock.long_s(allowance)
        step = mix(num_rows, num_long=allowance)
        elapsed_s = clock.elapsed_s(step)
        steps.append((elapsed_s, long_s))
        share.record(step, elapsed_s)
    for window_s in (2.0, 10.0):
        assert worst_share(steps, window_s) <= fraction + 0.12
    total_s, long_s = (sum(column) for column in zip(*steps, strict=True))
    assert fraction * 0.85 <= long_s / total_s <= fraction + 0.04
    assert share.long_s / share.contended_s <= fraction + 1e-9 + 0.1 / total_s


def worst_share(steps: list[tuple[float, float]], window_s: float) -> float:
    """The largest part that long chunks had of any window of at least `window_s` that begins with a step."""
    worst, end, total_s, long_s = 0.0, 0, 0.0, 0.0
    for start_s, start_long_s in steps:
        while total_s < window_s and end < len(steps):
            total_s, long_s, end = total_s + steps[end][0], long_s + steps[end][1], end + 1
        if total_s < window_s:
            break
        worst = max(worst, long_s / total_s)
        total_s, long_s = total_s - start_s, long_s - start_long_s
    return worst


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
def test_a_chunk_always_comes(fraction: float) -> None:
    """However times jump, the number of steps between two chunks has a bound: the debt's, or the price's."""
    rng = random.Random(7)
    share = LongPrefillShare(fraction, 4096, BUDGET)
    shortest_s, longest_token_s = 0.005, 1e-3
    price_s = (1 - fraction) * BUDGET * longest_token_s
    bound = (MAX_DEBT_S + price_s) / (fraction * shortest_s) + 1
    held = 0
    for _ in range(30_000):
        allowance = share.allowance(num_decode_rows=2)
        held = 0 if allowance else held + 1
        assert held <= bound
        elapsed_s = shortest_s * rng.choice((1, 2, 9)) + allowance * rng.choice((1e-5, 1e-4, longest_token_s))
        share.record(mix(2, num_long=allowance), elapsed_s)


def test_nobody_saves_for_a_burst() -> None:
    share = LongPrefillShare(0.5, 4096, BUDGET)
    share.record(mix(num_long=2000), elapsed_s=0.2)
    for _ in range(1000):
        share.record(mix(8), elapsed_s=0.01)
    granted = []
    for _ in range(8):
        granted.append(share.allowance(num_decode_rows=8))
        share.record(mix(8, num_long=granted[-1]), elapsed_s=0.01 + granted[-1] * 1e-4)
    assert granted == [384, 0, 384, 0, 0, 0, 384, 0], "two steps earlier than otherwise, and no more"
    for _ in range(1000):
        share.record(mix(8, has_long=False), elapsed_s=0.01)
    assert share.allowance(num_decode_rows=8) == 0, "what was earned while no long prompt was there is gone"


def test_one_step_that_compiled_something_is_neither_paid_in_full_nor_believed() -> None:
    share = LongPrefillShare(0.5, 4096, BUDGET)
    for _ in range(5):
        share.record(mix(8), elapsed_s=0.01)
        share.record(mix(8, num_long=384), elapsed_s=0.05)
    share.record(mix(8, num_long=384), elapsed_s=600.0)
    held = 0
    while not share.allowance(num_decode_rows=8):
        share.record(mix(8), elapsed_s=0.01)
        held += 1
    assert held <= (MAX_DEBT_S + 0.05) / (0.5 * 0.01) + 1
    assert share.allowance(num_decode_rows=8) == 384


def test_others_may_be_short_prompts_alone() -> None:
    share = LongPrefillShare(0.25, 4096, BUDGET)
    share.record(mix(num_long=2048), elapsed_s=0.2)
    granted = []
    for _ in range(400):
        granted.append(share.allowance(num_decode_rows=0))
        share.record(mix(num_short=200, num_long=granted[-1]), elapsed_s=(200 + granted[-1]) * 1e-4)
    assert set(granted[99:]) == {0, STALL_STEPS * 200 // 64 * 64}
    assert share.long_s / share.contended_s == pytest.approx(0.25, abs=0.01)
