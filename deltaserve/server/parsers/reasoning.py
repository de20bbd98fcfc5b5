"""Thinking and answer, told apart by the `<think>` and `</think>` marks in the text.

Where the text starts is read from the end of the rendered prompt, never from flags: templates may open the block, open
and close it, or leave it to the model.

| prompt ends in     | the output is                                                           |
| ------------------ | ----------------------------------------------------------------------- |
| `<think>`          | thinking until `</think>`; a repeated `<think>` at its start is dropped |
| `</think>`         | answer, whatever it holds                                               |
| anything else      | answer, unless it begins with `<think>`                                 |

Newlines around the marks belong to neither side, and so does a second `</think>` right after the first. Text that may
yet become a mark is held back, so the joined pieces do not depend on how the text was cut.
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class State(enum.Enum):
    OPENED = enum.auto()  # the prompt opened the block; nothing seen yet
    UNDECIDED = enum.auto()  # the model may open the block
    THINKING = enum.auto()
    CLOSED = enum.auto()  # the block was closed; nothing of the answer seen yet
    ANSWER = enum.auto()


class Split(NamedTuple):
    reasoning: str
    content: str


def start_state(prompt: str) -> State:
    """From the rendered prompt."""
    if re.search(rf"{OPEN}\s*\Z", prompt):
        return State.OPENED
    if re.search(rf"{CLOSE}\s*\Z", prompt):
        return State.ANSWER
    return State.UNDECIDED


def continued_state(message: str) -> State:
    """For a prompt that ends inside the assistant's own `message`."""
    return State.THINKING if message.rfind(OPEN) > message.rfind(CLOSE) else State.ANSWER


class ReasoningSplitter:
    """Feed text as it comes; `is_last` gives out what was held back."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._held = ""

    @property
    def has_answer(self) -> bool:
        """False while all text so far was thinking: the answer is then absent, not empty."""
        return self.state in (State.CLOSED, State.ANSWER, State.UNDECIDED)

    def feed(self, text: str, is_last: bool = False) -> Split:
        self._held += text
        if self.state in (State.OPENED, State.UNDECIDED):
            self._begin(is_last)
        reasoning = self._take_thinking(is_last) if self.state is State.THINKING else ""
        if self.state is State.CLOSED:
            self._skip_gap(is_last)
        return Split(reasoning, self._take_answer())

    def _begin(self, is_last: bool) -> None:
        text = self._held.lstrip()
        after_mark = text.removeprefix(OPEN).lstrip("\n")
        if text.startswith(OPEN) and (after_mark or is_last):
            self.state, self._held = State.THINKING, after_mark
        elif is_last or not OPEN.startswith(text.rstrip("\n")):
            opened = self.state is State.OPENED
            self.state = State.THINKING if opened else State.ANSWER

    def _take_thinking(self, is_last: bool) -> str:
        thinking, mark, rest = self._held.partition(CLOSE)
        if mark:
            self.state, self._held = State.CLOSED, rest
            return thinking.rstrip("\n")
        num_sure = len(thinking) if is_last else len(_without_partial(thinking, CLOSE).rstrip("\n"))
        self._held = thinking[num_sure:]
        return thinking[:num_sure]

    def _take_answer(self) -> str:
        if self.state is not State.ANSWER:
            return ""
        answer, self._held = self._held, ""
        return answer

    def _skip_gap(self, is_last: bool) -> None:
        text = self._held.lstrip("\n").removeprefix(CLOSE).lstrip("\n")
        if is_last or not CLOSE.startswith(text):
            self.state, self._held = State.ANSWER, text


def _without_partial(text: str, mark: str) -> str:
    """`text` less its longest end that could begin `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return text[:-length]
    return text
