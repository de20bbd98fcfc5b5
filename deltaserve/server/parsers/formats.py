"""Which formats a checkpoint's chats are written in: named by flags, else read from the text of its chat template.

| --tool-call-parser     | format                                              | `auto`: the template has |
| ---------------------- | --------------------------------------------------- | ------------------------ |
| qwen3_coder, qwen3_xml | `<tool_call><function=NAME><parameter=KEY>value...` | `<function=`             |
| hermes, qwen3_json     | `<tool_call>{"name": ..., "arguments": {...}}`      | else `<tool_call>`       |
| none                   | calls stay text                                     | neither                  |

| --reasoning-parser     | format                                              | `auto`: the template has |
| ---------------------- | --------------------------------------------------- | ------------------------ |
| qwen3                  | `<think>` ... `</think>`                            | `<think>` or `</think>`  |
| none                   | thinking stays in the answer                        | neither                  |
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from deltaserve.core.errors import ConfigError
from deltaserve.engine.text import Vocabulary
from deltaserve.server.parsers.calls import CallSplitter
from deltaserve.server.parsers.marks import CALL, CALL_END, FUNCTION, THINK, THINK_END
from deltaserve.server.parsers.sink import Sink
from deltaserve.server.parsers.tools import Tool

AUTO, NONE = "auto", "none"


class ToolFormat(enum.Enum):
    XML = "qwen3_coder"
    JSON = "hermes"

    def opening(self, name: str | None) -> str:
        """How an assistant's turn begins that must call `name`, or any tool."""
        if name is None:
            return f"{CALL}\n"
        if self is ToolFormat.XML:
            return f"{CALL}\n{FUNCTION}{name}>\n"
        return f'{CALL}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments":'

    def splitter(self, tools: Mapping[str, Tool], *, is_single: bool) -> CallSplitter:
        return CallSplitter(tools, Sink(), reads_bare=self is ToolFormat.XML, is_single=is_single)


TOOL_FORMATS: dict[str, ToolFormat | None] = {
    "qwen3_coder": ToolFormat.XML,
    "qwen3_xml": ToolFormat.XML,
    "hermes": ToolFormat.JSON,
    "qwen3_json": ToolFormat.JSON,
    NONE: None,
}
REASONING_FORMATS = {"qwen3": True, NONE: False}


@dataclass(frozen=True, slots=True)
class Formats:
    """What is read out of a served model's answers."""

    tools: ToolFormat | None
    has_thinking: bool

    @classmethod
    def choose(cls, tool_call_parser: str, reasoning_parser: str, template: str) -> Formats:
        """From the two flags; `template` is the source of the chat template. Raises ConfigError on unknown names."""
        check_parsers(tool_call_parser, reasoning_parser)
        is_auto = tool_call_parser == AUTO
        tools = _format_of(template) if is_auto else TOOL_FORMATS[tool_call_parser]
        if reasoning_parser == AUTO:
            return cls(tools, THINK in template or THINK_END in template)
        return cls(tools, REASONING_FORMATS[reasoning_parser])

    def marks(self, *, with_calls: bool) -> tuple[str, ...]:
        """What must be seen in the text even where the tokenizer calls it special."""
        return ((THINK, THINK_END) if self.has_thinking else ()) + ((CALL, CALL_END) if with_calls else ())


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    given = (
        ("tool-call-parser", tool_call_parser, TOOL_FORMATS),
        ("reasoning-parser", reasoning_parser, REASONING_FORMATS),
    )
    for flag, name, known in given:
        if name != AUTO and name not in known:
            raise ConfigError(f"--{flag} must be one of {', '.join((AUTO, *known))}, not {name}")


def _format_of(template: str) -> ToolFormat | None:
    if FUNCTION in template:
        return ToolFormat.XML
    return ToolFormat.JSON if CALL in template else None


class MarkedVocabulary(Protocol):
    """A tokenizer that also finds the id of a mark."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def token_to_id(self, token: str) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Revealed:
    """A vocabulary some of whose special tokens have text nonetheless."""

    vocabulary: Vocabulary
    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes:
        return self.vocabulary.token_bytes(token_id)


def reveal(tokenizer: MarkedVocabulary, marks: tuple[str, ...]) -> Vocabulary:
    """`tokenizer`, with the text of `marks` kept by `skip_special_tokens`."""
    ids = {tokenizer.token_to_id(mark) for mark in marks} & tokenizer.special_ids
    return Revealed(tokenizer, tokenizer.special_ids - ids) if ids else tokenizer
