"""The shipped model calls tools, asked by the `openai` client: whole, streamed, made to, and with the results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.test_live_server import Live, running

TINY = Path(__file__).parents[2] / "models" / "tiny"


def function(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


CITY = {"type": "string", "description": "The city"}
UNIT = {"type": "string", "description": "The unit", "enum": ["celsius", "fahrenheit"]}
TOOLS: Any = [
    function("get_weather", "Get the weather of a city", city=CITY, unit=UNIT),
    function("set_timer", "Start a timer", minutes={"type": "integer", "description": "The minutes"}),
]
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris in celsius?"}
PARIS = ("get_weather", {"city": "Paris", "unit": "celsius"})
COMMON: dict[str, Any] = {"model": "tiny", "tools": TOOLS, "temperature": 0, "max_tokens": 120}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    flags = ("--served-model-name", "tiny", "--max-model-len", "2K", "--max-num-seqs", "4", "--num-pages", "64")
    with running(TINY, *flags, "--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder") as live:
        yield live


def called(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


def test_a_call_its_result_and_the_answer(live: Live) -> None:
    with live.client() as client:
        first = client.chat.completions.create(messages=[QUESTION], **COMMON)
        message = first.choices[0].message
        assert called(message) == [PARIS]
        assert (message.content, first.choices[0].finish_reason) == (None, "tool_calls")
        assert message.tool_calls is not None
        result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": '{"temperature": 21}'}
        messages: Any = [QUESTION, message.model_dump(exclude_none=True), result]
        second = client.chat.completions.create(messages=messages, **COMMON)
    assert second.choices[0].finish_reason == "stop"
    assert "21" in (second.choices[0].message.content or "")


def test_the_same_call_streamed(live: Live) -> None:
    with live.client() as client:
        whole = client.chat.completions.create(messages=[QUESTION], **COMMON)
        with client.chat.completions.stream(
            messages=[QUESTION], stream_options={"include_usage": True}, **COMMON
        ) as stream:
            arguments = [
                event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"
            ]
            final = stream.get_final_completion()
    assert called(final.choices[0].message) == [PARIS]
    assert json.loads("".join(arguments)) == PARIS[1]
    assert len(arguments) > 3
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage == whole.usage


def test_types_come_from_the_schema(live: Live) -> None:
    with live.client() as client:
        asked: Any = {"role": "user", "content": "Set a timer for 12 minutes."}
        answer = client.chat.completions.create(messages=[asked], **COMMON)
    assert called(answer.choices[0].message) == [("set_timer", {"minutes": 12})]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("enable_thinking", [False, True])
def test_a_call_that_must_be_made(live: Live, choice: Any, enable_thinking: bool) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": enable_thinking}}
    with live.client() as client:
        answer = client.chat.completions.create(messages=[QUESTION], tool_choice=choice, extra_body=extra, **COMMON)
    assert called(answer.choices[0].message) == [PARIS]
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_call_that_must_not_be_made(live: Live) -> None:
    with live.client() as client:
        answer = client.chat.completions.create(messages=[QUESTION], tool_choice="none", **COMMON)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content
