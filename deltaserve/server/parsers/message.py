"""What one choice says, from the text of its tokens: thinking, answer and calls, and how many tokens were thought.

A token counts as thinking if it begins in the thinking, marks not included; that too depends on the text alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from deltaserve.core.types import FinishReason
from deltaserve.engine.text import TextDelta
from deltaserve.server.parsers.calls import CallSplitter
from deltaserve.server.parsers.reasoning import ReasoningSplitter
from deltaserve.server.parsers.sink import End, Kind, Part


class MessageReader:
    """Feed it every delta of one choice. `calls` None: calls stay text. `start` is what the turn was begun with."""

    def __init__(self, thinking: ReasoningSplitter, calls: CallSplitter | None = None, start: str = "") -> None:
        self.num_reasoning = 0  # tokens
        self.num_calls = 0
        self.has_text = False
        self._thinking = thinking
        self._calls = calls
        self._start = start
        self._offsets: deque[int] = deque()  # of tokens that may be thinking
        self._is_counting = True

    @property
    def is_done(self) -> bool:
        """The request wants nothing more, whatever the model would say."""
        return self._calls is not None and self._calls.is_done

    @property
    def has_answer(self) -> bool:
        """False where the message has no text at all, not even an empty one: only thoughts, or only calls."""
        return self.has_text or (self._thinking.has_answer and not self.num_calls)

    def feed(self, delta: TextDelta) -> tuple[Part, ...]:
        end = _end_of(delta)
        text, self._start = self._start + delta.text, ""
        reasoning, content = self._thinking.feed(text, end is not End.OPEN)
        self._count(delta.offsets)
        parts = [Part(Kind.REASONING, reasoning)] if reasoning else []
        parts += self._read_answer(content, end)
        for part in parts:
            self.num_calls += part.kind is Kind.CALL
            self.has_text |= part.kind is Kind.CONTENT
        return tuple(parts)

    def _read_answer(self, content: str, end: End) -> list[Part]:
        if self._calls is None:
            return [Part(Kind.CONTENT, content)] if content else []
        self._calls.absorbs_think_end |= self._thinking.was_interrupted and not self.num_calls
        return self._calls.feed(content, end)

    def _count(self, offsets: Iterable[int]) -> None:
        if not self._is_counting:
            return
        thinking = self._thinking
        self._offsets.extend(offsets)
        while self._offsets and self._offsets[0] < thinking.end:
            self.num_reasoning += self._offsets.popleft() >= thinking.start
        self._is_counting = thinking.is_thinking


def _end_of(delta: TextDelta) -> End:
    """A model ends its message by an end-of-sequence token alone; anything else cuts it off."""
    if delta.finish_reason is None:
        return End.OPEN
    is_ended = delta.finish_reason is FinishReason.STOP and delta.stop_reason is None
    return End.ENDED if is_ended else End.CUT
