"""The shipped model answers in a form, asked by the `openai` client: whole and streamed, with thinking on and off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.server.test_live_server import Live, running

TINY = Path(__file__).parents[2] / "models" / "tiny"


class Weather(BaseModel):
    city: Literal["Paris", "Oslo", "Rome"]
    degrees: int
    words: list[Literal["sun", "rain", "wind"]]


QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = Weather.model_json_schema() | {"additionalProperties": False}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "weather", "strict": True, "schema": SCHEMA}}
COMMON: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "max_tokens": 300, "seed": 3}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    flags = ("--served-model-name", "tiny", "--max-model-len", "2K", "--max-num-seqs", "4", "--num-pages", "64")
    with running(TINY, *flags, "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}') as live:
        yield live


def extra(enable_thinking: bool, **fields: Any) -> dict[str, Any]:
    return {"chat_template_kwargs": {"enable_thinking": enable_thinking}, **fields}


@pytest.mark.parametrize("enable_thinking", [False, True])
def test_a_schema_whole_and_streamed(live: Live, enable_thinking: bool) -> None:
    """The same answer; thinking is bounded, so that the answer comes."""
    body = extra(enable_thinking, **({"thinking_token_budget": 12} if enable_thinking else {}))
    with live.client() as client:
        whole = client.chat.completions.create(response_format=FORMAT, extra_body=body, **COMMON)
        stream = client.chat.completions.create(response_format=FORMAT, extra_body=body, stream=True, **COMMON)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    (choice,) = whole.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content == streamed
    jsonschema.validate(json.loads(streamed), SCHEMA)
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    assert (whole.usage.completion_tokens_details.reasoning_tokens or 0) <= 12


def test_parsed_by_the_client(live: Live) -> None:
    with live.client() as client:
        answer = client.chat.completions.parse(response_format=Weather, extra_body=extra(False), **COMMON)
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Weather)


def test_a_choice_for_chat_and_text(live: Live) -> None:
    body = {"structured_outputs": {"choice": ["sun", "rain"]}}
    with live.client() as client:
        chat = client.chat.completions.create(extra_body=extra(False, **body), **COMMON)
        text = client.completions.create(model="tiny", prompt="Tomorrow: ", max_tokens=20, extra_body=body)
    assert chat.choices[0].message.content in ("sun", "rain") and chat.choices[0].finish_reason == "stop"
    assert text.choices[0].text in ("sun", "rain") and text.choices[0].finish_reason == "stop"


def test_a_wrong_schema_is_the_clients_fault_streamed_too(live: Live) -> None:
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}
    with live.client() as client:
        for is_streamed in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(response_format=wrong, stream=is_streamed, **COMMON)
            assert caught.value.param == "response_format.json_schema.schema"
