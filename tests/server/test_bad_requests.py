"""Every wrong request is a 4xx in OpenAI's shape that names the field, and the engine never hears of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from deltaserve.core.errors import OverloadedError
from tests.server.fakes import FakeClient, Http

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "add"}}


def check(response: httpx.Response, status: int, param: str | None, code: str | None = None) -> str:
    """The error's sentence."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["code"] == code
    message: str = error["message"]
    assert message
    assert "Traceback" not in message
    return message


COMMON: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty"),
    ({"repetition_penalty": 1e40}, "repetition_penalty"),
    ({"temperature": 10**400}, "temperature"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 10**400}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop_token_ids": [0, -1]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [1024]}, "stop_token_ids[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1024": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "much"}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"model": 5}, "model"),
    ({"ignore_eos": "no"}, "ignore_eos"),
]


@pytest.mark.parametrize(("fields", "param"), COMMON, ids=lambda value: str(value)[:40])
def test_wrong_fields_of_both_endpoints(http: Http, engine: FakeClient, fields: dict[str, Any], param: str) -> None:
    check(http.post(CHAT, {"messages": HELLO, **fields}), 400, param)
    check(http.post(TEXT, {"prompt": "Say", **fields}), 400, param)
    assert not engine.requests


MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    (None, "messages"),
    ("Hello", "messages"),
    (["Hello"], "messages[0]"),
    ([{}], "messages[0].role"),
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([*HELLO, {"role": "user", "content": [{"type": "text"}]}], "messages[1].content[0].text"),
    ([{"role": "user", "content": [7]}], "messages[0].content[0]"),
    ([{"role": "user", "content": "x", "tool_calls": []}], "messages[0].tool_calls"),
    ([*HELLO, {"role": "assistant", "tool_calls": {"a": 1}}], "messages[1].tool_calls"),
    ([*HELLO, {"role": "assistant", "tool_calls": [5]}], "messages[1].tool_calls[0].function"),
    (
        [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}],
        "messages[1].tool_calls[0].function.name",
    ),
    ([*HELLO, {"role": "assistant", "reasoning_content": 3}], "messages[1].reasoning_content"),
    ([{"role": "system", "content": "x"}], "messages"),
    ([*HELLO, {"role": "system", "content": "x"}], "messages"),
]


@pytest.mark.parametrize(("messages", "param"), MESSAGES, ids=lambda v: str(v)[:50])
def test_wrong_messages(http: Http, engine: FakeClient, messages: Any, param: str) -> None:
    check(http.post(CHAT, {"messages": messages}), 400, param)
    assert not engine.requests


@pytest.mark.parametrize("arguments", ["[1]", '"text"', 5, [], "[" * 100_000])
def test_wrong_tool_arguments(http: Http, arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    check(http.post(CHAT, {"messages": messages}), 400, "messages[1].tool_calls[0].function.arguments")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_parts_other_than_text_are_refused_by_name(http: Http, kind: str) -> None:
    parts = [{"type": "text", "text": "x"}, {"type": kind, kind: {"url": "http://localhost/x"}}]
    response = http.post(CHAT, {"messages": [{"role": "user", "content": parts}]})
    message = check(response, 400, "messages[0].content[1].type", "unsupported_parameter")
    assert kind in message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [TOOL, {"type": "function", "function": {}}]}, "tools[1].function.name"),
        ({"tools": ["add"]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": " "}}]}, "tools[0].function.name"),
        (
            {"tools": [TOOL, {"type": "function", "function": {"name": "a", "parameters": [1]}}]},
            "tools[1].function.parameters",
        ),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "add"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": "required", "tools": [TOOL], "add_generation_prompt": False}, "tool_choice"),
        ({"tool_choice": 5, "tools": [TOOL]}, "tool_choice"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"continue_final_message": True}, "messages[0]"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
    ids=str,
)
def test_wrong_fields_of_chat(http: Http, fields: dict[str, Any], param: str) -> None:
    check(http.post(CHAT, {"messages": HELLO, **fields}), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [1, -2]}, "prompt[1]"),
        ({"prompt": [1024]}, "prompt[0]"),
        ({"prompt": [10**30]}, "prompt[0]"),
        ({"prompt": [[1], [1024]]}, "prompt[1][0]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [[1, "x"]]}, "prompt[0][1]"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "n"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_fields_of_completions(http: Http, engine: FakeClient, fields: dict[str, Any], param: str) -> None:
    check(http.post(TEXT, fields), 400, param)
    assert not engine.requests


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_beam_search", True),
        ("best_of", 2),
        ("suffix", "after"),
        ("guided_json", {}),
        ("chat_template", "{{ 1 }}"),
        ("functions", [{}]),
        ("lora_request", {}),
    ],
)
def test_what_is_not_offered_is_refused_by_name(http: Http, engine: FakeClient, name: str, value: Any) -> None:
    message = check(http.post(CHAT, {"messages": HELLO, name: value}), 400, name, "unsupported_parameter")
    assert "not offered" in message
    assert not engine.requests


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b'{"prompt": "a", "seed": ' + b"9" * 6000 + b"}",
        b'{"prompt": "a", "\\ud800": 1}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "a"} x',
        b"[" * 200_000,
        b'{"a":' * 200_000,
    ],
    ids=lambda body: body[:40],
)
def test_bodies_that_are_not_json(http: Http, engine: FakeClient, body: bytes) -> None:
    response = http.request("POST", TEXT, content=body, headers={"content-type": "application/json"})
    check(response, 400, None)
    assert not engine.requests


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "a", "temperature": -Infinity}', "temperature"),
        (b'{"prompt": "a", "logit_bias": {"5": 1e999}}', "logit_bias.5"),
        (b'{"prompt": ["a", "\\ud800"]}', "prompt[1]"),
    ],
)
def test_values_that_json_does_not_have_are_named(http: Http, engine: FakeClient, body: bytes, param: str) -> None:
    response = http.request("POST", TEXT, content=body, headers={"content-type": "application/json"})
    assert param in check(response, 400, param)
    assert not engine.requests


def test_what_clients_send_is_cut_in_error_sentences(http: Http) -> None:
    assert len(check(http.post(TEXT, {"prompt": "a", "model": "x" * 9999}), 404, "model", "model_not_found")) < 300
    assert len(check(http.post(TEXT, {"prompt": "a", "min_tokens": 10**999}), 400, "min_tokens")) < 300


def test_template_arguments_may_have_any_name(http: Http) -> None:
    for name in ("self", "values", "a b", ""):
        assert http.post(CHAT, {"messages": HELLO, "chat_template_kwargs": {name: 1}}).status_code == 200


def test_deep_values_reach_the_template_and_stay_a_400(http: Http) -> None:
    deep: Any = 1
    for _ in range(600):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "add", "parameters": deep}}
    assert http.post(CHAT, {"messages": HELLO, "tools": [tool]}).status_code in (200, 400)
    check(http.post(CHAT, {"messages": HELLO, "temperature": deep}), 400, "temperature")


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_other_content_types(http: Http, media_type: str) -> None:
    body = json.dumps({"prompt": "a"})
    response = http.request("POST", TEXT, content=body, headers={"content-type": media_type})
    assert media_type in check(response, 415, None, "unsupported_media_type")


def test_json_content_types_with_parameters(http: Http) -> None:
    for media_type in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        body = json.dumps({"prompt": "a"})
        assert http.request("POST", TEXT, content=body, headers={"content-type": media_type}).status_code == 200


def test_bodies_beyond_the_limit(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltaserve.server.app.MAX_BODY_BYTES", 1000)
    check(http.post(TEXT, {"prompt": "a" * 1001}), 413, None, "body_too_large")


def test_unknown_model_names_the_ones_there_are(http: Http) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        message = check(http.post(path, {**body, "model": "gpt-4"}), 404, "model", "model_not_found")
        assert "gpt-4" in message
        assert "tiny" in message


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {"prompt": [5] * 512}, "prompt"),
        (TEXT, {"prompt": [5] * 500, "max_tokens": 13}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": 10**40}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 600}]}, "messages"),
        (CHAT, {"messages": HELLO, "max_tokens": 512}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 512}, "max_completion_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_context_overflow(http: Http, engine: FakeClient, path: str, body: dict[str, Any], param: str) -> None:
    assert "512" in check(http.post(path, body), 400, param, "context_length_exceeded")
    assert not engine.requests


def test_the_whole_context_may_be_used(http: Http) -> None:
    assert http.post(TEXT, {"prompt": [5] * 500, "max_tokens": 12}).status_code == 200
    assert http.post(TEXT, {"prompt": [5] * 511}).json()["usage"]["completion_tokens"] == 1


def test_unknown_paths_and_methods(http: Http) -> None:
    check(http.get("/v1/nothing"), 404, None, "not_found")
    response = http.get(CHAT)
    check(response, 405, None, "method_not_allowed")
    assert response.headers["allow"] == "POST"
    check(http.get("/v1/models/none"), 404, "model", "model_not_found")


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_engine_keeps_its_status(http: Http, engine: FakeClient, stream: bool) -> None:
    def full(k: int) -> str:
        raise OverloadedError("the queue is full")

    engine.reply = full
    response = http.post(TEXT, {"prompt": "a", "stream": stream})
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "overloaded"


@pytest.mark.parametrize("stream", [False, True])
def test_our_own_mistakes_say_nothing_of_the_inside(http: Http, engine: FakeClient, stream: bool) -> None:
    def broken(k: int) -> str:
        raise ZeroDivisionError("secret")

    engine.reply = broken
    response = http.post(TEXT, {"prompt": "a", "stream": stream})
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
