"""Tool calls over a fake engine: whole and streamed messages, what may be chosen, and the way back in."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.server.app import create_app
from deltaserve.server.parsers.formats import Formats, ToolFormat
from deltaserve.server.served import Served
from tests.server.fakes import FakeClient, Http
from tests.server.parsers.golden import call

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "Weather?"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "ping"}},
]
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}
OFF = {"tools": TOOLS, **NO_THINKING}
WEATHER, PING = call("weather", city="Köln", days="2"), call("ping")
KOELN = {"city": "Köln", "days": 2}
NAMED = {"type": "function", "function": {"name": "weather"}}


def ask(http: Http, **fields: Any) -> dict[str, Any]:
    response = http.post(PATH, {"messages": [USER], **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = choice["message"]["tool_calls"] or []
    assert all(set(c) == {"id", "type", "function"} and c["type"] == "function" for c in calls)
    assert len({c["id"] for c in calls}) == len(calls)
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


def streamed(http: Http, index: int = 0, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One choice as a client puts it together, and the events."""
    events = http.events(PATH, {"messages": [USER], **fields})
    message: dict[str, Any] = {"content": None, "reasoning_content": None, "tool_calls": []}
    choice: dict[str, Any] = {"message": message}
    for event in events:
        for part in (part for part in event["choices"] if part["index"] == index):
            delta = part["delta"]
            assert len(delta.get("tool_calls", [])) <= 1
            assert "tool_calls" not in delta or set(delta) == {"tool_calls"}
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = (message[name] or "") + delta[name]
            for piece in delta.get("tool_calls", []):
                add_call(message["tool_calls"], piece)
            choice["finish_reason"] = part["finish_reason"]
    message["tool_calls"] = message["tool_calls"] or None
    return choice, events


def add_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    if "id" in piece:
        assert piece["index"] == len(calls)
        calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
    else:
        assert set(piece) == {"index", "function"}
        calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]


def test_a_call_whole_and_streamed(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: WEATHER
    (choice,) = ask(http, **OFF)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert calls_of(choice) == [("weather", KOELN)]
    assert choice["message"]["tool_calls"][0]["id"].startswith("call_")
    other, events = streamed(http, **OFF)
    assert calls_of(other) == [("weather", KOELN)]
    assert other["finish_reason"] == "tool_calls"
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    first = deltas[1]["tool_calls"][0]
    assert (first["index"], first["function"]) == (0, {"name": "weather", "arguments": ""})


@pytest.mark.parametrize(
    "reply",
    [
        f"Text.\n\n{WEATHER}\n{PING}\nMore.",
        f"hm\n</think>\n\nLook.\n\n{WEATHER}",
        f"hm\n{WEATHER}",
        "hm</think>no call < at all",
        f"{WEATHER}{PING}"[:-60],
        "hm</think><tool_call>\n<function=weather>\nstray\n</function>",
    ],
)
@pytest.mark.parametrize("max_tokens", [200, 40, 17])
def test_streamed_is_whole(http: Http, engine: FakeClient, reply: str, max_tokens: int) -> None:
    engine.reply = lambda k: reply
    fields = {"tools": TOOLS, "max_tokens": max_tokens, "logprobs": True}
    (whole,) = (answer := ask(http, **fields))["choices"]
    part, events = streamed(http, **fields, stream_options={"include_usage": True, "continuous_usage_stats": True})
    for name in ("content", "reasoning_content"):
        assert part["message"][name] == (whole["message"][name] or None)
    assert plain(part) == plain(whole)
    assert part["finish_reason"] == whole["finish_reason"]
    assert events[-1]["usage"] == answer["usage"]
    counts = [event["usage"]["completion_tokens_details"]["reasoning_tokens"] for event in events]
    assert counts == sorted(counts)
    entries = [e for event in events[:-1] for e in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert entries == whole["logprobs"]["content"]


def plain(choice: dict[str, Any]) -> list[tuple[str, str]]:
    return [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"]["tool_calls"] or []]


def test_thinking_is_counted_and_named_twice(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: f"hm so\n</think>\n\n{WEATHER}"
    answer = ask(http, tools=TOOLS)
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "hm so"
    num_thought = len(engine.tokenizer.encode("hm so\n"))
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}
    hidden = ask(http, tools=TOOLS, include_reasoning=False)
    assert hidden["choices"][0]["message"]["reasoning"] is None
    assert calls_of(hidden["choices"][0]) == [("weather", KOELN)]
    assert hidden["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thought}


def test_choices_have_calls_of_their_own(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: (WEATHER, "No call.", PING + PING)[k % 3]
    first, second, third = ask(http, n=3, **OFF)["choices"]
    assert [calls_of(choice) for choice in (first, second, third)] == [[("weather", KOELN)], [], [("ping", {})] * 2]
    assert [choice["finish_reason"] for choice in (first, second, third)] == ["tool_calls", "stop", "tool_calls"]
    ids = [c["id"] for choice in (first, third) for c in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 3
    assert calls_of(streamed(http, 2, n=3, **OFF)[0]) == [("ping", {}), ("ping", {})]


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_at_most_ends_the_request(http: Http, engine: FakeClient, stream: bool) -> None:
    engine.reply = lambda k: f"{WEATHER}\n{PING}"
    fields = {**OFF, "parallel_tool_calls": False}
    choice = streamed(http, **fields)[0] if stream else ask(http, **fields)["choices"][0]
    assert calls_of(choice) == [("weather", KOELN)]
    assert choice["finish_reason"] == "tool_calls"
    assert engine.num_aborted == 1
    assert engine.num_running == 0


def test_none_shows_no_tools_and_reads_no_calls(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: WEATHER
    (choice,) = ask(http, tool_choice="none", **OFF)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (WEATHER, "stop")
    assert '"weather"' not in engine.tokenizer.decode(engine.requests[0][0])
    (choice,) = ask(http, **NO_THINKING)["choices"]
    assert choice["message"]["content"] == WEATHER


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_named_function_begins_the_turn(http: Http, engine: FakeClient, thinking: bool, stream: bool) -> None:
    opening = "<tool_call>\n<function=weather>\n"
    engine.reply = lambda k: f"{WEATHER}\n{PING}".removeprefix(opening)
    kwargs = {"enable_thinking": thinking}
    fields = {"tools": TOOLS, "tool_choice": NAMED, "chat_template_kwargs": kwargs}
    choice = streamed(http, **fields)[0] if stream else ask(http, **fields)["choices"][0]
    assert calls_of(choice) == [("weather", KOELN)]
    assert choice["finish_reason"] == "tool_calls"
    prompt = engine.tokenizer.decode(engine.requests[0][0], skip_special_tokens=False)
    assert prompt.endswith(f"<|im_start|>assistant\n<think>\n\n</think>\n\n{opening}")


def test_required_begins_a_call(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: f"{WEATHER}\n{PING}".removeprefix("<tool_call>\n")
    (choice,) = ask(http, tool_choice="required", **OFF)["choices"]
    assert calls_of(choice) == [("weather", KOELN), ("ping", {})]
    assert engine.tokenizer.decode(engine.requests[0][0]).endswith("</think>\n\n<tool_call>\n")
    engine.reply = lambda k: "</function>\n</tool_call>"
    (choice,) = ask(http, tool_choice="required", tools=TOOLS[1:])["choices"]
    assert calls_of(choice) == [("ping", {})], "the only tool there is"


def test_required_without_a_call_is_text(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: "I cannot."
    (choice,) = ask(http, tool_choice="required", **OFF)["choices"]
    assert choice["message"]["content"] == "<tool_call>\nI cannot."
    assert (choice["message"]["tool_calls"], choice["finish_reason"]) == (None, "stop")


def test_tokenize_counts_the_opening(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: "</function>"
    ask(http, tool_choice=NAMED, **OFF)
    tokens = http.post("/tokenize", {"messages": [USER], "tool_choice": NAMED, **OFF}).json()["tokens"]
    assert tuple(tokens) == engine.requests[0][0]


def test_json_calls(engine: FakeClient, served: Served) -> None:
    http = Http(create_app(replace(served, formats=Formats(ToolFormat.JSON, has_thinking=True))))
    engine.reply = lambda k: '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
    assert calls_of(ask(http, **OFF)["choices"][0]) == [("weather", KOELN)]
    assert calls_of(streamed(http, **OFF)[0]) == [("weather", KOELN)]
    engine.reply = lambda k: ' {"city": "Köln", "days": 2}}\n</tool_call>'
    assert calls_of(ask(http, tool_choice=NAMED, **OFF)["choices"][0]) == [("weather", KOELN)]
    prompt = engine.tokenizer.decode(engine.requests[-1][0])
    assert prompt.endswith('<tool_call>\n{"name": "weather", "arguments":')


def test_without_a_format_calls_are_text_and_cannot_be_made(engine: FakeClient, served: Served) -> None:
    http = Http(create_app(replace(served, formats=Formats(None, has_thinking=False))))
    engine.reply = lambda k: f"hm</think>{WEATHER}"
    answer = ask(http, tools=TOOLS)
    assert answer["choices"][0]["message"]["content"] == f"hm</think>{WEATHER}"
    assert "completion_tokens_details" not in answer["usage"]
    for choice in ("required", NAMED):
        error = http.post(PATH, {"messages": [USER], "tools": TOOLS, "tool_choice": choice}).json()["error"]
        assert (error["param"], error["code"]) == ("tool_choice", "unsupported_parameter")
        assert "--tool-call-parser" in error["message"]


def test_a_call_that_is_cut_stays_open(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: WEATHER
    size = len(engine.tokenizer.encode(WEATHER.partition("ln")[0]))
    (choice,) = ask(http, max_tokens=size, **OFF)["choices"]
    assert choice["finish_reason"] == "length"
    (cut,) = choice["message"]["tool_calls"]
    assert cut["function"]["arguments"].startswith('{"city": "K')
    assert "}" not in cut["function"]["arguments"]
    (choice,) = ask(http, stop="<parameter=days>", **OFF)["choices"]
    assert (choice["stop_reason"], choice["message"]["tool_calls"][0]["function"]["arguments"]) == (
        "<parameter=days>",
        '{"city": "Köln"',
    )
    message = {**choice["message"], "tool_calls": [cut]}
    answers = [USER, message, {"role": "tool", "tool_call_id": cut["id"], "content": "That was no JSON."}]
    engine.reply = lambda k: "Sorry."
    assert ask(http, messages=answers, **OFF)["choices"][0]["message"]["content"] == "Sorry."
    assert cut["function"]["arguments"] in engine.tokenizer.decode(engine.requests[-1][0])


@pytest.mark.parametrize(
    "reply", [f"hm\n</think>\n\nI look.\n\n{WEATHER}\n{PING}", f"hm\n</think>\n\n{WEATHER}", f"hm\n</think>\n\n{PING}"]
)
@pytest.mark.parametrize("result", ["Rain.", [{"type": "text", "text": "Rain."}]])
def test_the_next_turn_begins_with_the_very_text_of_this_one(
    http: Http, engine: FakeClient, reply: str, result: Any
) -> None:
    """So that the prefix cache knows it."""
    engine.reply = lambda k: reply
    (choice,) = ask(http, tools=TOOLS)["choices"]
    message = choice["message"]
    results = [{"role": "tool", "tool_call_id": c["id"], "content": result} for c in message["tool_calls"]]
    ask(http, messages=[USER, message, *results], tools=TOOLS)
    first, second = (engine.tokenizer.decode(ids, skip_special_tokens=False) for ids, _ in engine.requests)
    assert second.startswith(f"{first}{reply}<|im_end|>\n")
    assert second.count("Rain.") == len(results)


def test_thinking_comes_back_under_either_name(http: Http, engine: FakeClient) -> None:
    for fields in (
        {"reasoning": "hm so"},
        {"reasoning_content": "hm so"},
        {"reasoning": "hm so", "reasoning_content": None},
    ):
        answer = {"role": "assistant", "content": None, "tool_calls": [], **fields}
        ask(http, messages=[USER, answer, USER], chat_template_kwargs={"preserve_thinking": True})
    assert len({ids for ids, _ in engine.requests}) == 1
    assert "hm so" in engine.tokenizer.decode(engine.requests[0][0])


def test_marks_are_seen_even_where_they_are_special(engine: FakeClient, served: Served) -> None:
    tokenizer: Tokenizer = copy.copy(served.tokenizer)
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.special_ids = tokenizer.special_ids | {tokenizer.token_to_id(mark) for mark in marks}
    http = Http(create_app(replace(served, tokenizer=tokenizer)))
    engine.reply = lambda k: f"hm</think>{WEATHER}"
    (choice,) = ask(http, tools=TOOLS)["choices"]
    assert (choice["message"]["reasoning"], calls_of(choice)) == ("hm", [("weather", KOELN)])
    assert calls_of(streamed(http, tools=TOOLS)[0]) == [("weather", KOELN)]
    (choice,) = ask(http)["choices"]
    assert choice["message"]["content"] == WEATHER.removeprefix("<tool_call>\n").removesuffix("</tool_call>")
