"""/v1/responses over a fake engine: items in, items out, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deltaserve.server.responses_input import pack, unpack
from tests.server.agent_forms import CHAT, CHAT_TOOLS, RESPONSES, RESPONSES_TOOLS, ask, named_events, of_response
from tests.server.fakes import FakeClient, Http
from tests.server.parsers.golden import call

THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
WEATHER, PING = call("weather", city="Köln", days="2"), call("ping")
FULL = f"I wonder.\n</think>\n\nLet me look.\n\n{WEATHER}\n{PING}"
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "Wea"}, {"type": "input_text", "text": "ther?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I wonder."}]},
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Let me look.", "annotations": []}],
    },
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Köln", "days": 2}'},
    {"type": "function_call", "call_id": "c2", "name": "ping", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "pong"}]},
]
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln", "days": 2}'}},
    {"id": "c2", "type": "function", "function": {"name": "ping", "arguments": "{}"}},
]
AS_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "Let me look.", "reasoning_content": "I wonder.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    {"role": "tool", "tool_call_id": "c2", "content": "pong"},
]


def same_prompt(http: Http, engine: FakeClient, body: dict[str, Any], chat: dict[str, Any]) -> None:
    ask(http, RESPONSES, body)
    ask(http, CHAT, chat)
    assert engine.requests[-2] == engine.requests[-1]


def test_text_in_text_out(http: Http) -> None:
    answer = ask(http, RESPONSES, {"model": "tiny", "input": "Hello", "metadata": {"a": "b"}, **OFF})
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "tiny")
    assert answer["metadata"] == {"a": "b"}
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Answer 0.", "annotations": [], "logprobs": []}]
    assert answer["store"] is False


def test_thought_text_and_calls_are_items_in_their_order(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: FULL
    engine.num_cached = 2
    answer = ask(http, RESPONSES, {"input": "Weather?", "tools": RESPONSES_TOOLS, **THINKING})
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call", "function_call"]
    said = of_response(answer["output"])
    assert (said.thought, said.text) == ("I wonder.", "Let me look.")
    assert said.calls == (("weather", {"city": "Köln", "days": 2}), ("ping", {}))
    assert len({item["id"] for item in answer["output"]}) == 4
    usage = answer["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 2}
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.parametrize("reply", [FULL, "Only thought", "a\n</think>\n\n", f"</think>{WEATHER}", "", "x</think>y"])
def test_streamed_equals_whole(http: Http, engine: FakeClient, reply: str) -> None:
    engine.reply = lambda k: reply
    body = {"input": "Weather?", "tools": RESPONSES_TOOLS, **THINKING}
    whole, events = ask(http, RESPONSES, body), named_events(http, RESPONSES, body)
    final = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    assert [item["id"] for item in final["output"]] == [
        event["item"]["id"] for event in events if event["type"] == "response.output_item.added"
    ]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    assert joined_deltas(events) == final_texts(final["output"])
    assert of_response(final["output"]) == of_response(whole["output"])
    assert final["usage"] == whole["usage"]
    assert final.keys() == whole.keys()


def joined_deltas(events: list[dict[str, Any]]) -> list[str]:
    texts = [""] * sum(event["type"] == "response.output_item.added" for event in events)
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["output_index"]] += event["delta"]
    return texts


def final_texts(items: list[dict[str, Any]]) -> list[str]:
    return [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in items]


def test_the_order_of_events(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: f"I.\n</think>\n\nLook.{PING}"
    events = named_events(http, RESPONSES, {"input": "Weather?", "tools": RESPONSES_TOOLS, **THINKING})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["response"]["status"] == "in_progress"
    names = [event["type"].removeprefix("response.") for event in events]
    once = [name for index, name in enumerate(names) if index == 0 or name != names[index - 1]]
    opened, closed = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    assert once == [
        "created",
        "in_progress",
        *(*opened, "reasoning_text.delta", "reasoning_text.done", *closed),
        *(*opened, "output_text.delta", "output_text.done", *closed),
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    added = [event["part"]["text"] for event in events if event["type"] == "response.content_part.added"]
    assert added == ["", ""], "a part is empty when it opens"


def test_items_are_rendered_as_the_same_chat(http: Http, engine: FakeClient) -> None:
    common = {"temperature": 0.3, "top_p": 0.8, "seed": 4, **THINKING}
    body = {"input": ITEMS, "instructions": "Be kind.", "max_output_tokens": 30, "tools": RESPONSES_TOOLS, **common}
    system = {"role": "system", "content": "Be kind."}
    chat = {"messages": [system, *AS_CHAT], "max_tokens": 30, "tools": CHAT_TOOLS, **common}
    same_prompt(http, engine, body, chat)


def test_system_messages_first_and_later(http: Http, engine: FakeClient) -> None:
    items = [{"role": "developer", "content": "Be brief."}, *ITEMS[:1]]
    later = [{"role": "assistant", "content": "Rain."}, {"role": "developer", "content": "Now in French."}]
    chat = [
        {"role": "system", "content": "Be kind.\n\nBe brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "Now in French."},
    ]
    body = {"instructions": "Be kind.", "input": [*items, *later], **OFF}
    same_prompt(http, engine, body, {"messages": chat, **OFF})


def test_two_answers_in_a_row_stay_two(http: Http, engine: FakeClient) -> None:
    said = [{"role": "assistant", "content": text} for text in ("One.", "Two.")]
    same_prompt(http, engine, {"input": [*ITEMS[:1], *said]}, {"messages": [AS_CHAT[0], *said]})


def test_the_output_is_good_input(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: FULL
    question = {"role": "user", "content": "Weather?"}
    first = ask(http, RESPONSES, {"input": [question], "tools": RESPONSES_TOOLS, **THINKING})
    ids = [item["call_id"] for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call_id, "output": "x"} for call_id in ids]
    body = {"input": [question, *first["output"], *results], "tools": RESPONSES_TOOLS, **THINKING}
    tools = [{"role": "tool", "tool_call_id": call_id, "content": "x"} for call_id in ids]
    chat = {"messages": [AS_CHAT[0], AS_CHAT[1], *tools], "tools": CHAT_TOOLS, **THINKING}
    same_prompt(http, engine, body, chat)


def test_thoughts_come_back_packed(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: FULL
    body = {"input": "Weather?", "tools": RESPONSES_TOOLS, "include": ["reasoning.encrypted_content"], **THINKING}
    packed = ask(http, RESPONSES, body)["output"][0]["encrypted_content"]
    items = [dict(item) for item in ITEMS]
    items[1] = {"type": "reasoning", "summary": [], "encrypted_content": packed}
    chat = {"messages": AS_CHAT, "tools": CHAT_TOOLS, **THINKING}
    same_prompt(http, engine, {"input": items, "tools": RESPONSES_TOOLS, **THINKING}, chat)


@pytest.mark.parametrize("packed", ["gAAAAABh", "deltaserve:%", "deltaserve:/w==", ""])
def test_thoughts_of_others_are_left_out(packed: str) -> None:
    assert unpack(packed) == ""
    assert unpack(pack("dächte ich")) == "dächte ich"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_cut_off(http: Http, stream: bool) -> None:
    body = {"input": "Hello", "max_output_tokens": 2, **OFF}
    answer = named_events(http, RESPONSES, body)[-1]["response"] if stream else ask(http, RESPONSES, body)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][-1]["status"] == "incomplete"
    assert answer["usage"]["output_tokens"] == 2


def test_tool_choice_and_parallel_calls(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: f"{WEATHER}{PING}"
    body = {"input": "Weather?", "tools": RESPONSES_TOOLS, **OFF}
    assert len(ask(http, RESPONSES, body)["output"]) == 2
    assert len(ask(http, RESPONSES, body | {"parallel_tool_calls": False})["output"]) == 1
    (item,) = ask(http, RESPONSES, body | {"tool_choice": "none"})["output"]
    assert item["type"] == "message"
    engine.reply = lambda k: "</function></tool_call>"
    named = {"type": "function", "name": "ping"}
    (item,) = ask(http, RESPONSES, body | {"tool_choice": named})["output"]
    assert (item["type"], item["name"], json.loads(item["arguments"])) == ("function_call", "ping", {})


def test_the_cache_key_is_the_conversation(http: Http, engine: FakeClient) -> None:
    ask(http, RESPONSES, {"input": "Hello", "prompt_cache_key": "talk-1"})
    assert engine.options[-1].session_id == "talk-1"
    ask(http, RESPONSES, {"input": "Hello", "prompt_cache_key": "talk-1", "session_id": "mine"})
    assert engine.options[-1].session_id == "mine"


def test_a_stream_that_breaks_ends_in_failed(http: Http, engine: FakeClient) -> None:
    engine.error_after = 2
    events = named_events(http, RESPONSES, {"input": "Hello", **OFF})
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "generation_failed", "message": "no page was free"}
    assert events[-1]["sequence_number"] == len(events) - 1
    assert http.post(RESPONSES, {"input": "Hello"}).status_code == 500


@pytest.mark.parametrize("stream", [False, True])
def test_failures_before_the_first_event_have_a_status(http: Http, engine: FakeClient, stream: bool) -> None:
    engine.is_alive = False
    response = http.post(RESPONSES, {"input": "Hello", "stream": stream})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")


def test_clients_that_leave_abort(http: Http, engine: FakeClient) -> None:
    engine.stall_after = 3
    http.leave(RESPONSES, {"input": "Hello", "stream": True}, 1)
    http.leave(RESPONSES, {"input": "Hello"}, 0)
    assert (engine.num_running, engine.num_aborted) == (0, 2)


def with_part(part: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, part]}]}


def with_tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f", **fields}]}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a"]}, "input[0]"),
    ({"input": [{}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"type": ["message"]}]}, "input[0].type"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    (with_part("a"), "input[0].content[1]"),
    (with_part({"type": "input_image", "image_url": "data:"}), "input[0].content[1].type"),
    (with_part({"type": "input_file", "file_id": "x"}), "input[0].content[1].type"),
    (with_part({"type": "input_text"}), "input[0].content[1].text"),
    ({"input": [{"type": "reasoning", "content": [{"type": "reasoning_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "reasoning", "encrypted_content": 5}]}, "input[0].encrypted_content"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]}, "input[0].name"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"input": [{"role": "system", "content": "only"}]}, "input"),
    ({"input": "word " * 600}, "input"),
    ({"instructions": 5}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "9"}, "max_output_tokens"),
    ({"max_output_tokens": 512}, "max_output_tokens"),
    ({"max_output_tokens": 10**40}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"tools": [{"type": "file_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}, {"type": ["function"]}]}, "tools[1].type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "custom", "name": "patch"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    (with_tool(name=" "), "tools[0].name"),
    (with_tool(parameters=5), "tools[0].parameters"),
    (with_tool(description=5), "tools[0].description"),
    ({"tools": {}}, "tools"),
    ({"tool_choice": "maybe"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "function", "name": "g"}, **with_tool()}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"n": 2}, "n"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]"),
    ({"include": "all"}, "include"),
    ({"stream": "yes"}, "stream"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}}, "text.format.schema"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_requests_name_the_field(http: Http, engine: FakeClient, fields: dict[str, Any], param: str) -> None:
    response = http.post(RESPONSES, {"input": "Hello", **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert not engine.requests


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "truncation": "disabled", "background": False, "top_logprobs": 0, "n": 1},
        {"tools": [], "tool_choice": "auto", "include": [], "text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"reasoning": {"effort": "medium", "summary": "auto"}, "client_metadata": {"a": 1}, "service_tier": "auto"},
        {"previous_response_id": None, "metadata": None, "stream_options": None, "max_tool_calls": 3},
    ],
)
def test_what_agents_send_without_meaning_much(http: Http, fields: dict[str, Any]) -> None:
    assert ask(http, RESPONSES, {"input": "Hello", **fields})["status"] == "completed"


def test_what_is_left_out_is_not_said_to_be_there(http: Http, engine: FakeClient) -> None:
    tools = [{"type": "web_search", "external_web_access": False}, *RESPONSES_TOOLS]
    answer = ask(http, RESPONSES, {"input": "Hello", "tools": tools, **OFF})
    ask(http, RESPONSES, {"input": "Hello", "tools": RESPONSES_TOOLS, **OFF})
    assert answer["tools"] == RESPONSES_TOOLS
    assert engine.requests[0] == engine.requests[1]


def test_refusals_name_the_remedy(http: Http) -> None:
    response = http.post(RESPONSES, {"input": "Hello", "previous_response_id": "resp_1"})
    assert "send the earlier items in input" in response.json()["error"]["message"]
    assert http.get(f"{RESPONSES}/resp_1").status_code == 404
