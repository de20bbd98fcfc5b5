"""Blocks do not depend on how the parts came: one by one, in pieces, or all at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.core.types import FinishReason
from deltaserve.server.blocks import Block, Blocks, Ending, Step
from deltaserve.server.errors import GenerationError
from deltaserve.server.parsers.sink import Kind, Part

Row = list[tuple[Kind, str]]
TEXTS = st.text("ab", min_size=1, max_size=4)
ROWS = st.lists(st.tuples(st.sampled_from((Kind.REASONING, Kind.CONTENT, Kind.CALL)), TEXTS), max_size=8)


def parts_of(row: Row, sizes: list[int]) -> list[Part]:
    """The parts of `row`, each text cut into pieces of `sizes`, used in turn."""
    parts: list[Part] = []
    num_calls = 0
    for kind, text in row:
        if kind is Kind.CALL:
            parts.append(Part(Kind.CALL, "f", num_calls, f"id{num_calls}"))
            num_calls += 1
        said = Kind.ARGUMENTS if kind is Kind.CALL else kind
        while text:
            size = sizes[len(parts) % len(sizes)]
            parts.append(Part(said, text[:size], num_calls - 1))
            text = text[size:]
    return parts


def expected(row: Row) -> list[tuple[Kind, str]]:
    """Neighbours of one kind are one, but for calls."""
    blocks: list[tuple[Kind, str]] = []
    for kind, text in row:
        if blocks and kind is not Kind.CALL and blocks[-1][0] is kind:
            blocks[-1] = (kind, blocks[-1][1] + text)
        else:
            blocks.append((kind, text))
    return blocks


@given(ROWS, st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_blocks_and_steps_for_any_split(row: Row, sizes: list[int]) -> None:
    blocks = Blocks()
    opened: list[Block] = []
    closed: list[tuple[Kind, str]] = []
    grown = ""
    for change in (*blocks.feed(parts_of(row, sizes)), *blocks.finish()):
        if change.step is Step.OPEN:
            assert len(opened) == len(closed) == change.block.index
            opened.append(change.block)
            grown = ""
        elif change.step is Step.GROW:
            grown += change.text
        else:
            assert grown == change.block.text
            closed.append((change.block.kind, grown))
    assert closed == expected(row)
    assert [(block.kind, block.text) for block in blocks.all] == closed


def test_a_block_is_empty_when_it_opens_and_only_the_last_is_cut() -> None:
    blocks = Blocks()
    parts = (Part(Kind.CONTENT, "a"), Part(Kind.CALL, "f", 0, "c1"), Part(Kind.ARGUMENTS, "{", 0))
    lengths = [(change.step, len(change.block.text)) for change in blocks.feed(parts)]
    assert lengths == [(Step.OPEN, 0), (Step.GROW, 1), (Step.CLOSE, 1), (Step.OPEN, 0), (Step.GROW, 1)]
    list(blocks.finish(is_cut=True))
    assert [block.is_cut for block in blocks.all] == [False, True]
    assert not list(blocks.finish())


def test_what_an_answer_ended_by() -> None:
    blocks = Blocks()
    assert Ending.of(FinishReason.STOP, "END", blocks) == Ending(is_cut=False, stop="END", has_calls=False)
    list(blocks.feed((Part(Kind.CALL, "f", 0, "c1"),)))
    assert Ending.of(FinishReason.STOP, 7, blocks) == Ending(is_cut=False, stop=None, has_calls=True)
    assert Ending.of(FinishReason.LENGTH, None, blocks).is_cut
    with pytest.raises(GenerationError, match="send the request again"):
        Ending.of(FinishReason.ABORT, None, blocks)
