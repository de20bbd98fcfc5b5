"""What the readers find, in the order of the text, as parts that a client can be sent one by one.

White space between text and calls belongs to the layout: it is kept only where more text follows, so that a message
of calls alone has no text, and the text before a call ends in no blank lines. A message without calls keeps all of it.
"""

from __future__ import annotations

import enum
import uuid
from collections.abc import Callable
from typing import NamedTuple


class Kind(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()  # `text` is the function's name
    ARGUMENTS = enum.auto()  # `text` is more of the JSON object of the latest call


class End(enum.Enum):
    """How far the text goes that a reader is given."""

    OPEN = enum.auto()  # more will come
    ENDED = enum.auto()  # the model ended it
    CUT = enum.auto()  # a limit, a stop string or an abort ended it: a call may lack its rest


class Part(NamedTuple):
    """`call` numbers the calls of a message from 0; `call_id` is the client's handle."""

    kind: Kind
    text: str
    call: int = -1
    call_id: str = ""


def random_id(_: int) -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class Sink:
    """`make_id` gives the id of the k-th call."""

    def __init__(self, make_id: Callable[[int], str] = random_id) -> None:
        self.num_calls = 0
        self._make_id = make_id
        self._parts: list[Part] = []
        self._gap = ""  # white space after everything said
        self._has_text = False

    def say(self, text: str) -> None:
        text = self._gap + text
        said = text.rstrip()
        self._gap = text[len(said) :]
        if said and self.num_calls and not self._has_text:
            said = said.lstrip()
        if said:
            self._has_text = True
            self._parts.append(Part(Kind.CONTENT, said))

    def start_call(self, name: str) -> None:
        self._parts.append(Part(Kind.CALL, name, self.num_calls, self._make_id(self.num_calls)))
        self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        if text:
            self._parts.append(Part(Kind.ARGUMENTS, text, self.num_calls - 1))

    def finish(self) -> None:
        if self._gap and not self.num_calls:
            self._parts.append(Part(Kind.CONTENT, self._gap))
            self._gap = ""

    def take(self) -> list[Part]:
        """Everything since the last time; neighbours of one kind are one part."""
        taken: list[Part] = []
        for part in self._parts:
            if taken and taken[-1].kind is part.kind and part.kind in (Kind.CONTENT, Kind.ARGUMENTS):
                taken[-1] = part._replace(text=taken[-1].text + part.text)
            else:
                taken.append(part)
        self._parts.clear()
        return taken
