"""One JSON value, read leniently and written strictly, a piece at a time.

Every piece of output is a valid continuation: at any moment what was written is the beginning of a JSON text. What
models get wrong, and is put right on the way: raw line breaks and other control characters in strings, escapes that
JSON does not have (`\\d`, `\\'`), single quotes, True / False / None, commas before a closing bracket, a `]` left out
before `}`. Anything else breaks off the reading at the character that does not fit.
"""

from __future__ import annotations

import enum
import json
import re

WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
CLOSERS = {"{": "}", "[": "]"}

_WORD = re.compile(r"[^\s,:\[\]{}\"'<]+")
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^'\"\\\x00-\x1f]+")}
_BLANKS = " \t\r\n"
_ESCAPES = '"\\/bfnrt'
_UNICODE_SIZE = len("\\u0000")


class _Next(enum.Enum):
    """What may come next."""

    VALUE = enum.auto()  # or the end of an array
    KEY = enum.auto()  # or the end of an object
    COLON = enum.auto()
    COMMA = enum.auto()  # or the end of what is open
    STRING = enum.auto()
    ESCAPE = enum.auto()
    WORD = enum.auto()


class JsonText:
    """Feed it until `is_complete` or `is_broken`."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_broken = False
        self.pending = ""  # read, not written yet: a comma with blanks, an escape, a word
        self._next = _Next.VALUE
        self._owed: list[str] = []  # closing brackets
        self._quote = ""
        self._is_key = False
        self._out: list[str] = []
        self._steps = {
            _Next.VALUE: self._value,
            _Next.KEY: self._key,
            _Next.COLON: self._colon,
            _Next.COMMA: self._comma,
            _Next.STRING: self._string,
            _Next.ESCAPE: self._escape,
            _Next.WORD: self._word,
        }

    def feed(self, text: str, position: int = 0) -> tuple[str, int]:
        """Strict JSON, and the position up to which `text` was read."""
        while position < len(text) and not (self.is_complete or self.is_broken):
            position = self._steps[self._next](text, position)
        written = "".join(self._out)
        self._out.clear()
        return written, position

    def close(self) -> str | None:
        """What is missing for a complete value; None if that cannot be known."""
        if self._next is _Next.WORD:
            self._end_word()
        if self.is_complete or self._next is not _Next.COMMA:
            return "" if self.is_complete else None
        closing = "".join([*self._out, *reversed(self._owed)])
        self._out.clear()
        self._owed.clear()
        self.is_complete = True
        return closing

    def _value(self, text: str, position: int) -> int:
        character = text[position]
        if character in _BLANKS:
            return self._blank(character, position)
        if character in CLOSERS:
            self._write(character)
            self._owed.append(CLOSERS[character])
            self._next = _Next.KEY if character == "{" else _Next.VALUE
        elif character in _PLAIN:
            self._open_string(character, is_key=False)
        elif character == "]" and self._owed and self._owed[-1] == "]":
            self._close(character)
        else:
            self._write("")
            self._next = _Next.WORD
            return position
        return position + 1

    def _key(self, text: str, position: int) -> int:
        character = text[position]
        if character in _BLANKS:
            return self._blank(character, position)
        if character in _PLAIN:
            self._open_string(character, is_key=True)
        elif character == "}":
            self._close(character)
        else:
            return self._break(position)
        return position + 1

    def _colon(self, text: str, position: int) -> int:
        character = text[position]
        if character not in _BLANKS and character != ":":
            return self._break(position)
        self._write(character)
        if character == ":":
            self._next = _Next.VALUE
        return position + 1

    def _comma(self, text: str, position: int) -> int:
        character = text[position]
        if character in _BLANKS:
            self._write(character)
        elif character == ",":
            self.pending = ","
            self._next = _Next.KEY if self._owed[-1] == "}" else _Next.VALUE
        elif character in self._owed:
            while self._owed[-1] != character:
                self._write(self._owed.pop())
            self._close(character)
        else:
            return self._break(position)
        return position + 1

    def _string(self, text: str, position: int) -> int:
        plain = _PLAIN[self._quote].match(text, position)
        if plain is not None:
            self._write(plain[0])
            return plain.end()
        character = text[position]
        if character == self._quote:
            self._write('"')
            self._end_value(_Next.COLON if self._is_key else _Next.COMMA)
        elif character == "\\":
            self.pending, self._next = "\\", _Next.ESCAPE
        else:
            self._write(json.dumps(character)[1:-1])
        return position + 1

    def _escape(self, text: str, position: int) -> int:
        character = text[position]
        if len(self.pending) > 1:
            return self._unicode(character, position)
        if character == "u":
            self.pending = "\\u"
            return position + 1
        known = {**dict.fromkeys(_ESCAPES, "\\" + character), "'": "'"}.get(character)
        self._end_escape("\\\\" if known is None else known)
        return position + (known is not None)

    def _unicode(self, character: str, position: int) -> int:
        if character not in "0123456789abcdefABCDEF":
            self._end_escape("\\" + self.pending)
            return position
        self.pending += character
        if len(self.pending) == _UNICODE_SIZE:
            self._end_escape(self.pending)
        return position + 1

    def _end_escape(self, written: str) -> None:
        self.pending, self._next = "", _Next.STRING
        self._write(written)

    def _word(self, text: str, position: int) -> int:
        found = _WORD.match(text, position)
        if found is not None:
            self.pending += found[0]
            return found.end()
        self._end_word()
        return position

    def _end_word(self) -> None:
        written = WORDS.get(self.pending) or (self.pending if NUMBER.fullmatch(self.pending) else "")
        if not written:
            self.is_broken = True
            return
        self.pending = ""
        self._write(written)
        self._end_value(_Next.COMMA)

    def _open_string(self, quote: str, *, is_key: bool) -> None:
        self._write('"')
        self._quote, self._is_key, self._next = quote, is_key, _Next.STRING

    def _close(self, character: str) -> None:
        """A comma that waits is one too many."""
        self.pending = self.pending.removeprefix(",")
        self._write(character)
        self._owed.pop()
        self._end_value(_Next.COMMA)

    def _end_value(self, then: _Next) -> None:
        self._next = then
        self.is_complete = not self._owed

    def _blank(self, character: str, position: int) -> int:
        if self.pending:
            self.pending += character
        else:
            self._write(character)
        return position + 1

    def _break(self, position: int) -> int:
        self.is_broken = True
        return position

    def _write(self, text: str) -> None:
        self._out.append(self.pending + text)
        self.pending = ""


def strict_container(text: str) -> str | None:
    """`text`, which must be one object or array and nothing else, as strict JSON; written twice over is fine too."""
    text = text.strip()
    reader = JsonText()
    written, position = reader.feed(text)
    if not reader.is_complete or text[position:].strip():
        return None
    if written[0] == '"':
        inner: str = json.loads(written)
        return strict_container(inner) if inner.lstrip()[:1] in CLOSERS else None
    return written if written[0] in CLOSERS else None
