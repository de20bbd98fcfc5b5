"""How many drafts: the bounds by brute force, the choice by enumeration."""

from __future__ import annotations

import random

import pytest

from deltaserve.core.config import SpeculativeConfig
from deltaserve.core.request import Request
from deltaserve.core.types import RequestOptions, SamplingParams
from deltaserve.scheduler.speculation import (
    DRAFT_COST,
    EXPECTED_ACCEPTANCE,
    Acceptance,
    DraftCounts,
    Speculation,
    choose_num_drafts,
    num_to_propose,
    num_to_verify,
)

MAX_DRAFTS = 7


@pytest.mark.parametrize(
    ("num_known", "num_left", "num_kept", "num_spare", "expected"),
    [
        (1, 100, 3, 9, 3),
        (61, 100, 3, 9, 3),  # the ring holds 60: 1 + 3 fill it
        (62, 100, 3, 9, 2),
        (63, 100, 3, 9, 1),
        (64, 100, 3, 9, 0),  # the ring holds 63
        (65, 100, 3, 9, 3),  # folded first
        (30, 3, 3, 9, 2),
        (30, 1, 3, 9, 0),
        (30, 9, 3, 2, 2),
        (30, 9, 3, -64, 0),
        (30, 9, 0, 9, 0),
    ],
)
def test_num_to_verify(num_known: int, num_left: int, num_kept: int, num_spare: int, expected: int) -> None:
    assert num_to_verify(num_known, num_left, num_kept, num_spare) == expected


def test_bounds_hold_and_are_no_tighter_than_they_must_be() -> None:
    for num_known in range(1, 140):
        for num_left in range(1, 12):
            end = num_known + num_left  # known tokens when the request has said all
            for kept in range(MAX_DRAFTS + 1):
                verified = num_to_verify(num_known, num_left, kept, num_spare=99)
                start = num_known - 1
                assert start // 64 == (start + verified) // 64, "a boundary inside a step"
                assert verified == kept or verified == num_left - 1 or (start + verified + 1) % 64 == 0
                proposed = num_to_propose(num_known, num_left, verified, MAX_DRAFTS)
                assert num_known + verified + proposed <= max(end - 1, num_known), "a position that is never needed"
                usable = (
                    max(
                        num_to_verify(known, end - known, MAX_DRAFTS, num_spare=99)
                        for known in range(num_known + 1, num_known + verified + 2)
                        if known < end
                    )
                    if num_left > 1
                    else 0
                )
                assert proposed <= usable, "a proposal that nobody can use"
                assert proposed == min(usable, max(num_left - 1 - verified, 0))
                assert num_to_propose(num_known, num_left, verified, num_wanted=1) == min(proposed, 1)


def test_choice_is_the_best_of_all() -> None:
    rng = random.Random(1)
    for _ in range(500):
        rates = [rng.random() for _ in range(rng.randint(0, MAX_DRAFTS))]
        cost = rng.choice((0.02, 0.15, 0.6))
        tokens = [1.0]
        chance = 1.0
        for rate in rates:
            chance *= rate
            tokens.append(tokens[-1] + chance)
        speeds = [num / (1 + k * cost) for k, num in enumerate(tokens)]
        chosen = choose_num_drafts(rates, cost)
        assert speeds[chosen] == pytest.approx(max(speeds), rel=1e-12)


def test_choice_at_the_ends() -> None:
    assert choose_num_drafts([1.0] * 7) == 7
    assert choose_num_drafts([0.0] * 7) == 0
    assert choose_num_drafts([]) == 0
    assert choose_num_drafts([DRAFT_COST * 0.9] * 7) == 0
    assert choose_num_drafts([EXPECTED_ACCEPTANCE] * 3) == 3


def test_acceptance_follows_what_happens_and_forgets() -> None:
    acceptance = Acceptance(3)
    for _ in range(60):
        acceptance.record(num_verified=3, num_accepted=1)
    assert acceptance.rates[0] > 0.99
    assert acceptance.rates[1] < 0.01
    assert 0.7 < acceptance.rates[2] <= EXPECTED_ACCEPTANCE  # never reached: nothing learned
    assert choose_num_drafts(acceptance.rates) == 1
    for _ in range(60):
        acceptance.record(num_verified=3, num_accepted=0)
    assert choose_num_drafts(acceptance.rates) == 0
    num_rows = 0
    while not choose_num_drafts(acceptance.rates):
        acceptance.record(num_verified=0, num_accepted=0)
        num_rows += 1
    assert 10 < num_rows < 500, "a request without drafts tries them again, but not at once"


def test_counts_by_position() -> None:
    counts = DraftCounts.of(3)
    for num_verified, num_accepted in ((3, 0), (3, 3), (2, 1), (1, 1)):
        counts.record(num_verified, num_accepted)
    assert (counts.num_rows, counts.num_verified, counts.num_accepted) == (4, 9, 5)
    assert counts.verified_by_position == [4, 3, 2]
    assert counts.accepted_by_position == [3, 1, 1]


def test_who_gets_drafts() -> None:
    params = SamplingParams(max_tokens=1)
    with_drafts = Request(1, (1,), params)
    without = Request(2, (1,), params, options=RequestOptions(use_drafts=False))
    fixed, adaptive = Speculation(SpeculativeConfig(3)), Speculation(SpeculativeConfig(3, is_adaptive=True))
    acceptance = fixed.acceptance_for(with_drafts)
    assert acceptance is not None
    assert fixed.acceptance_for(without) is None
    assert Speculation(SpeculativeConfig()).acceptance_for(with_drafts) is None
    for _ in range(99):
        adaptive.record(acceptance, num_verified=3, num_accepted=0)
    assert (fixed.num_wanted(acceptance), adaptive.num_wanted(acceptance), fixed.num_wanted(None)) == (3, 0, 0)
    assert adaptive.counts.num_verified == 297
