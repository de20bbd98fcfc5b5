"""When two answers are one, at both levels."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deltaserve.verify.ask import Answer
from deltaserve.verify.compare import EXACT, Level, compare, is_more_frequent, largest_difference

NEAR = Level(0.5)


def answer(*choices: tuple[int, int, float]) -> Answer:
    """Tokens with their second choice and the gap to it."""
    tops = tuple(((first, -0.2), (second, -0.2 - gap)) for first, second, gap in choices)
    return Answer(tuple(first for first, _, _ in choices), tops, finish_reason="length")


REFERENCE = answer((5, 6, 3.0), (7, 8, 0.3), (9, 10, 0.8))


def test_equal_answers_pass_at_both_levels() -> None:
    for level in (EXACT, NEAR):
        verdict = compare(REFERENCE, REFERENCE, level)
        assert verdict.passed
        assert not verdict.is_split


def test_a_split_fails_the_exact_level_and_tells_where_and_how_near() -> None:
    other = replace(REFERENCE, token_ids=(5, 8, 1))
    verdict = compare(REFERENCE, other, EXACT)
    assert not verdict.passed
    assert (verdict.position, verdict.gap) == (1, pytest.approx(0.3))
    assert verdict.detail == "token 1 is 8 instead of 7; top-2 gap 0.3000"


@pytest.mark.parametrize(
    ("tokens", "passes"),
    [
        ((5, 8, 1), True),  # a tie: the second choice, 0.3 behind
        ((5, 11, 1), False),  # not the second choice
        ((6, 7, 9), False),  # the second choice, 3.0 behind
        ((5, 7, 10), False),  # 0.8 behind
        ((5, 7), False),  # an end is no second choice
    ],
)
def test_the_near_level_lets_ties_through_and_nothing_else(tokens: tuple[int, ...], passes: bool) -> None:
    assert compare(REFERENCE, replace(REFERENCE, token_ids=tokens), NEAR).passed is passes


def test_a_split_without_alternatives_is_no_tie() -> None:
    bare = replace(REFERENCE, tops=())
    assert not compare(bare, replace(bare, token_ids=(5, 8, 9)), NEAR).passed


def test_errors_and_other_endings_fail() -> None:
    assert compare(REFERENCE, replace(REFERENCE, error="no room"), NEAR).detail == "the answer failed: no room"
    assert not compare(replace(REFERENCE, error="no room"), REFERENCE, NEAR).passed
    assert "'length'" in compare(REFERENCE, replace(REFERENCE, finish_reason="stop"), EXACT).detail


def test_logprobs_are_compared_up_to_the_split() -> None:
    tops = (((5, -0.25), (6, -3.2)), ((8, -9.0), (7, -9.1)), ((1, -9.0), (2, -9.1)))
    other = replace(REFERENCE, token_ids=(5, 8, 1), tops=tops)
    assert largest_difference(REFERENCE, other) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("counts", "more"),
    [
        ((0, 16, 0, 16), False),
        ((1, 16, 0, 16), False),
        ((4, 16, 0, 16), False),
        ((5, 16, 0, 16), True),
        ((9, 100, 10, 100), False),
        ((30, 100, 10, 100), True),
    ],
)
def test_splits_are_more_frequent_only_beyond_chance(counts: tuple[int, int, int, int], more: bool) -> None:
    """5 of 16 against 0 of 16 has a chance of C(16, 5) / C(32, 5) = 0.022 where both are equally likely."""
    assert is_more_frequent(*counts) is more
