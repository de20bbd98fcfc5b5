"""Thinking and answer, told apart by the `<think>` and `</think>` marks in the text (`qwen3`).

Where the text starts is read from the end of the rendered prompt, never from flags: templates may open the block, open
and close it, or leave it to the model.

| prompt ends in     | the output is                                                           |
| ------------------ | ----------------------------------------------------------------------- |
| `<think>`          | thinking until `</think>`; a repeated `<think>` at its start is dropped |
| `</think>`         | answer, whatever it holds                                               |
| anything else      | answer, unless it begins with `<think>`                                 |

Newlines around the marks belong to neither side, and so does a second `</think>` right after the first. A tool call
ends the thinking too, as some models forget `</think>` before it: but only one of a tool that the request has, so that
a thought about calls stays a thought. Text that may yet become a mark is held back, so the joined pieces do not depend
on how the text was cut.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection
from typing import NamedTuple

from deltaserve.server.parsers.marks import (
    CALL,
    FUNCTION,
    THINK,
    THINK_END,
    read_header,
    skip_blank,
    starts_with_part,
)

_JSON_NAME = re.compile(r"\{\s*[\"']name[\"']\s*:\s*[\"']([^\"'\\\n]*)[\"']")
MAX_JSON_NAME = 300  # characters within which the name of a JSON call must show


class State(enum.Enum):
    OPENED = enum.auto()  # the prompt opened the block; nothing seen yet
    UNDECIDED = enum.auto()  # the model may open the block
    THINKING = enum.auto()
    CLOSED = enum.auto()  # the block was closed; nothing of the answer seen yet
    ANSWER = enum.auto()


class Split(NamedTuple):
    reasoning: str
    content: str


class _Ending(NamedTuple):
    """`size` characters are surely thinking. `state` None: it goes on, else a mark of `mark_size` ends it there."""

    size: int
    state: State | None = None
    mark_size: int = 0


def start_state(prompt: str) -> State:
    """From the rendered prompt."""
    if re.search(rf"{THINK}\s*\Z", prompt):
        return State.OPENED
    if re.search(rf"{THINK_END}\s*\Z", prompt):
        return State.ANSWER
    return State.UNDECIDED


def continued_state(message: str) -> State:
    """For a prompt that ends inside the assistant's own `message`."""
    return State.THINKING if message.rfind(THINK) > message.rfind(THINK_END) else State.ANSWER


class ReasoningSplitter:
    """Feed text as it comes; `is_last` gives out what was held back. `names` are those of the request's tools.

    The thinking so far is [start, end) of all text that was fed, marks outside.
    """

    def __init__(self, state: State, names: Collection[str] = ()) -> None:
        self.state = state
        self.start = self.end = 0
        self.was_interrupted = False  # a call came before `</think>`
        self._names = names
        self._held = ""
        self._num_gone = 0  # characters before `_held`

    @property
    def has_answer(self) -> bool:
        """False while all text so far was thinking: the answer is then absent, not empty."""
        return self.state in (State.CLOSED, State.ANSWER, State.UNDECIDED)

    @property
    def is_thinking(self) -> bool:
        """False once the thinking is over, or known not to come."""
        return self.state in (State.OPENED, State.UNDECIDED, State.THINKING)

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
        after_mark = text.removeprefix(THINK).lstrip("\n")
        if text.startswith(THINK) and (after_mark or is_last):
            self.state = State.THINKING
            self._drop(len(self._held) - len(after_mark))
            self.start = self.end = self._num_gone
        elif is_last or not THINK.startswith(text.rstrip("\n")):
            opened = self.state is State.OPENED
            self.state = State.THINKING if opened else State.ANSWER

    def _take_thinking(self, is_last: bool) -> str:
        ending = self._find_ending(is_last)
        thinking = self._held[: ending.size]
        if ending.state is None:
            thinking = thinking if is_last else thinking.rstrip("\n")
            self._drop(len(thinking))
            self.end = self._num_gone
            return thinking
        self.state, self.end = ending.state, self._num_gone + ending.size
        self._drop(ending.size + ending.mark_size)
        return thinking.rstrip("\n")

    def _find_ending(self, is_last: bool) -> _Ending:
        text = self._held
        position = text.find("<")
        while position >= 0:
            if text.startswith(THINK_END, position):
                return _Ending(position, State.CLOSED, len(THINK_END))
            opens = self._opens_call(text, position)
            if opens:
                self.was_interrupted = True
                return _Ending(position, State.ANSWER)
            if opens is None and not is_last:
                return _Ending(position)
            position = text.find("<", position + 1)
        return _Ending(len(text))

    def _opens_call(self, text: str, position: int) -> bool | None:
        """Whether a call of a known tool begins here; None if that, or whether `</think>` does, shows only later."""
        if not text.startswith(CALL, position):
            return None if starts_with_part(text, position, (THINK_END, CALL)) else False
        if not self._names:
            return False
        start = skip_blank(text, position + len(CALL))
        if start == len(text) or starts_with_part(text, start, (FUNCTION,)):
            return None
        if text.startswith("{", start):
            found = _JSON_NAME.match(text, start, start + MAX_JSON_NAME)
            return found[1] in self._names if found else None if len(text) - start < MAX_JSON_NAME else False
        header = read_header(text, start, FUNCTION) if text.startswith(FUNCTION, start) else None
        return None if header is not None and not header.size else header is not None and header.name in self._names

    def _take_answer(self) -> str:
        if self.state is not State.ANSWER:
            return ""
        answer = self._held
        self._drop(len(answer))
        return answer

    def _skip_gap(self, is_last: bool) -> None:
        text = self._held.lstrip("\n").removeprefix(THINK_END).lstrip("\n")
        if is_last or not THINK_END.startswith(text):
            self.state = State.ANSWER
            self._drop(len(self._held) - len(text))

    def _drop(self, size: int) -> None:
        self._held = self._held[size:]
        self._num_gone += size
