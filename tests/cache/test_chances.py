"""Chances follow what requests come back to, whatever has been evicted meanwhile."""

from __future__ import annotations

import pytest

from deltaserve.cache import chances as module
from deltaserve.cache.boundaries import BoundaryKind
from deltaserve.cache.chances import MAX_REMEMBERED, NUM_IMAGINED, PRIORS, Chances

TURN, USER, SYSTEM = BoundaryKind.TURN, BoundaryKind.USER, BoundaryKind.SYSTEM


def _key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_at_first_chances_are_the_priors_and_never_nought() -> None:
    chances = Chances()
    for kind in BoundaryKind:
        for was_wanted in (False, True):
            assert chances.of(kind, was_wanted) == PRIORS[kind][was_wanted] > 0


def test_a_kind_that_nobody_comes_back_to_sinks_and_one_that_all_do_rises() -> None:
    chances = Chances()
    for number in range(0, 400, 2):
        chances.published(_key(number), TURN)
        chances.published(_key(number + 1), USER)
        chances.looked_up([_key(9999), _key(number + 1), _key(8888)])
    assert chances.of(TURN, False) < 0.03 and chances.of(USER, False) > 0.95
    assert chances.of(USER, True) < 0.01, "wanted once, and never again"
    assert chances.of(SYSTEM, False) == PRIORS[SYSTEM][False]


def test_the_deepest_boundary_on_the_way_is_the_one_wanted() -> None:
    chances = Chances()
    chances.published(_key(1), SYSTEM)
    chances.published(_key(2), USER)
    before = chances.of(SYSTEM, False), chances.of(SYSTEM, True)
    chances.looked_up([_key(1), _key(2), _key(3)])
    assert (chances.of(SYSTEM, False), chances.of(SYSTEM, True)) == before
    assert chances.of(USER, False) > (PRIORS[USER][False] * NUM_IMAGINED) / (NUM_IMAGINED + 1)


def test_a_chance_counts_every_return_to_what_is_shared() -> None:
    chances = Chances()
    chances.published(_key(1), TURN)
    for _ in range(100):
        chances.looked_up([_key(1)])
    num_wanted = PRIORS[TURN][True] * NUM_IMAGINED + 99
    assert chances.of(TURN, True) == pytest.approx(num_wanted / (NUM_IMAGINED + 1))


def test_what_is_published_again_counts_once() -> None:
    once, twice = Chances(), Chances()
    for chances, times in ((once, 1), (twice, 5)):
        for _ in range(times):
            chances.published(_key(1), TURN)
    assert once.of(TURN, False) == twice.of(TURN, False) < PRIORS[TURN][False]


def test_new_habits_win_over_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HALVE_AT", 64)
    chances = Chances()
    for number in range(1000):
        chances.published(_key(number), TURN)
    assert chances.of(TURN, False) < 1e-3
    for number in range(1000, 1200):
        chances.published(_key(number), TURN)
        chances.looked_up([_key(number)])
    assert chances.of(TURN, False) > 0.9


def test_memory_is_bounded_and_paths_can_be_forgotten() -> None:
    chances = Chances()
    for number in range(MAX_REMEMBERED + 10):
        chances.published(_key(number), TURN)
    assert len(chances._remembered) == MAX_REMEMBERED
    low = chances.of(TURN, False)
    chances.looked_up([_key(0)])
    assert chances.of(TURN, False) == low, "the oldest is not remembered"
    chances.forget_paths()
    chances.looked_up([_key(MAX_REMEMBERED)])
    assert chances.of(TURN, False) == low
