"""Finding tool calls in an answer, and giving out the text around them.

| in the answer                                | is                                                                  |
| -------------------------------------------- | ------------------------------------------------------------------- |
| `<tool_call>`, then `<function=NAME>` or `{` | a call, in either format, whichever of them the model was taught    |
| `<function=NAME>` alone                      | a call, where the format is XML and the request has such a tool     |
| any other `<tool_call>`                      | text                                                                |
| `</tool_call>` right after a call, or more   | the end of it                                                       |
| a JSON call that has no name or no object    | text, from `<tool_call>` on                                         |

Any name makes a call: a client can answer one that it does not know, which is better than an answer full of marks.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from deltaserve.server.parsers.json_call import JsonCall
from deltaserve.server.parsers.marks import (
    CALL,
    CALL_END,
    FUNCTION,
    FUNCTION_END,
    THINK_END,
    Header,
    overlap,
    read_header,
    skip_blank,
    starts_with_part,
)
from deltaserve.server.parsers.sink import End, Part, Sink
from deltaserve.server.parsers.tools import Tool
from deltaserve.server.parsers.xml_call import XmlCall


class _In(enum.Enum):
    TEXT = enum.auto()
    XML = enum.auto()
    JSON = enum.auto()
    AFTER = enum.auto()  # behind a call, before anything else
    NOTHING = enum.auto()  # nothing more is wanted


class CallSplitter:
    """Feed it the answer. `reads_bare`: calls may lack `<tool_call>`. `is_single`: what follows the first call is
    dropped, and `is_done` says that it is over."""

    def __init__(self, tools: Mapping[str, Tool], sink: Sink, *, reads_bare: bool, is_single: bool = False) -> None:
        self.absorbs_think_end = False  # a call came first: the mark, if it comes, is late
        self._tools = tools
        self._sink = sink
        self._marks = (CALL, FUNCTION) if reads_bare else (CALL,)
        self._is_single = is_single
        self._in = _In.TEXT
        self._call: XmlCall | JsonCall | None = None
        self._held = ""
        self._raw: list[str] = []  # of a JSON call that may turn out to be none
        self._is_wrapped = False  # a `<tool_call>` is open
        self._was_json = False
        self._steps = {
            _In.TEXT: self._read_text,
            _In.XML: self._read_xml,
            _In.JSON: self._read_json,
            _In.AFTER: self._read_after,
            _In.NOTHING: self._drop_rest,
        }

    @property
    def is_done(self) -> bool:
        return self._in is _In.NOTHING

    def feed(self, text: str, end: End = End.OPEN) -> list[Part]:
        self._held += text
        while self._steps[self._in](end):
            pass
        if end is not End.OPEN:
            self._sink.finish()
        return self._sink.take()

    def _read_text(self, end: End) -> bool:
        found = [position for mark in self._marks if (position := self._held.find(mark)) >= 0]
        if not found:
            self._say(len(self._held) - (overlap(self._held, self._marks) if end is End.OPEN else 0))
            return False
        self._say(min(found))
        if self._held.startswith(CALL):
            return self._open_wrapped(end)
        return self._open_function(0, FUNCTION, end, is_known=True)

    def _open_wrapped(self, end: End) -> bool:
        start = skip_blank(self._held, len(CALL))
        if start == len(self._held) or starts_with_part(self._held, start, (FUNCTION,)):
            return self._wait(CALL, end)
        if self._held.startswith(FUNCTION, start):
            return self._open_function(start, CALL, end, is_known=False)
        if self._held[start] == "{":
            self._begin_json(start)
        else:
            self._say(len(CALL))
        return True

    def _open_function(self, start: int, mark: str, end: End, is_known: bool) -> bool:
        """`mark` is what becomes text if this is no call. `is_known`: only a tool of the request will do."""
        header = read_header(self._held, start, FUNCTION)
        if header is not None and not header.size:
            return self._wait(mark, end)
        if header is None or (is_known and header.name not in self._tools):
            self._say(len(mark))
        else:
            self._begin_xml(header, start, is_wrapped=mark == CALL)
        return True

    def _wait(self, mark: str, end: End) -> bool:
        if end is End.OPEN:
            return False
        self._say(len(mark))
        return True

    def _begin_xml(self, header: Header, start: int, is_wrapped: bool) -> None:
        self._drop(start + header.size)
        self._call = XmlCall(self._tools.get(header.name) or Tool(header.name), self._sink)
        self._in, self._is_wrapped, self._was_json = _In.XML, is_wrapped, False

    def _begin_json(self, start: int) -> None:
        self._raw = [self._drop(start)]
        self._call = JsonCall(self._sink)
        self._in, self._is_wrapped, self._was_json = _In.JSON, True, True

    def _read_xml(self, end: End) -> bool:
        assert isinstance(self._call, XmlCall)
        self._drop(self._call.read(self._held, end))
        if self._call.is_open:
            return False
        self._in = _In.AFTER
        return True

    def _read_json(self, end: End) -> bool:
        assert isinstance(self._call, JsonCall)
        read = self._drop(self._call.read(self._held, end))
        if not self._call.is_started:
            self._raw.append(read)
        if self._call.is_open:
            return False
        self._in = _In.AFTER
        if self._call.is_failed:
            self._held = "".join(self._raw) + self._held
            self._in = _In.TEXT
            self._say(len(CALL) if self._held.startswith(CALL) else 1)
        return True

    def _read_after(self, end: End) -> bool:
        start = skip_blank(self._held, 0)
        if start == len(self._held) or starts_with_part(self._held, start, self._closing_marks()):
            return self._end_after(end)
        if self._skip_closing(start):
            return True
        if self._is_single:
            self._in = _In.NOTHING
        elif self._is_wrapped and self._held.startswith(FUNCTION, start):
            return self._open_next(start, end)
        elif self._is_wrapped and self._was_json and self._held[start] == "{":
            self._begin_json(start)
        else:
            self._in = _In.TEXT
        return True

    def _end_after(self, end: End) -> bool:
        """Nothing but white space, or half a mark."""
        if end is End.CUT or not self._held.strip():
            self._drop(0 if end is End.OPEN else len(self._held))
        elif end is End.ENDED:
            self._in = _In.TEXT
            return True
        return False

    def _open_next(self, start: int, end: End) -> bool:
        """A second call within one `<tool_call>`."""
        header = read_header(self._held, start, FUNCTION)
        if header is not None and header.size:
            self._begin_xml(header, start, is_wrapped=True)
            return True
        if header is None or end is not End.OPEN:
            self._in = _In.TEXT
            self._say(start + len(FUNCTION))
            return True
        return False

    def _closing_marks(self) -> tuple[str, ...]:
        marks = (CALL_END, FUNCTION_END, FUNCTION) if self._is_wrapped else (CALL_END, FUNCTION_END)
        return (*marks, THINK_END) if self.absorbs_think_end else marks

    def _skip_closing(self, start: int) -> bool:
        """Drop what only closes; a bracket too many after a JSON call is no more than that."""
        if self._held.startswith(CALL_END, start):
            self._is_wrapped = False
            self._drop(start + len(CALL_END))
            if self._is_single:
                self._in = _In.NOTHING
            return True
        size = len(FUNCTION_END) if self._held.startswith(FUNCTION_END, start) else 0
        if self._is_wrapped and self._was_json and self._held[start] == "}":
            size = 1
        if self.absorbs_think_end and self._held.startswith(THINK_END, start):
            self.absorbs_think_end = False
            size = len(THINK_END)
        self._drop(start + size if size else 0)
        return size > 0

    def _drop_rest(self, end: End) -> bool:
        self._drop(len(self._held))
        return False

    def _say(self, size: int) -> None:
        self._sink.say(self._drop(size))

    def _drop(self, size: int) -> str:
        dropped, self._held = self._held[:size], self._held[size:]
        return dropped
