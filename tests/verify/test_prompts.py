"""Prompts: exact lengths, whole sentences, words of their own."""

from __future__ import annotations

import pytest

from deltaserve.verify.prompts import OFFSETS, Writer, edge_lengths
from tests.verify.fakes import FakeTarget


@pytest.mark.parametrize("length", [5, 20, 62, 63, 64, 65, 127, 128, 130, 1000])
def test_recall_prompts_are_exactly_as_long_as_asked(length: int) -> None:
    writer = Writer(FakeTarget(), seed=1)
    for depth in (0.0, 0.1, 0.5, 1.0):
        assert len(writer.recall(length, depth).prompt_ids) == length


def test_the_word_lies_where_it_should_and_is_told_once() -> None:
    target = FakeTarget()
    writer = Writer(target, seed=1)
    for depth in (0.1, 0.5, 0.9):
        recall = writer.recall(1000, depth)
        words = target.decode(recall.prompt_ids).split()
        assert [index for index, word in enumerate(words) if recall.word in word] == [
            pytest.approx(1000 * depth, abs=40)
        ]


def test_equal_seeds_write_equal_prompts_and_no_word_comes_twice() -> None:
    one, other = (Writer(FakeTarget(), seed=3) for _ in range(2))
    found = [one.recall(100) for _ in range(50)]
    assert found == [other.recall(100) for _ in range(50)]
    assert len({recall.word for recall in found}) == 50
    assert Writer(FakeTarget(), seed=4).recall(100) != found[0]


def test_a_run_without_a_seed_repeats_none_of_another() -> None:
    one, other = (Writer(FakeTarget()).salt("x") for _ in range(2))
    assert one != other


def test_edge_lengths_use_every_offset_up_to_the_longest() -> None:
    lengths = edge_lengths(34, 1024)
    assert {min(OFFSETS, key=lambda offset: (length - offset) % 64) for length in lengths[:17]}
    assert {length % 64 for length in lengths} == {offset % 64 for offset in OFFSETS}
    assert 62 <= min(lengths) < max(lengths) <= 1024
    assert max(lengths) > 900
