"""One call in the JSON format (`hermes`), from its `{` to its `}`: {"name": ..., "arguments": {...}}.

The arguments go out as they come, once the name is known; if they come first they wait for it. Marks inside strings
are text, as the JSON itself says where it ends. `parameters` is taken for `arguments`, and so is an object that was
written as a string. Without a name, or with arguments that are no object, this is no call: `is_failed`, nothing was
given out, and the text stays text. Where the arguments break off inside, they stay open and the rest is text.
"""

from __future__ import annotations

import enum
import json

from deltaserve.server.parsers.json_text import JsonText, strict_container
from deltaserve.server.parsers.marks import skip_blank
from deltaserve.server.parsers.sink import End, Sink

ARGUMENTS = ("arguments", "parameters")


class _At(enum.Enum):
    OPENING = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()


class JsonCall:
    """Reads one call into `sink`."""

    def __init__(self, sink: Sink) -> None:
        self.is_open = True
        self.is_started = False  # something was given out
        self.is_failed = False
        self._sink = sink
        self._at = _At.OPENING
        self._key = ""
        self._name = ""
        self._arguments = ""  # that wait for the name
        self._reader: JsonText | None = None  # of a key or a value
        self._read: list[str] = []
        self._streams = False

    def read(self, text: str, end: End) -> int:
        """Take what is certain; the number of characters taken. With an `end`, all of it, or what the call has."""
        position = 0
        while self.is_open and position < len(text):
            position = self._step(text, position)
        if self.is_open and end is not End.OPEN:
            self._finish(end)
        return position

    def _step(self, text: str, position: int) -> int:
        if self._reader is not None:
            return self._read_json(text, position)
        position = skip_blank(text, position)
        return position if position == len(text) else self._read_mark(text[position], position)

    def _read_mark(self, character: str, position: int) -> int:
        if self._at is _At.OPENING and character == "{":
            self._at = _At.KEY
        elif self._at is _At.COLON and character == ":":
            self._at = _At.VALUE
        elif self._at is _At.COMMA and character == ",":
            self._at = _At.KEY
        elif self._at in (_At.KEY, _At.COMMA) and character == "}":
            self._close()
        elif self._at is _At.VALUE or (self._at is _At.KEY and character in "\"'"):
            self._begin(character)
            return position
        else:
            self._break(character)
            return position
        return position + 1

    def _begin(self, character: str) -> None:
        self._reader = JsonText()
        self._streams = self._is_argument and bool(self._name) and character == "{"
        if self._streams:
            self._start()

    @property
    def _is_argument(self) -> bool:
        return self._at is _At.VALUE and self._key in ARGUMENTS and not self.is_started and not self._arguments

    def _read_json(self, text: str, position: int) -> int:
        assert self._reader is not None
        written, position = self._reader.feed(text, position)
        if self._streams:
            self._sink.add_arguments(written)
        else:
            self._read.append(written)
        if self._reader.is_complete:
            self._end_json()
        elif self._reader.is_broken:
            self._break(text[position])
        return position

    def _end_json(self) -> None:
        written = "".join(self._read)
        self._read.clear()
        self._reader = None
        if self._at is _At.KEY:
            self._key, self._at = json.loads(written), _At.COLON
            return
        self._keep(written)
        self._at = _At.COMMA
        self._streams = False

    def _keep(self, written: str) -> None:
        """A value that did not go out as it came."""
        if self._streams:
            return
        if self._key == "name" and not self._name:
            self._name = json.loads(written) if written.startswith('"') else ""
            self._check(bool(self._name))
        elif self._is_argument:
            found = "{}" if written == "null" else strict_container(written) or ""
            self._arguments = found if found.startswith("{") else ""
            self._check(bool(self._arguments))
        if self._name and self._arguments and not self.is_started:
            self._start()
            self._sink.add_arguments(self._arguments)

    def _check(self, is_right: bool) -> None:
        if not is_right:
            self.is_open, self.is_failed = False, True

    def _start(self) -> None:
        self.is_started = True
        self._sink.start_call(self._name)

    def _close(self) -> None:
        self.is_open = False
        if self._name and not self.is_started:
            self._start()
            self._sink.add_arguments("{}")
        self.is_failed = not self.is_started

    def _break(self, character: str) -> None:
        """What comes next fits nowhere. Before a mark only brackets are missing; anything else spoils the call."""
        is_mark = character == "<"
        if self._streams and self._reader is not None:
            closing = self._reader.close() if is_mark else None
            self._sink.add_arguments(closing or "")
            self._sink.say("" if closing is not None else self._reader.pending)
        elif is_mark and self._at is _At.COMMA:
            self._close()
        else:
            self._check(self.is_started)
        self.is_open = False

    def _finish(self, end: End) -> None:
        """The text is over."""
        if self.is_started:
            if self._streams and self._reader is not None and end is End.ENDED:
                self._sink.add_arguments(self._reader.close() or "")
            self.is_open = False
        elif end is End.ENDED and self._at is _At.COMMA:
            self._close()
        else:
            self._check(is_right=False)
