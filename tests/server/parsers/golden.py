"""What the golden tables are made of, and how a case is run: its text in pieces of any size, or as tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltaserve.core.types import FinishReason, SamplingParams, TokenChunk
from deltaserve.engine.text import TextDelta, TextStream
from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.server.parsers.calls import CallSplitter
from deltaserve.server.parsers.formats import ToolFormat
from deltaserve.server.parsers.message import MessageReader
from deltaserve.server.parsers.reasoning import ReasoningSplitter, State
from deltaserve.server.parsers.sink import Kind, Part, Sink
from deltaserve.server.parsers.tools import Tool, make_tools

XML, JSON = ToolFormat.XML, ToolFormat.JSON

Calls = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Raw:
    """Arguments that are compared as they are, because they are no whole JSON text."""

    text: str


@dataclass(frozen=True)
class Case:
    """`calls` are (name, arguments). `start` is what the turn was begun with, for a call that had to be made."""

    name: str
    text: str
    content: str | None = None
    calls: Calls = ()
    reasoning: str = ""
    state: State = State.ANSWER
    is_cut: bool = False
    format: ToolFormat = XML
    is_single: bool = False
    has_tools: bool = True
    start: str = ""

    def reader(self) -> MessageReader:
        thinking = ReasoningSplitter(self.state, TOOLS if self.has_tools else {})
        if not self.has_tools:
            return MessageReader(thinking)
        sink = Sink(lambda k: f"id{k}")
        calls = CallSplitter(TOOLS, sink, reads_bare=self.format is XML, is_single=self.is_single)
        return MessageReader(thinking, calls, self.start)


@dataclass
class Message:
    """What the parts of a reader add up to."""

    content: str | None = None
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)  # id, name, arguments

    def add(self, part: Part) -> None:
        assert part.text or part.kind is Kind.CALL, "no empty parts"
        if part.kind is Kind.REASONING:
            assert self.content is None
            assert not self.calls
            self.reasoning += part.text
        elif part.kind is Kind.CONTENT:
            self.content = (self.content or "") + part.text
        elif part.kind is Kind.CALL:
            assert part.call == len(self.calls)
            self.calls.append([part.call_id, part.text, ""])
        else:
            assert part.call == len(self.calls) - 1
            self.calls[-1][2] += part.text


def read_pieces(case: Case, pieces: Sequence[str]) -> Message:
    """The message that the case's text gives in these pieces."""
    last = FinishReason.LENGTH if case.is_cut else FinishReason.STOP
    ends = [None] * (len(pieces) - 1) + [last]
    return _read(
        case.reader(), [TextDelta(text=text, finish_reason=end) for text, end in zip(pieces, ends, strict=True)]
    )


def read_tokens(case: Case, tokenizer: Tokenizer, step: Callable[[], int], num_eos: int = 1) -> tuple[Message, int]:
    """The message, and how many tokens were thought, with `step()` tokens at a time."""
    ids = tokenizer.encode(case.text)
    stop = None if case.is_cut else tokenizer.eos_ids[0]
    ids += [] if stop is None else [stop] * num_eos
    stream = TextStream(tokenizer, SamplingParams())
    deltas, position = [], 0
    while not deltas or position < len(ids):
        size = step()
        chunk = tuple(ids[position : position + size])
        position += size
        reason = None if position < len(ids) else FinishReason.STOP if stop is not None else FinishReason.LENGTH
        deltas.append(stream.feed(TokenChunk(0, chunk, finish_reason=reason, stop_token_id=reason and stop)))
    reader = case.reader()
    return _read(reader, deltas), reader.num_reasoning


def check(case: Case, message: Message) -> None:
    """Against what the table says."""
    assert message.content == case.content
    assert message.reasoning == case.reasoning
    assert [call_id for call_id, *_ in message.calls] == [f"id{k}" for k in range(len(message.calls))]
    assert [name for _, name, _ in message.calls] == [name for name, _ in case.calls]
    for (_, _, arguments), (_, expected) in zip(message.calls, case.calls, strict=True):
        if isinstance(expected, Raw):
            assert arguments == expected.text
        else:
            # Not `==` on values: True is 1 there.
            assert _sorted(json.loads(arguments)) == _sorted(expected), arguments


def _sorted(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _read(reader: MessageReader, deltas: Sequence[TextDelta]) -> Message:
    message = Message()
    for delta in deltas:
        for part in reader.feed(delta):
            message.add(part)
        if reader.is_done:
            break
    if reader.has_answer and message.content is None:
        message.content = ""
    assert reader.has_answer == (message.content is not None)
    assert reader.num_calls == len(message.calls)
    return message


def call(name: str, **parameters: str) -> str:
    """A call as the template writes it."""
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def _function(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


STRING, INTEGER = {"type": "string"}, {"type": "integer"}
TYPED: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "Point": {"type": "object", "properties": {"x": INTEGER}},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}, {"type": "boolean"}]},
    },
    "properties": {
        "text": STRING,
        "count": INTEGER,
        "ratio": {"type": "number"},
        "on": {"type": "boolean"},
        "tags": {"type": "array", "items": STRING},
        "options": {"type": "object"},
        "note": {"anyOf": [STRING, {"type": "null"}]},
        "either": {"anyOf": [STRING, INTEGER]},
        "limit": {"type": ["integer", "null"]},
        "level": {"enum": [1, 2, 3]},
        "colour": {"enum": ["red", "1"]},
        "fixed": {"const": 5},
        "any": {"description": "anything"},
        "point": {"$ref": "#/$defs/Point"},
        "maybe_point": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
        "loop": {"$ref": "#/$defs/Loop"},
        "lost": {"$ref": "#/$defs/Nowhere"},
        "shape": {"properties": {"w": INTEGER}},
        "rows": {"items": INTEGER},
        "open": {"type": "integer", "nullable": True},
        "parts": {"anyOf": [STRING, {"type": "array"}]},
        "python": {"type": "int"},
        "odd": {"type": "varchar"},
        "broken": 5,
    },
    "additionalProperties": INTEGER,
}
TOOLS: dict[str, Tool] = make_tools(
    [
        _function("get_weather", {"type": "object", "properties": {"city": STRING, "days": INTEGER}}),
        _function("write_file", {"type": "object", "properties": {"path": STRING, "content": STRING}}),
        _function("bash", {"type": "object", "properties": {"command": STRING}}),
        _function("typed", TYPED),
        _function("ping", None),
    ]
)
