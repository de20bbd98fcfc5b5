"""Generators give what they state, the same for the same seed, and conversations that hang together."""

from __future__ import annotations

import functools
import itertools
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from deltaserve.bench.conversation import IM_START, MARKERS, Words
from deltaserve.bench.make_trace import GENERATORS, Measured, Shape, Turn, make, to_rows
from deltaserve.bench.traces import RowTexts, read_trace, write_trace
from deltaserve.core.errors import ConfigError

SHAPE = Shape(num_requests=250, prompt_tokens=4096, output_tokens=80)


@functools.cache
def _made(name: str, seed: int = 1) -> tuple[tuple[Turn, ...], Measured]:
    return make(name, SHAPE, seed)


@pytest.mark.parametrize("name", GENERATORS)
def test_medians_and_seen_share_are_those_stated(name: str) -> None:
    turns, measured = _made(name)
    words = Words()
    prompts = [words.ids(turn.prompt) for turn in turns]
    assert len(turns) == measured.num_requests == SHAPE.num_requests
    assert statistics.median(map(len, prompts)) == pytest.approx(4096, rel=0.02) == measured.prompt_tokens
    assert statistics.median(len(words.ids(turn.reply)) for turn in turns) == pytest.approx(80, rel=0.02)
    seen = _num_seen(turns, prompts) / sum(map(len, prompts))
    assert seen == pytest.approx(GENERATORS[name].seen_share, rel=0.02)
    assert measured.seen_share == pytest.approx(seen, abs=0.01)


def _num_seen(turns: tuple[Turn, ...], prompts: list[tuple[int, ...]]) -> int:
    """By brute force, 16 tokens at a time: of each prompt, what was in an earlier prompt or its finished answer."""
    words, known, seen = Words(), set(), 0
    answered = sorted(range(len(turns)), key=lambda number: turns[number].finish_s)
    for turn, prompt in zip(turns, prompts, strict=True):
        while answered and turns[answered[0]].finish_s <= turn.arrival_s:
            done = answered.pop(0)
            known |= _prefixes(prompts[done] + words.ids(turns[done].reply))
        prefixes = _prefixes(prompt)
        seen += 16 * len(prefixes & known)
        known |= prefixes
    return seen


def _prefixes(ids: tuple[int, ...]) -> set[int]:
    blocks = (hash(ids[start : start + 16]) for start in range(0, len(ids) - 15, 16))
    return set(itertools.accumulate(blocks, lambda parent, block: hash((parent, block))))


@pytest.mark.parametrize("name", GENERATORS)
def test_the_same_seed_gives_the_same_trace_and_another_one_does_not(name: str) -> None:
    assert make(name, SHAPE, 1) == _made(name)
    assert _made(name)[0] != _made(name, seed=2)[0]


@pytest.mark.parametrize("name", GENERATORS)
def test_requests_arrive_in_order_and_a_session_never_answers_before_it_is_asked(name: str) -> None:
    turns, _ = _made(name)
    assert [turn.arrival_s for turn in turns] == sorted(turn.arrival_s for turn in turns)
    assert all(turn.finish_s > turn.arrival_s for turn in turns)
    assert len({turn.session_id for turn in turns[:40]}) > 4, "sessions interleave"


def test_a_chat_leaves_its_old_path_where_thinking_was_and_a_tool_loop_stays_on_it() -> None:
    words = Words()
    for name, share in (("chat", 0.0), ("tools", 0.7)):
        turns, _ = _made(name)
        sessions: dict[str, list[Turn]] = {}
        for turn in turns:
            sessions.setdefault(turn.session_id, []).append(turn)
        pairs = [pair for session in sessions.values() for pair in itertools.pairwise(session)]
        continued = [words.ids((*a.prompt, *a.reply)) == words.ids(b.prompt)[: a.num_tokens] for a, b in pairs]
        assert (sum(continued) / len(continued) > 0.7) == (share > 0.5), name
        assert all(words.ids(turn.prompt)[0] == IM_START for turn in turns)


def test_tool_loops_are_long_and_their_results_come_in_parallel() -> None:
    words, (tool,), (user,) = Words(), MARKERS.tool_response, MARKERS.user
    prompts = [words.ids(turn.prompt) for turn in _made("tools")[0]]
    longest = max(prompts, key=lambda prompt: prompt.count(tool))
    assert longest.count(tool) > 24
    assert longest.count(user) < longest.count(tool), "several results in one message"


def test_branches_and_retries_share_a_point_to_start_from() -> None:
    words = Words()
    turns, _ = _made("forks")
    prompts = [words.ids(turn.prompt) for turn in turns]
    assert len(set(prompts)) < len(prompts), "some prompts come again"


def test_a_trace_file_of_it_shares_as_much(tmp_path: Path) -> None:
    turns, measured = _made("tools")
    path = tmp_path / "trace.jsonl"
    write_trace(path, to_rows(turns))
    rows = read_trace(path)
    assert len(rows) == len(turns)
    assert statistics.median(row.input_length for row in rows) == measured.prompt_tokens
    texts, known, seen = RowTexts(0, 4096), set(), 0
    for number, row in enumerate(rows):
        prefixes = _prefixes(texts.token_ids(row, number))
        seen += 16 * len(prefixes & known)
        known |= prefixes
    share = seen / sum(row.input_length for row in rows)
    assert measured.seen_share - 0.12 < share <= measured.seen_share, "answers and parts of blocks are not shared"


def test_a_share_that_no_ratio_can_reach_is_refused_with_what_can() -> None:
    with pytest.raises(ConfigError, match=r"seen before, not 4096 and 99.9%; ask for a share nearer to it"):
        make("chat", replace(SHAPE, seen_share=0.999), 1)
    with pytest.raises(ConfigError, match="known are chat, tools, forks"):
        make("talk", SHAPE, 1)
