"""One call in the XML format (`qwen3_coder`), from behind `<function=NAME>` to behind `</function>`.

    <parameter=KEY>
    value
    </parameter>

One newline after `>` and one before the closing mark are layout; everything between is the value. Values of string
parameters go out as they come; those of other types wait for their end, because only then is it known what they are.

Values may hold any text, these very marks included, so a mark counts only where the format can go on after it:

| mark in a value     | it ends the value if                                                                       |
| ------------------- | ------------------------------------------------------------------------------------------ |
| `</parameter>`      | the next parameter, the end of the call or another call follows, or nothing                |
| `</function>`       | `</tool_call>` or another call follows, or nothing (`</parameter>` was forgotten)          |
| `</tool_call>`      | another call follows, or nothing (both were forgotten)                                     |
| `<parameter=KEY>`   | it begins a line and KEY is a parameter of the tool that was not given yet                 |

Text between parameters is no argument: it is given out as text. A JSON object in place of parameters is taken as the
arguments. A call that the model ends early is closed; one that was cut off stays open, so that nobody mistakes it for
a whole one.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from deltaserve.server.parsers.json_text import JsonText
from deltaserve.server.parsers.marks import (
    CALL,
    CALL_END,
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
    Header,
    read_header,
    skip_blank,
    starts_with_part,
)
from deltaserve.server.parsers.sink import End, Sink
from deltaserve.server.parsers.tools import Tool, convert

MARKS = (PARAMETER, FUNCTION_END, CALL_END, CALL, FUNCTION)  # between parameters
VALUE_MARKS = (PARAMETER_END, FUNCTION_END, CALL_END, PARAMETER)
# What must follow a closing mark in a value, white space aside, if not the end of the text.
FOLLOWERS = {
    PARAMETER_END: (PARAMETER, FUNCTION_END, CALL_END, CALL, FUNCTION),
    FUNCTION_END: (CALL_END, CALL, FUNCTION),
    CALL_END: (CALL, FUNCTION),
}


class XmlCall:
    """Reads the body of a call to `tool` into `sink`."""

    def __init__(self, tool: Tool, sink: Sink) -> None:
        self.is_open = True
        self._tool = tool
        self._sink = sink
        self._keys: list[str] = []
        self._value: XmlValue | None = None
        self._json: JsonText | None = None  # arguments that are one object
        self._is_stray = False  # in text that is no part of the format
        self._may_be_json = True
        sink.start_call(tool.name)

    def read(self, text: str, end: End) -> int:
        """Take what is certain; the number of characters taken. With an `end`, all of it."""
        position = 0
        while self.is_open and (size := self._step(text, position, end)):
            position += size
        if self.is_open and end is not End.OPEN:
            self._finish(text[position:], end)
            position = len(text)
        return position

    def _step(self, text: str, position: int, end: End) -> int:
        if self._value is not None:
            return self._read_value(text, position, end)
        if self._json is not None and not (self._json.is_complete or self._json.is_broken):
            return self._read_json(text, position)
        stray_size = self._say(text, position) if self._is_stray else 0
        return stray_size or self._read_between(text, position)

    def _read_value(self, text: str, position: int, end: End) -> int:
        assert self._value is not None
        size = self._value.read(text, position, end)
        if self._value.is_open:
            return size
        self._value = None
        return size or self._read_between(text, position)

    def _read_json(self, text: str, position: int) -> int:
        assert self._json is not None
        written, after = self._json.feed(text, position)
        self._sink.add_arguments(written)
        if self._json.is_broken:
            closing = self._json.close() if text[after] == "<" else None
            self._sink.add_arguments(closing or "")
            self._sink.say("" if closing is not None else self._json.pending)
        # Nothing read, but something learnt: the object broke off here.
        return after - position or self._read_between(text, position)

    def _read_between(self, text: str, position: int) -> int:
        if blank := skip_blank(text, position) - position:
            return blank
        if position == len(text) or starts_with_part(text, position, MARKS):
            return 0
        if text.startswith(PARAMETER, position):
            return self._read_key(text, position)
        if text.startswith(FUNCTION_END, position):
            self._close()
            return len(FUNCTION_END)
        if text.startswith((CALL_END, CALL, FUNCTION), position):
            self._close()
            return 0
        if text[position] == "{" and self._may_be_json:
            self._may_be_json = False
            self._json = JsonText()
            return self._read_json(text, position)
        return self._say(text, position)

    def _read_key(self, text: str, position: int) -> int:
        header = read_header(text, position, PARAMETER)
        if header is None:
            return self._say(text, position)
        if header.size:
            self._begin_value(header)
        return header.size

    def _begin_value(self, header: Header) -> None:
        self._sink.add_arguments(("{" if not self._keys else ", ") + json.dumps(header.name, ensure_ascii=False) + ": ")
        self._keys.append(header.name)
        self._may_be_json = False
        self._value = XmlValue(header, self._tool, self._keys, self._sink)

    def _say(self, text: str, position: int) -> int:
        """Text up to the next mark."""
        after = text.find("<", position + (not self._is_stray))
        self._is_stray, self._may_be_json = after < 0, False
        if after < 0:
            after = len(text)
        self._sink.say(text[position:after])
        return after - position

    def _close(self) -> None:
        self.is_open = False
        if self._json is None:
            self._sink.add_arguments("}" if self._keys else "{}")

    def _finish(self, rest: str, end: End) -> None:
        if self._value is not None:
            self._value.finish(rest, end)
        elif rest.startswith(PARAMETER):
            self._finish_key(rest, end)
        if self._json is not None and not self._json.is_broken and end is End.ENDED:
            self._sink.add_arguments(self._json.close() or "")
        if end is End.ENDED:
            self._close()
        self.is_open = False

    def _finish_key(self, rest: str, end: End) -> None:
        """`<parameter=KE`: where it was cut, the beginning of a key."""
        if end is End.ENDED or self._json is not None:
            self._sink.say(rest)
        else:
            key = json.dumps(rest.removeprefix(PARAMETER), ensure_ascii=False)[:-1]
            self._sink.add_arguments(("{" if not self._keys else ", ") + key)


class _Found(NamedTuple):
    """`[0, position)` is surely value. `size`: of the mark that ends it there; None: that is not known yet."""

    position: int
    size: int | None = None


class XmlValue:
    """Reads one value; `keys` are the parameters so far, this one last."""

    def __init__(self, header: Header, tool: Tool, keys: list[str], sink: Sink) -> None:
        self.is_open = True
        self._tool = tool
        self._keys = keys
        self._sink = sink
        self._types = tool.types(header.name)
        self._is_string = self._types <= {"string"}
        self._held: list[str] = []  # of a value that is not a string
        self._is_new = True
        self._skips_newline = not header.ends_line
        if self._is_string:
            sink.add_arguments('"')

    def read(self, text: str, position: int, end: End) -> int:
        start = position
        if self._skips_newline:
            if start == len(text):
                return 0
            self._skips_newline = False
            start += text[start] == "\n"
        found = self._find_end(text, start, end)
        value = text[start : found.position].removesuffix("\n")
        self._add(value)
        if found.size is None:
            return start + len(value) - position
        self._close()
        return found.position + found.size - position

    def finish(self, rest: str, end: End) -> None:
        """The text is over, and no mark ended the value."""
        if end is End.ENDED:
            self._add(rest.removesuffix("\n"))
            self._close()
            return
        self._add(rest)
        if not self._is_string:
            self._sink.add_arguments('"' + _escaped("".join(self._held)))

    def _add(self, text: str) -> None:
        if text:
            self._is_new = False
            if self._is_string:
                self._sink.add_arguments(_escaped(text))
            else:
                self._held.append(text)

    def _close(self) -> None:
        self.is_open = False
        self._sink.add_arguments('"' if self._is_string else convert("".join(self._held), self._types))

    def _find_end(self, text: str, start: int, end: End) -> _Found:
        position = text.find("<", start)
        while position >= 0:
            is_line = self._is_new if position == start else text[position - 1] == "\n"
            size = self._end_at(text, position, end, is_line)
            if size is None or size >= 0:
                return _Found(position, size)
            position = text.find("<", position + 1)
        return _Found(len(text))

    def _end_at(self, text: str, position: int, end: End, is_line: bool) -> int | None:
        """The size of the mark if the value ends here, -1 if it does not, None if that shows only later."""
        for mark, followers in FOLLOWERS.items():
            if text.startswith(mark, position):
                follows = _follows(text, position + len(mark), followers, end)
                taken = len(mark) if mark == PARAMETER_END else 0
                return None if follows is None else taken if follows else -1
        if text.startswith(PARAMETER, position) and is_line:
            return self._next_key_at(text, position, end)
        return None if end is End.OPEN and starts_with_part(text, position, VALUE_MARKS) else -1

    def _next_key_at(self, text: str, position: int, end: End) -> int | None:
        header = read_header(text, position, PARAMETER)
        if header is not None and not header.size:
            return None if end is End.OPEN else -1
        return 0 if header is not None and self._tool.may_follow(header.name, self._keys) else -1


def _follows(text: str, position: int, marks: tuple[str, ...], end: End) -> bool | None:
    position = skip_blank(text, position)
    if position == len(text) or starts_with_part(text, position, marks):
        return None if end is End.OPEN else True
    return text.startswith(marks, position)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
