"""Rules that follow an answer token by token: bad words, the thinking budget, grammars.

Each keeps a history with one entry for each token, so that forgetting drafts is cutting its end, and a request that
was preempted gets back where it was by hearing its output again.

How a grammar meets thinking:

| phase     | the next token                                                                                    |
| --------- | ------------------------------------------------------------------------------------------------- |
| UNDECIDED | begins the thinking, or is the answer's first                                                     |
| THINKING  | anything but an end of sequence; its end mark leads to GAP, a tool call to CALLING                |
| GAP       | may be one token of line breaks, which belongs to neither side; else as START                     |
| START     | what the grammar allows, or a tool call, which leads to FREE                                      |
| INSIDE    | what the grammar allows; an end of sequence leads to FREE                                         |
| CALLING   | anything; an end mark of the thinking leads to GAP after all                                      |
| FREE      | anything                                                                                          |
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deltaserve.core.types import GrammarRule, Thinking
from deltaserve.grammar.compiler import Matcher

Values = npt.NDArray[np.float32]


class BadWords:
    """Sequences of tokens of which the last one does not come after the others."""

    def __init__(self, bad_words: Sequence[tuple[int, ...]]) -> None:
        self._single_ids = np.array([word[0] for word in bad_words if len(word) == 1], np.int64)
        self._by_last: dict[int, list[tuple[int, ...]]] = {}  # by the last token before the forbidden one
        for word in bad_words:
            if len(word) > 1:
                self._by_last.setdefault(word[-2], []).append(word)
        self._output_ids: list[int] = []

    def apply(self, logits_V: Values) -> None:
        logits_V[self._single_ids] = -np.inf
        if not self._output_ids:
            return
        for word in self._by_last.get(self._output_ids[-1], ()):
            if tuple(self._output_ids[1 - len(word) :]) == word[:-1]:
                logits_V[word[-1]] = -np.inf

    def accept(self, token_id: int) -> None:
        self._output_ids.append(token_id)

    def rollback(self, token_ids: Sequence[int]) -> None:
        del self._output_ids[-len(token_ids) :]


_UNDECIDED, _OVER = -1, -2


class ThinkingBudget:
    """Forces the end of thinking once it has `budget` tokens."""

    def __init__(self, thinking: Thinking, budget: int) -> None:
        self._thinking = thinking
        self._budget = budget
        self._counts = [0 if thinking.is_open else _UNDECIDED]  # tokens of thinking, or a phase without

    def apply(self, logits_V: Values) -> None:
        if self._counts[-1] >= self._budget:
            logits_V[:] = -np.inf
            logits_V[self._thinking.end_id] = 0

    def accept(self, token_id: int) -> None:
        count = self._counts[-1]
        if count == _UNDECIDED:
            self._counts.append(0 if token_id == self._thinking.start_id else _OVER)
        else:
            self._counts.append(_OVER if count == _OVER or token_id == self._thinking.end_id else count + 1)

    def rollback(self, token_ids: Sequence[int]) -> None:
        del self._counts[-len(token_ids) :]


class _Phase(enum.Enum):
    UNDECIDED = enum.auto()
    THINKING = enum.auto()
    GAP = enum.auto()
    START = enum.auto()
    INSIDE = enum.auto()
    CALLING = enum.auto()
    FREE = enum.auto()


class Grammar:
    """Holds the answer to a grammar, by the phases of the table above."""

    def __init__(self, rule: GrammarRule, thinking: Thinking | None, matcher: Matcher) -> None:
        self._matcher = matcher
        self._exit_ids = frozenset(rule.exit_ids)
        self._start_id = None if thinking is None else thinking.start_id
        self._end_id = None if thinking is None else thinking.end_id
        self._eos_ids = np.array(sorted(matcher.eos_ids), np.int64)
        starts = () if self._start_id is None else (self._start_id,)
        self._others = {  # what may come beside the grammar's own tokens
            _Phase.UNDECIDED: np.array([*starts, *rule.exit_ids], np.int64),
            _Phase.GAP: np.array([*matcher.newline_ids, *rule.exit_ids], np.int64),
            _Phase.START: np.array(rule.exit_ids, np.int64),
            _Phase.INSIDE: np.array([], np.int64),
        }
        start = _Phase.START if thinking is None else _Phase.THINKING if thinking.is_open else _Phase.UNDECIDED
        self._phases = [start]

    def apply(self, logits_V: Values) -> None:
        phase = self._phases[-1]
        if phase in self._others:
            mask_V = self._matcher.mask()
            mask_V[self._others[phase]] = True
            np.putmask(logits_V, ~mask_V, -np.inf)
        elif phase is _Phase.THINKING:
            logits_V[self._eos_ids] = -np.inf

    def accept(self, token_id: int) -> None:
        self._phases.append(self._next(self._phases[-1], token_id))

    def rollback(self, token_ids: Sequence[int]) -> None:
        """Only tokens that led to INSIDE were told to the grammar."""
        forgotten = self._phases[-len(token_ids) :]
        self._matcher.rollback(forgotten.count(_Phase.INSIDE))
        del self._phases[-len(token_ids) :]

    def _next(self, phase: _Phase, token_id: int) -> _Phase:
        if phase in (_Phase.THINKING, _Phase.CALLING):
            if token_id == self._end_id:
                return _Phase.GAP
            return _Phase.CALLING if token_id in self._exit_ids else phase
        if phase is _Phase.UNDECIDED and token_id == self._start_id:
            return _Phase.THINKING
        if phase is _Phase.GAP and token_id in self._matcher.newline_ids:
            return _Phase.START
        if phase is _Phase.FREE or (phase is not _Phase.INSIDE and token_id in self._exit_ids):
            return _Phase.FREE
        is_inside = token_id not in self._matcher.eos_ids and self._matcher.accept(token_id)
        return _Phase.INSIDE if is_inside else _Phase.FREE
