"""Thinking and answer are split alike however the text is cut."""

from __future__ import annotations

import random

import pytest

from deltaserve.server.parsers.reasoning import ReasoningSplitter, State, continued_state, start_state

# (start, text, thinking, answer, is there an answer)
TABLE = [
    (State.OPENED, "why\n</think>\n\nanswer", "why", "answer", True),
    (State.OPENED, "why</think>answer", "why", "answer", True),
    (State.OPENED, "<think>\nwhy\n</think>\n\nanswer", "why", "answer", True),
    (State.OPENED, "\n<think>why</think>answer", "why", "answer", True),
    (State.OPENED, "never ends\n", "never ends\n", "", False),
    (State.OPENED, "almost </thin", "almost </thin", "", False),
    (State.OPENED, "</think>\n\n", "", "", True),
    (State.OPENED, "", "", "", False),
    (State.OPENED, "a < b </ c\n\nd</think>e", "a < b </ c\n\nd", "e", True),
    (State.OPENED, "a <think> b</think>c", "a <think> b", "c", True),
    (State.OPENED, "why</think>\n</think>\n\nanswer", "why", "answer", True),
    (State.OPENED, "why</think>one </think> two", "why", "one </think> two", True),
    (State.OPENED, "why</think> spaced ", "why", " spaced ", True),
    (State.UNDECIDED, "answer", "", "answer", True),
    (State.UNDECIDED, "  answer </think>", "", "  answer </think>", True),
    (State.UNDECIDED, "\n<think>\nwhy\n</think>\n\nanswer", "why", "answer", True),
    (State.UNDECIDED, "<thin", "", "<thin", True),
    (State.UNDECIDED, "<think>", "", "", False),
    (State.ANSWER, "<think>a</think>\n\nb", "", "<think>a</think>\n\nb", True),
]


def split(state: State, pieces: list[str]) -> tuple[str, str, bool]:
    splitter = ReasoningSplitter(state)
    thinking, answer = "", ""
    for index, piece in enumerate(pieces):
        part = splitter.feed(piece, is_last=index == len(pieces) - 1)
        thinking += part.reasoning
        answer += part.content
    return thinking, answer, splitter.has_answer


@pytest.mark.parametrize(("state", "text", "thinking", "answer", "has_answer"), TABLE)
def test_table_whole_and_one_character_at_a_time(
    state: State, text: str, thinking: str, answer: str, has_answer: bool
) -> None:
    for pieces in ([text], list(text) or [""], [*text, ""]):
        assert split(state, pieces) == (thinking, answer, has_answer)


def test_random_texts_do_not_depend_on_the_cuts() -> None:
    rng = random.Random(0)
    words = ["<think>", "</think>", "\n", "a", "<", "</", "think", ">", " ", "<th"]
    for _ in range(3000):
        text = "".join(rng.choice(words) for _ in range(rng.randint(0, 8)))
        cuts = sorted(rng.sample(range(len(text) + 1), min(3, len(text) + 1)))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        for state in (State.OPENED, State.UNDECIDED, State.ANSWER):
            assert split(state, pieces) == split(state, [text]), (state, text, pieces)


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    splitter = ReasoningSplitter(State.OPENED)
    assert splitter.feed("so it is <") == ("so it is ", "")
    assert splitter.feed("b") == ("<b", "")
    assert splitter.feed("\n</thi") == ("", "")
    assert splitter.feed("nk>\n\nYes") == ("", "Yes")
    assert splitter.feed(" <thi") == ("", " <thi")


@pytest.mark.parametrize(
    ("prompt", "state"),
    [
        ("<|im_start|>assistant\n<think>\n", State.OPENED),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", State.ANSWER),
        ("<|im_start|>assistant\n", State.UNDECIDED),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", State.UNDECIDED),
        ("tools with </think> in them<|im_start|>assistant\n<think>\n", State.OPENED),
    ],
)
def test_start_is_read_from_the_end_of_the_prompt(prompt: str, state: State) -> None:
    assert start_state(prompt) is state


def test_a_continued_message_starts_where_it_stands() -> None:
    assert continued_state("<think>\nwell") is State.THINKING
    assert continued_state("<think>\nwell</think>\n\nSo") is State.ANSWER
    assert continued_state("So") is State.ANSWER
