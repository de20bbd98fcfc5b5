"""The grammar library, llguidance, behind two classes; nothing else imports it.

    text = json_schema_text(schema)              a grammar, as one string; also regex, choices, Lark or GBNF
    grammars = Grammars(load_vocabulary)         over one tokenizer
    matcher = grammars.matcher(text)             where one answer stands; GrammarError if the text is of no use

Compiled grammars are kept by their text, the latest `MAX_COMPILED` of them, those that failed too. What one costs is
limited by counting, not by the clock, so that a request is accepted or refused the same way every time: the size of
its text, the rules, symbols and regex states that the library may make of it, and the work of one mask. A grammar is
tried out for two tokens when it is compiled; one that explodes only later leaves no token to choose, which ends its
request and no other.

JSON may hold one space, or one line break and an indentation, between its parts: a model cannot idle there.
The library's table of a vocabulary of 248,000 tokens takes it a second, with the interpreter locked, and 120 MB. Call
`prepare` in a thread while nothing is served yet; else the first grammar pays.

Tokens that the tokenizer added to its byte-level vocabulary (`<think>`, `<|im_end|>`) never count as their text.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from deltaserve.grammar.limits import MAX_JOINED, grammar_joins_too_many, joins_too_many

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_TEXT_CHARS = 1 << 16
MAX_COMPILED = 64
BLANK = r" |\r?\n[ \t]{0,40}"  # between the parts of JSON
MAX_ERROR_CHARS = 300
_NEWLINES = (b"\n", b"\n\n")

Mask = npt.NDArray[np.bool_]


class GrammarError(ValueError):
    """A schema, regex or grammar that cannot be used. The text says why, without saying which field held it."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens` has the bytes of each id, none for an id without a token; `added_ids` are those that are no text.

    `eos_ids` end an answer. `encode` gives the ids of a text, without added ones.
    """

    tokens: Sequence[bytes]
    added_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]]


def json_schema_text(schema: Mapping[str, Any], *, has_blanks: bool = True, blank_pattern: str | None = None) -> str:
    """JSON that fits `schema`. `blank_pattern` is a regex for the white space between its parts."""
    options: JsonCompileOptions = {"lenient": False, "whitespace_flexible": has_blanks}
    if has_blanks:
        options["whitespace_pattern"] = blank_pattern or BLANK
    try:
        if joins_too_many(schema):
            raise GrammarError(f"more than {MAX_JOINED} patterns may meet in one value, or a multipleOf is too large")
        return _checked(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
    except GrammarError:
        raise
    except (ValueError, RecursionError) as error:
        raise GrammarError(_shortened(str(error))) from None


def regex_text(pattern: str) -> str:
    """The whole answer matches `pattern` (the syntax of Rust's regex: no look-around, no back references)."""
    return _checked(LLMatcher.grammar_from_regex(pattern))


def choice_text(choices: Sequence[str]) -> str:
    """One of the strings, to the letter."""
    return _checked(LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice) for choice in choices)))


def lark_text(grammar: str) -> str:
    """A context-free grammar in Lark's notation with a rule `start`, or in GBNF with a rule `root`."""
    _check_size(grammar)
    if grammar_joins_too_many(grammar):
        raise GrammarError(f"it has more than {MAX_JOINED} intersections (&)")
    if "%json" in grammar:
        raise GrammarError("%json is not taken inside a grammar; ask for the schema itself")
    try:
        return _checked(grammar_from("grammar", grammar))
    except (ValueError, RecursionError) as error:
        raise GrammarError(_shortened(str(error))) from None


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, eos_ids: frozenset[int], newline_ids: tuple[int, ...]
    ) -> None:
        self.eos_ids = eos_ids
        self.newline_ids = newline_ids  # tokens of nothing but line breaks
        self._matcher = matcher
        self._vocab_size = vocab_size

    def mask(self) -> Mask:
        """[vocabulary]: which tokens may be next. Ends of sequence are among them where the answer may end."""
        if self._matcher.is_error():
            return np.zeros(self._vocab_size, np.bool_)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            return np.zeros(self._vocab_size, np.bool_)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def accept(self, token_id: int) -> bool:
        """Go on by a token that is no end of sequence. False, and nothing changed, if the grammar has no such token."""
        return not self._matcher.is_error() and self._matcher.try_consume_tokens([token_id]) == 1

    def rollback(self, num_tokens: int) -> None:
        """Forget the latest tokens that were accepted."""
        if num_tokens and not self._matcher.is_error():
            self._matcher.rollback(num_tokens)


@dataclass(slots=True)
class Grammars:
    """Compiled grammars over one vocabulary, which is loaded when it is first needed. Threads may share it."""

    load: Callable[[], Vocabulary]
    _lock: Lock = field(default_factory=Lock)
    _tokenizer: LLTokenizer | None = None
    _newline_ids: tuple[int, ...] = ()
    _compiled: OrderedDict[str, LLMatcher | GrammarError] = field(default_factory=OrderedDict)

    def prepare(self) -> None:
        """Make the table now. A vocabulary that cannot have one is no error before somebody asks for a grammar."""
        with self._lock, suppress(GrammarError):
            self._table()

    def check(self, text: str) -> None:
        """Raises GrammarError if `text` is of no use. Compiles it, so that `matcher` is quick."""
        self._find(text)

    def matcher(self, text: str) -> Matcher:
        """A new matcher at the start of the grammar."""
        matcher = self._find(text).deep_copy()
        tokenizer = self._tokenizer
        assert tokenizer is not None
        return Matcher(matcher, tokenizer.vocab_size, frozenset(tokenizer.eos_tokens), self._newline_ids)

    def _find(self, text: str) -> LLMatcher:
        with self._lock:
            found = self._compiled.pop(text, None)
            if found is None:
                try:
                    found = self._compile(text)
                except GrammarError as error:
                    found = error
            self._compiled[text] = found
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        if isinstance(found, GrammarError):
            raise GrammarError(str(found))
        return found

    def _compile(self, text: str) -> LLMatcher:
        _check_size(text)
        matcher = LLMatcher(self._table(), text, log_level=0, limits=_limits())
        if not matcher.is_error():
            _try_out(matcher.deep_copy())
        if matcher.is_error():
            raise GrammarError(_shortened(matcher.get_error()))
        return matcher

    def _table(self) -> LLTokenizer:
        if self._tokenizer is not None:
            return self._tokenizer
        vocabulary = self.load()
        if not vocabulary.eos_ids:
            raise GrammarError("this checkpoint names no end-of-sequence token, so no answer could end")
        self._newline_ids = tuple(i for i, token in enumerate(vocabulary.tokens) if token in _NEWLINES)
        source = TokenizerWrapper(_Source(vocabulary))
        num_tokens = len(vocabulary.tokens)
        self._tokenizer = LLTokenizer(source, n_vocab=num_tokens, eos_token=list(vocabulary.eos_ids))
        return self._tokenizer


class _Source:
    """A vocabulary as the library asks for it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted(vocabulary.added_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return list(self._encode(text.decode() if isinstance(text, bytes) else text))


def _limits() -> LLParserLimits:
    """Below the library's own defaults: a mask is made while other requests wait."""
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _try_out(matcher: LLMatcher) -> None:
    """Two masks; raises GrammarError where the library gives up on them."""
    for _ in range(2):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        if matcher.is_error():
            raise GrammarError(f"it is too complex: {_shortened(matcher.get_error())}")
        allowed = np.flatnonzero(bits)
        if not len(allowed):
            raise GrammarError("it allows no token at all")
        matcher.try_consume_tokens([int(allowed[0])])


def _checked(text: str) -> str:
    _check_size(text)
    return text


def _check_size(text: str) -> None:
    if len(text) > MAX_TEXT_CHARS:
        raise GrammarError(f"it takes {len(text)} characters; at most {MAX_TEXT_CHARS} are compiled")


def _shortened(error: str) -> str:
    """The first line of the library's sentence, where the rest is a picture of the place."""
    lines = [line.strip() for line in error.splitlines() if line.strip() and line.strip() != "<non-verbose/>"]
    return " ".join(lines)[:MAX_ERROR_CHARS] if lines else "it cannot be compiled"
