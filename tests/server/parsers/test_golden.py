"""The golden tables: each case whole, as tokens, cut in two everywhere, and cut at random."""

from __future__ import annotations

import json
import random
import re
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.server.parsers.reasoning import State
from tests.server.parsers import cases_json, cases_thinking, cases_values, cases_xml
from tests.server.parsers.golden import Case, Raw, check, read_pieces, read_tokens

CASES = [*cases_xml.CASES, *cases_values.CASES, *cases_json.CASES, *cases_thinking.CASES]

MARKS = ["<tool_call>", "</tool_call>", "<function=", "ping>", "get_weather>\n", "</function>", "</parameter>"]
MARKS += ["<parameter=", "city>\n", "days>", "<think>", "</think>", "<", "</", '{"name": "ping"', ', "arguments": {']
WORDS = [*MARKS, *MARKS, "\n", " ", "a", '"', "}", "{", "]", "[", "1", ",", ":", "\\", "'", "None", "é"]

each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.encode("unicode_escape").decode())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(Path(__file__).parents[3] / "models" / "tiny")


def test_there_are_many_cases_and_each_has_its_own_name() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 150


@each
def test_whole(case: Case) -> None:
    check(case, read_pieces(case, [case.text]))
    check(case, read_pieces(case, [case.text, ""]))


@each
def test_cut_in_two_everywhere(case: Case) -> None:
    whole = read_pieces(case, [case.text])
    for position in range(len(case.text) + 1):
        pieces = [case.text[:position], case.text[position:]]
        assert read_pieces(case, pieces) == whole, pieces


@each
def test_cut_at_random(case: Case) -> None:
    whole = read_pieces(case, [case.text])
    assert read_pieces(case, list(case.text) or [""]) == whole
    rng = random.Random(zlib.crc32(case.name.encode()))
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(case.text) + 1), k=rng.randint(2, 9)))
        pieces = [case.text[i:j] for i, j in pairwise([0, *cuts, len(case.text)])]
        assert read_pieces(case, pieces) == whole, pieces


@each
def test_token_by_token_and_several_at_a_time(case: Case, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(case.text)
    if tokenizer.special_ids.intersection(ids) or case.text.encode() != b"".join(map(tokenizer.token_bytes, ids)):
        pytest.skip("the tokenizer writes this text in another way")
    whole, num_reasoning = read_tokens(case, tokenizer, lambda: 1 << 20)
    check(case, whole)
    assert (num_reasoning > 0) >= bool(case.reasoning)
    assert num_reasoning == 0 or case.state is not State.ANSWER
    rng = random.Random(zlib.crc32(case.name.encode()))
    for step in (lambda: 1, lambda: 2, lambda: 4, lambda: rng.randint(1, 5)):
        assert read_tokens(case, tokenizer, step) == (whole, num_reasoning)


def test_random_texts_do_not_depend_on_the_cuts() -> None:
    """Marks, halves of marks and JSON thrown together, or into a case: nothing fails, and every cut gives the same."""
    rng = random.Random(4)
    for number in range(1200):
        origin = rng.choice(CASES)
        text = random_text(rng) if number % 2 else spoilt(origin.text, rng)
        case = replace(origin, text=text, is_cut=rng.random() < 0.4)
        whole = read_pieces(case, [text])
        assert all(is_beginning(arguments) for _, _, arguments in whole.calls), (number, case)
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 6)))
        pieces = [text[i:j] for i, j in pairwise([0, *cuts, len(text)])]
        assert read_pieces(case, pieces) == whole, (number, case, pieces)
        assert read_pieces(case, list(text) or [""]) == whole, (number, case)


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(1, 24)))


def spoilt(text: str, rng: random.Random) -> str:
    """With something put in or taken out in a few places."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text) + 1)
        text = text[:start] + rng.choice(["", *WORDS]) + text[start + rng.choice((0, 0, 1, 3, 8)) :]
    return text


def is_beginning(text: str) -> bool:
    """Whether some JSON text begins so; what is open is closed in every way that may do."""
    owed, in_string = "", False
    for character in re.sub(r"\\.", "", text):
        in_string ^= character == '"'
        if not in_string and character in "{[":
            owed = "}]"["{[".index(character)] + owed
        elif not in_string and character in "}]":
            owed = owed[1:]
    return not text or any(is_json(text + middle + owed) for middle in ("", '"', '":0', ":0", "0", '"":0', ',"":0'))


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_arguments_that_break_off_are_the_beginning_of_a_json_text() -> None:
    raw = [wanted.text for case in CASES for _, wanted in case.calls if isinstance(wanted, Raw)]
    assert len(raw) > 15
    assert [text for text in raw if not is_beginning(text)] == []
    assert not any(map(is_beginning, ("}", '{"a": x', "{'a", '{"a": 1, }, ', '{"a" "b"')))
