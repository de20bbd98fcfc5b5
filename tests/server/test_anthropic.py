"""/v1/messages over a fake engine: blocks in, blocks out, whole and streamed."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from deltaserve.core.errors import OverloadedError
from tests.server.agent_forms import CHAT, CHAT_TOOLS, MESSAGES, MESSAGES_TOOLS, ask, named_events, of_message
from tests.server.fakes import MAX_MODEL_LEN, FakeClient, Http
from tests.server.parsers.golden import call

COUNT = "/v1/messages/count_tokens"
USER = {"role": "user", "content": "Weather?"}
WEATHER, PING = call("weather", city="Köln", days="2"), call("ping")
FULL = f"I wonder.\n</think>\n\nLet me look.\n\n{WEATHER}\n{PING}"
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 50}}
AS_TEMPLATE = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 50}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
BASE: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "messages": [USER]}
USES = [
    {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Köln", "days": 2}},
    {"type": "tool_use", "id": "c2", "name": "ping", "input": {}},
]
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I wonder.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Let me look."},
            *USES,
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "rain"},
            {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "pong"}]},
            {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}},
        ],
    },
]
AS_CHAT: list[dict[str, Any]] = [
    USER,
    {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning_content": "I wonder.",
        "tool_calls": [
            {"id": use["id"], "type": "function", "function": {"name": use["name"], "arguments": use["input"]}}
            for use in USES
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    {"role": "tool", "tool_call_id": "c2", "content": "pong"},
    {"role": "user", "content": "Well?"},
]
# A chat's tool has no schema where Anthropic's must have one.
SAME_TOOLS = [CHAT_TOOLS[0], {"type": "function", "function": {"name": "ping", "parameters": {"type": "object"}}}]


def same_prompt(http: Http, engine: FakeClient, body: dict[str, Any], chat: dict[str, Any]) -> None:
    ask(http, MESSAGES, BASE | body)
    ask(http, CHAT, {"max_tokens": 200} | chat)
    assert engine.requests[-2] == engine.requests[-1]


def accumulated(events: list[dict[str, Any]]) -> anthropic.types.Message:
    """As the client's own stream helper puts them together."""
    from anthropic.lib.streaming._messages import accumulate_event

    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        if event["type"] != "ping":
            snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)  # type: ignore[arg-type]
    message: anthropic.types.Message = snapshot
    return message


def test_text_in_text_out(http: Http, engine: FakeClient) -> None:
    engine.num_cached = 3
    answer = ask(http, MESSAGES, BASE)
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert answer["content"] == [{"type": "text", "text": "Answer 0."}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    usage = answer["usage"]
    assert usage["cache_read_input_tokens"] == 3
    assert usage["input_tokens"] + 3 == len(engine.requests[0][0])
    assert usage["output_tokens"] == ask(http, CHAT, {"messages": [USER], **OFF})["usage"]["completion_tokens"]


def test_thought_text_and_calls_are_blocks_in_their_order(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: FULL
    answer = ask(http, MESSAGES, BASE | {"tools": MESSAGES_TOOLS, **THINKING})
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    said = of_message(answer["content"])
    assert (said.thought, said.text) == ("I wonder.", "Let me look.")
    assert said.calls == (("weather", {"city": "Köln", "days": 2}), ("ping", {}))
    assert answer["stop_reason"] == "tool_use"
    assert 0 < answer["usage"]["output_tokens_details"]["thinking_tokens"] < answer["usage"]["output_tokens"]


@pytest.mark.parametrize("max_tokens", [200, 12, 30, 38, 44])
@pytest.mark.parametrize("reply", [FULL, "Only thought", f"</think>{WEATHER}", "", "x</think>y", f"</think>a{PING}b"])
def test_streamed_equals_whole(http: Http, engine: FakeClient, reply: str, max_tokens: int) -> None:
    engine.reply = lambda k: reply
    thinking = {"thinking": {"type": "adaptive"}}
    body = BASE | {"tools": MESSAGES_TOOLS, "max_tokens": max_tokens, **thinking}
    whole = ask(http, MESSAGES, body)
    message = accumulated(named_events(http, MESSAGES, body)).to_dict()
    for answer in (whole, message):
        for block in answer["content"]:  # type: ignore[union-attr]
            if block["type"] == "tool_use":
                del block["id"]
    for name in ("content", "stop_reason", "stop_sequence", "usage", "model", "role"):
        assert message[name] == whole[name], name


def test_the_order_of_events(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: f"I.\n</think>\n\nLook.{PING}"
    events = named_events(http, MESSAGES, BASE | {"tools": MESSAGES_TOOLS, **THINKING})
    names = [event["delta"]["type"] if event["type"] == "content_block_delta" else event["type"] for event in events]
    once = [name for index, name in enumerate(names) if index == 0 or name != names[index - 1]]
    assert once == [
        "message_start",
        "ping",
        *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [start.get("thinking", start.get("text", start.get("input"))) for start in starts] == ["", "", {}]


def test_blocks_are_rendered_as_the_same_chat(http: Http, engine: FakeClient) -> None:
    common = {"temperature": 0.3, "top_p": 0.8, "top_k": 7}
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: version=1; cch=5;"},
        {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief."},
    ]
    body = {"messages": TALK, "system": system, "tools": MESSAGES_TOOLS, "stop_sequences": ["END"], **common}
    head = {"role": "system", "content": "Be kind.\n\nBe brief."}
    chat = {"messages": [head, *AS_CHAT], "tools": SAME_TOOLS, "stop": ["END"], **common}
    same_prompt(http, engine, body | THINKING, chat | AS_TEMPLATE)
    same_prompt(http, engine, body, chat | OFF)


def test_the_beginning_of_an_answer_goes_on(http: Http, engine: FakeClient) -> None:
    begun = [USER, {"role": "assistant", "content": "It is"}]
    chat = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False, **OFF}
    same_prompt(http, engine, {"messages": begun}, chat)


def test_a_later_system_message_stays_in_its_place(http: Http, engine: FakeClient) -> None:
    said = [USER, {"role": "assistant", "content": "Rain."}]
    body = {"messages": [*said, {"role": "system", "content": "In French."}]}
    same_prompt(http, engine, body, {"messages": [*said, {"role": "user", "content": "In French."}], **OFF})


def test_the_answer_is_good_input(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: FULL
    first = ask(http, MESSAGES, BASE | {"tools": MESSAGES_TOOLS, **THINKING})
    ids = [block["id"] for block in first["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": use_id, "content": "x"} for use_id in ids]
    talk = [USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
    tools = [{"role": "tool", "tool_call_id": use_id, "content": "x"} for use_id in ids]
    chat = {"messages": [*AS_CHAT[:2], *tools], "tools": SAME_TOOLS, **AS_TEMPLATE}
    same_prompt(http, engine, {"messages": talk, "tools": MESSAGES_TOOLS, **THINKING}, chat)


def test_tool_choice(http: Http, engine: FakeClient) -> None:
    engine.reply = lambda k: f"{WEATHER}{PING}"
    body = BASE | {"tools": MESSAGES_TOOLS}
    assert len(ask(http, MESSAGES, body | {"tool_choice": {"type": "auto"}})["content"]) == 2
    single = {"type": "auto", "disable_parallel_tool_use": True}
    answer = ask(http, MESSAGES, body | {"tool_choice": single})
    assert (len(answer["content"]), answer["stop_reason"]) == (1, "tool_use")
    assert ask(http, MESSAGES, body | {"tool_choice": {"type": "none"}})["content"][0]["type"] == "text"
    engine.reply = lambda k: "</function></tool_call>"
    (use,) = ask(http, MESSAGES, body | {"tool_choice": {"type": "tool", "name": "ping"}})["content"]
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "ping", {})
    engine.reply = lambda k: "<function=ping>\n</function>\n</tool_call>"
    (use,) = ask(http, MESSAGES, body | {"tool_choice": {"type": "any"}})["content"]
    assert use["name"] == "ping"


@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ended(http: Http, engine: FakeClient, stream: bool) -> None:
    def ended(**fields: Any) -> tuple[str, str | None]:
        body = BASE | fields
        if not stream:
            answer = ask(http, MESSAGES, body)
        else:
            answer = next(event["delta"] for event in named_events(http, MESSAGES, body) if "usage" in event)
        return answer["stop_reason"], answer["stop_sequence"]

    engine.reply = lambda k: "One two three"
    assert ended() == ("end_turn", None)
    assert ended(stop_sequences=["three"]) == ("stop_sequence", "three")
    assert ended(max_tokens=1) == ("max_tokens", None)
    assert ended(max_tokens=10**6) == ("end_turn", None)
    engine.reply = lambda k: "word " * MAX_MODEL_LEN
    assert ended(max_tokens=10**6) == ("model_context_window_exceeded", None)


def test_counting(http: Http, engine: FakeClient) -> None:
    body = {"model": "tiny", "messages": TALK, "system": "Be kind.", "tools": MESSAGES_TOOLS}
    count = ask(http, COUNT, body)
    assert not engine.requests
    usage = ask(http, MESSAGES, body | {"max_tokens": 5})["usage"]
    assert count == {"input_tokens": usage["input_tokens"]}


def test_the_conversation_of_an_agent(http: Http, engine: FakeClient) -> None:
    headers = {"x-claude-code-session-id": "talk-1"}
    assert http.request("POST", MESSAGES, json=BASE, headers=headers).status_code == 200
    assert engine.options[-1].session_id == "talk-1"


def test_a_stream_that_breaks_ends_in_an_error(http: Http, engine: FakeClient) -> None:
    engine.error_after = 2
    *_, last = named_events(http, MESSAGES, BASE)
    assert last == {"type": "error", "error": {"type": "api_error", "message": "no page was free"}}


@pytest.mark.parametrize("stream", [False, True])
def test_failures_have_anthropics_words(http: Http, engine: FakeClient, stream: bool) -> None:
    def broken(k: int) -> str:
        raise ZeroDivisionError("secret")

    body = BASE | {"stream": stream}
    engine.refusal = OverloadedError("the queue is full")
    check(http, body, 429, "rate_limit_error", "queue")
    engine.refusal, engine.reply = None, broken
    check(http, body, 500, "api_error", "log")
    engine.is_alive = False
    check(http, body, 503, "overloaded_error", "engine")
    check(http, body | {"model": "other"}, 404, "not_found_error", "other")
    check(http, body | {"messages": [{"role": "user", "content": "word " * 600}]}, 400, ERROR, "prompt is too long")


ERROR = "invalid_request_error"


def check(http: Http, body: Any, status: int, kind: str, word: str, path: str = MESSAGES) -> None:
    response = http.post(path, body)
    assert response.status_code == status, response.text
    answer = response.json()
    assert set(answer) == {"type", "error"}
    assert (answer["type"], answer["error"]["type"]) == ("error", kind)
    assert word in answer["error"]["message"]
    assert "secret" not in response.text


def with_block(block: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": [{"type": "text", "text": "a"}, block]}]}


def with_result(content: Any) -> dict[str, Any]:
    return with_block({"type": "tool_result", "tool_use_id": "c", "content": content})


BLOCK = "messages[1].content[1]"
SCHEMA: dict[str, Any] = {"type": "object"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "a"}, "messages"),
    ({"messages": ["a"]}, "messages[0]"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    (with_block("a"), BLOCK),
    (with_block({}), f"{BLOCK}.type"),
    (with_block({"type": "text"}), f"{BLOCK}.text"),
    (with_block({"type": "image", "source": {}}), f"{BLOCK}.type"),
    (with_block({"type": "document"}), f"{BLOCK}.type"),
    (with_block({"type": "tool_use"}), f"{BLOCK}.type"),
    (with_block({"type": "tool_result"}), f"{BLOCK}.tool_use_id"),
    (with_result(5), f"{BLOCK}.content"),
    (with_result([{"type": "image"}]), f"{BLOCK}.content[0].type"),
    (with_block({"type": "tool_result", "tool_use_id": "c"}, "assistant"), f"{BLOCK}.type"),
    (with_block({"type": "tool_use", "name": "f", "input": {}}, "assistant"), f"{BLOCK}.id"),
    (with_block({"type": "tool_use", "id": "c", "input": {}}, "assistant"), f"{BLOCK}.name"),
    (with_block({"type": "tool_use", "id": "c", "name": "f"}, "assistant"), f"{BLOCK}.input"),
    (with_block({"type": "tool_use", "id": "c", "name": "f", "input": "{}"}, "assistant"), f"{BLOCK}.input"),
    (with_block({"type": "thinking"}, "assistant"), f"{BLOCK}.thinking"),
    ({"system": 5}, "system"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"system": ["a"]}, "system[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"input_schema": SCHEMA}]}, "tools[0].name"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
    ({"tools": [{"name": "f", "input_schema": SCHEMA, "description": 5}]}, "tools[0].description"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}, "tools": [{"name": "f", "input_schema": SCHEMA}]}, "tool_choice.name"),
    ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [{"name": "f", "input_schema": SCHEMA}]}, "tool_choice"),
    ({"thinking": {}}, "type"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 200}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": list("abcde")}, "stop_sequences"),
    ({"stream": "yes"}, "stream"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"container": "x"}, "container"),
    ({"n": 2}, "n"),
    ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_wrong_requests_name_the_field(http: Http, engine: FakeClient, fields: dict[str, Any], param: str) -> None:
    check(http, BASE | fields, 400, ERROR, param)
    assert not engine.requests


def test_other_methods_and_paths(http: Http) -> None:
    for response, status in ((http.get(MESSAGES), 405), (http.get(f"{MESSAGES}/batches"), 404)):
        assert response.status_code == status
        assert response.json()["type"] == "error"


def test_counting_checks_the_same(http: Http) -> None:
    check(http, {"messages": []}, 400, ERROR, "messages", COUNT)
    check(http, {"messages": [USER], "tools": [{"name": "f"}]}, 400, ERROR, "tools[0].input_schema", COUNT)
    check(http, {"model": "none", "messages": [USER]}, 404, "not_found_error", "none", COUNT)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": {"type": "auto"}, "metadata": {"user_id": "x"}, "service_tier": "auto"},
        {"context_management": {"edits": []}, "thinking": {"type": "disabled"}, "system": ""},
        {"mcp_servers": [], "container": None, "stop_sequences": [], "betas": ["x"]},
    ],
)
def test_what_agents_send_without_meaning_much(http: Http, fields: dict[str, Any]) -> None:
    assert ask(http, MESSAGES, BASE | fields)["stop_reason"] == "end_turn"
