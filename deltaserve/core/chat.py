"""How a chat model writes messages in tokens, as far as the cache must know it to find their ends.

Every message of the family is `<|im_start|>role\\n ... <|im_end|>\\n`. Answers of tools come as user messages that open
with `<tool_response>`. The ids are looked up once, from the tokenizer; a model without these tokens has no markers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatMarkers:
    """Token ids. The first two are single special tokens; the rest are what their text encodes to, in order.

    `newline` is what stands between a role and its text, and after `<|im_end|>`.
    """

    im_start: int
    im_end: int
    newline: tuple[int, ...]
    system: tuple[int, ...]
    user: tuple[int, ...]
    assistant: tuple[int, ...]
    tool_response: tuple[int, ...]

    @classmethod
    def from_encode(cls, encode: Callable[[str], Sequence[int]]) -> ChatMarkers | None:
        """`encode` gives the ids of a text without adding any. None: a message's ends are no single tokens here."""
        start, end = tuple(encode("<|im_start|>")), tuple(encode("<|im_end|>"))
        if len(start) != 1 or len(end) != 1:
            return None
        texts = ("\n", "system", "user", "assistant", "<tool_response>")
        return cls(start[0], end[0], *(tuple(encode(text)) for text in texts))
