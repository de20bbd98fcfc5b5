"""One conversation in three formats: how each asks, and what each answered, brought to the same words.

An answer becomes a list of (kind, ...) in the order of chats: the thought, the text, the calls.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.server.fakes import Http

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTIONS = [{"name": "weather", "description": "The weather", "parameters": CITY}, {"name": "ping"}]
CHAT_TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
RESPONSES_TOOLS = [{"type": "function", **function} for function in FUNCTIONS]
MESSAGES_TOOLS = [
    {"name": "weather", "description": "The weather", "input_schema": CITY},
    {"name": "ping", "input_schema": {"type": "object"}},
]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@dataclass(frozen=True)
class Said:
    """A whole answer: `calls` are (name, arguments)."""

    thought: str
    text: str
    calls: tuple[tuple[str, Any], ...]


def of_chat(message: dict[str, Any]) -> Said:
    calls = [call["function"] for call in message["tool_calls"] or ()]
    return Said(
        message["reasoning_content"] or "",
        message["content"] or "",
        tuple((call["name"], json.loads(call["arguments"])) for call in calls),
    )


def of_response(items: Sequence[dict[str, Any]]) -> Said:
    parts = [part for item in items for part in item.get("content") or ()]
    calls = [item for item in items if item["type"] == "function_call"]
    return Said(
        "".join(part["text"] for part in parts if part["type"] == "reasoning_text"),
        "".join(part["text"] for part in parts if part["type"] == "output_text"),
        tuple((call["name"], json.loads(call["arguments"])) for call in calls),
    )


def of_message(content: Sequence[dict[str, Any]]) -> Said:
    return Said(
        "".join(block["thinking"] for block in content if block["type"] == "thinking"),
        "".join(block["text"] for block in content if block["type"] == "text"),
        tuple((block["name"], block["input"]) for block in content if block["type"] == "tool_use"),
    )


def ask(http: Http, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post(path, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def named_events(http: Http, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, each of which is named as its data says."""
    response = http.post(path, body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
