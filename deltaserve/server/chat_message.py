"""The parts of an answer in the shape of OpenAI's messages: one whole, or the deltas of a stream.

A delta holds one kind of thing, and of one call: clients read `content` or `tool_calls`, `tool_calls[0]` alone, and
lose what else a delta holds. Thinking goes under two names, vLLM's older and newer one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import msgspec

from deltaserve.server.parsers.sink import Kind, Part

encode = msgspec.json.encode


def without_reasoning(parts: Iterable[Part]) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.kind is not Kind.REASONING)


def deltas(parts: Sequence[Part]) -> list[bytes]:
    """Members of chunks, in order: `"delta":{...}`."""
    return [b'"delta":' + _delta(list(group)) for _, group in groupby(parts, key=_place)]


def whole_message(parts: Sequence[Part], *, has_answer: bool) -> dict[str, Any]:
    """`has_answer` False: no text at all, not even an empty one."""
    reasoning, content = _joined(parts, Kind.REASONING) or None, _joined(parts, Kind.CONTENT)
    calls = [part for part in parts if part.kind is Kind.CALL]
    return {
        "role": "assistant",
        "content": content if has_answer else None,
        "reasoning_content": reasoning,
        "reasoning": reasoning,
        "refusal": None,
        "tool_calls": [_call(part, _arguments(parts, part.call)) for part in calls] or None,
    }


def _place(part: Part) -> tuple[bool, bool, int]:
    return part.kind is Kind.REASONING, part.kind is Kind.CONTENT, part.call


def _delta(parts: Sequence[Part]) -> bytes:
    """Of neighbours that belong together."""
    first = parts[0]
    if first.kind is Kind.CONTENT:
        return b'{"content":' + encode(_joined(parts, Kind.CONTENT)) + b"}"
    if first.kind is Kind.REASONING:
        text = encode(_joined(parts, Kind.REASONING))
        return b'{"reasoning_content":' + text + b',"reasoning":' + text + b"}"
    arguments = _joined(parts, Kind.ARGUMENTS)
    if first.kind is Kind.CALL:
        return encode({"tool_calls": [{"index": first.call, **_call(first, arguments)}]})
    return encode({"tool_calls": [{"index": first.call, "function": {"arguments": arguments}}]})


def _call(part: Part, arguments: str) -> dict[str, Any]:
    return {"id": part.call_id, "type": "function", "function": {"name": part.text, "arguments": arguments}}


def _joined(parts: Iterable[Part], kind: Kind) -> str:
    return "".join(part.text for part in parts if part.kind is kind)


def _arguments(parts: Iterable[Part], call: int) -> str:
    return "".join(part.text for part in parts if part.kind is Kind.ARGUMENTS and part.call == call)
