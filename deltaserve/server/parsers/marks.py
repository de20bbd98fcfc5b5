"""The marks that the family writes around thinking and calls, and what every reader needs to look for them.

Each mark begins with `<` and holds no other `<`. So only the last `<` of a text can begin a mark that is not all there.
"""

from __future__ import annotations

import re
from typing import NamedTuple

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
LONGEST = len(PARAMETER_END)

_BLANK = re.compile(r"\s*")
_NAME = re.compile(r"([^<>\n]{1,256})(>|\n)")
_UNFINISHED_NAME = re.compile(r"[^<>\n]{0,256}\Z")


class Header(NamedTuple):
    """`<function=NAME>` or `<parameter=NAME>`; some models forget the `>` and break the line instead.

    `size` counts its characters, mark and end included; 0: it is not all there yet.
    """

    name: str
    size: int
    ends_line: bool = False


NOT_YET = Header("", 0)


def read_header(text: str, position: int, mark: str) -> Header | None:
    """What `mark` at `position` opens; None if that is no name, NOT_YET if `text` ends too early to tell."""
    start = position + len(mark)
    found = _NAME.match(text, start)
    if found is None:
        return NOT_YET if _UNFINISHED_NAME.match(text, start) else None
    name = found[1].strip().strip("\"'")
    return Header(name, found.end() - position, found[2] == "\n") if name else None


def skip_blank(text: str, position: int) -> int:
    """The next position that holds no white space."""
    found = _BLANK.match(text, position)
    assert found is not None
    return found.end()


def starts_with_part(text: str, position: int, marks: tuple[str, ...]) -> bool:
    """Whether all of `text` from `position` on is a beginning, but not the whole, of one of `marks`."""
    if len(text) - position >= LONGEST:
        return False
    rest = text[position:]
    return any(len(rest) < len(mark) and mark.startswith(rest) for mark in marks)


def overlap(text: str, marks: tuple[str, ...]) -> int:
    """Length of the end of `text` that may become one of `marks`."""
    position = text.rfind("<")
    return len(text) - position if position >= 0 and starts_with_part(text, position, marks) else 0
