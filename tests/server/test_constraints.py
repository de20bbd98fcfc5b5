"""What the fields on the shape of an answer become at the engine, and every way to get them wrong."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltaserve.core.types import GrammarRule, SamplingParams, Thinking
from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.grammar.compiler import Grammars, choice_text, json_schema_text, lark_text, regex_text
from deltaserve.server import constraints
from deltaserve.server.app import create_app
from deltaserve.server.served import Served
from deltaserve.server.template import ChatTemplate
from tests.server.fakes import FakeClient, Http
from tests.server.test_bad_requests import check

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
OBJECT = json_schema_text({"type": "object"})


def sent(http: Http, engine: FakeClient, path: str = CHAT, **fields: Any) -> SamplingParams:
    """What the engine was asked with."""
    body = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    response = http.post(path, body | fields)
    assert response.status_code == 200, response.text
    return engine.requests[-1][1]


def switched(on: bool) -> dict[str, Any]:
    return {"chat_template_kwargs": {"enable_thinking": on}}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OBJECT),
        ({"response_format": FORMAT}, json_schema_text(SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, json_schema_text(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, json_schema_text(SCHEMA)),
        ({"structured_outputs": {"json": {}}}, json_schema_text({})),
        ({"structured_outputs": {"json_object": True}}, OBJECT),
        ({"structured_outputs": {"json_object": True, "regex": None}, "response_format": {"type": "text"}}, OBJECT),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            json_schema_text(SCHEMA, has_blanks=False),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]?"}},
            json_schema_text(SCHEMA, blank_pattern="[ ]?"),
        ),
        ({"structured_outputs": {"regex": "[0-9]+"}}, regex_text("[0-9]+")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, choice_text(["yes", "no"])),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, lark_text('root ::= "a"')),
    ],
    ids=lambda value: str(value)[:60],
)
def test_every_form_reaches_the_engine(
    http: Http, engine: FakeClient, path: str, fields: dict[str, Any], text: str | None
) -> None:
    params = sent(http, engine, path, **fields)
    assert params.grammar == (None if text is None else GrammarRule(text))


def test_the_grammar_begins_where_the_prompt_says(http: Http, engine: FakeClient, tokenizer: Tokenizer) -> None:
    """Thinking open, closed, and cut short by the client's own words."""
    end, start = tokenizer.token_to_id("</think>"), tokenizer.token_to_id("<think>")
    assert end is not None and start is not None
    form = {"response_format": FORMAT}
    assert sent(http, engine, **form, **switched(True)).thinking == Thinking(end, start)
    assert sent(http, engine, **form, **switched(False)).thinking is None
    begun = {"add_generation_prompt": False, "continue_final_message": True}
    for words, is_thinking in (("<think>\nWell", True), ("<think>\nWell\n</think>\n\n{", False)):
        messages = [*HELLO, {"role": "assistant", "content": words}]
        params = sent(http, engine, messages=messages, **form, **begun)
        assert (params.thinking is not None) == is_thinking
    assert sent(http, engine, **switched(True)).thinking is None  # nothing needs to know


def test_a_template_that_leaves_thinking_to_the_model(
    served: Served, engine: FakeClient, sample_checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "template.jinja"
    assert served.template is not None
    file.write_text(served.template.source.replace("{{- '<think>\\n' -}}", ""), "utf-8")
    template = ChatTemplate.from_directory(sample_checkpoint, file)
    http = Http(create_app(replace(served, template=template)))
    thinking = sent(http, engine, response_format=FORMAT, **switched(True)).thinking
    assert thinking is not None and not thinking.is_open


def test_a_thinking_budget(http: Http, engine: FakeClient) -> None:
    for budget in (0, 7):
        thinking = sent(http, engine, thinking_token_budget=budget, **switched(True)).thinking
        assert thinking is not None and (thinking.budget, thinking.is_open) == (budget, True)
    assert sent(http, engine, thinking_token_budget=7, **switched(False)).thinking is None
    both = sent(http, engine, thinking_token_budget=7, response_format=FORMAT, **switched(True))
    assert both.grammar is not None and both.thinking is not None and both.thinking.budget == 7


def test_tools_that_may_be_called_are_a_way_out(http: Http, engine: FakeClient, tokenizer: Tokenizer) -> None:
    call = tokenizer.token_to_id("<tool_call>")
    rule = sent(http, engine, response_format=FORMAT, tools=[TOOL]).grammar
    assert rule == GrammarRule(json_schema_text(SCHEMA), (call,))
    assert sent(http, engine, response_format=FORMAT, tools=[TOOL], tool_choice="none").grammar == replace(
        rule, exit_ids=()
    )
    assert sent(http, engine, response_format=FORMAT, tools=[TOOL], tool_choice="required").grammar is None


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_bad_words_and_allowed_tokens(http: Http, engine: FakeClient, tokenizer: Tokenizer, path: str) -> None:
    """A word is forbidden with and without a space before it, however it was written."""
    for word in ("unlikely", "  unlikely"):
        params = sent(http, engine, path, bad_words=[word, "unlikely"], allowed_token_ids=[5, 3, 5])
        assert params.bad_words == tuple(tuple(tokenizer.encode(text)) for text in ("unlikely", " unlikely"))
        assert params.allowed_token_ids == (5, 3)
    params = sent(http, engine, path, bad_words=[])
    assert (params.bad_words, params.allowed_token_ids) == ((), ())


def formatted(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    return schema


FORMAT_SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": []}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, FORMAT_SCHEMA),
        (formatted("text"), FORMAT_SCHEMA),
        (formatted(True), FORMAT_SCHEMA),
        (formatted({"type": "strin"}), FORMAT_SCHEMA),
        (formatted({"type": "array", "uniqueItems": True}), FORMAT_SCHEMA),
        (formatted({"$ref": "http://localhost/x.json"}), FORMAT_SCHEMA),
        (formatted({"type": "string", "pattern": "^(a{1000}){1000}$"}), FORMAT_SCHEMA),
        (formatted({"enum": ["x" * 200_000]}), FORMAT_SCHEMA),
        (formatted(nested(400)), FORMAT_SCHEMA),
        ({"structured_outputs": []}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[" * 50_000}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a"] * 5000}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"grammar": "start: absent"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": "("}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "structured_outputs"),
        ({"response_format": FORMAT, "min_tokens": 2}, "min_tokens"),
        ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos"),
        ({"bad_words": "a"}, "bad_words"),
        ({"bad_words": [1]}, "bad_words[0]"),
        ({"bad_words": ["a", ""]}, "bad_words[1]"),
        ({"bad_words": ["  "]}, "bad_words[0]"),
        ({"bad_words": ["a"] * 1025}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [5, -1]}, "allowed_token_ids[1]"),
        ({"allowed_token_ids": [1024]}, "allowed_token_ids[0]"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": 1 << 40}, "thinking_token_budget"),
        ({"thinking_token_budget": 1.5}, "thinking_token_budget"),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_cannot_be_done_is_refused_by_field(
    http: Http, engine: FakeClient, path: str, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": HELLO} if path == CHAT else {"prompt": "Hello"}
    message = check(http.post(path, body | fields), 400, param)
    assert len(message) < 600
    assert not engine.requests


def test_structural_tags_are_not_offered(http: Http, engine: FakeClient) -> None:
    outputs = {"structured_outputs": {"structural_tag": "{}"}}
    for fields, param in (
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        (outputs, "structured_outputs.structural_tag"),
    ):
        check(http.post(CHAT, {"messages": HELLO} | fields), 400, param, "unsupported_parameter")
    assert not engine.requests


def test_guided_fields_name_their_successor(http: Http) -> None:
    for kind in ("json", "regex", "choice", "grammar"):
        body = {"messages": HELLO, f"guided_{kind}": "x"}
        message = check(http.post(CHAT, body), 400, f"guided_{kind}", "unsupported_parameter")
        assert f"structured_outputs.{kind}" in message


def test_what_only_some_requests_can_have(http: Http, served: Served, engine: FakeClient) -> None:
    budget = {"thinking_token_budget": 3}
    check(http.post(TEXT, {"prompt": "Hello"} | budget), 400, "thinking_token_budget")
    plain = Http(create_app(replace(served, formats=replace(served.formats, has_thinking=False))))
    check(plain.post(CHAT, {"messages": HELLO} | budget), 400, "thinking_token_budget")
    forced = {"messages": HELLO, "tools": [TOOL], "tool_choice": "required"}
    outputs = {"structured_outputs": {"regex": "a"}}
    check(http.post(CHAT, forced | outputs), 400, "structured_outputs")
    unable = Http(create_app(replace(served, grammars=None)))
    check(unable.post(CHAT, {"messages": HELLO} | outputs), 400, "structured_outputs.regex", "unsupported_parameter")
    assert not engine.requests


def test_the_other_chat_formats_reach_the_engine_too(http: Http, engine: FakeClient) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": "Hello", "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        "/v1/messages": {
            "model": "tiny",
            "max_tokens": 50,
            "messages": HELLO,
            "thinking": {"type": "enabled", "budget_tokens": 20},
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    }
    for path, body in bodies.items():
        response = http.post(path, body)
        assert response.status_code == 200, response.text
        assert engine.requests[-1][1].grammar == GrammarRule(json_schema_text(SCHEMA))
    thinking = engine.requests[-1][1].thinking
    assert thinking is not None and thinking.budget == 20


class Endless(Grammars):
    """Compiles for longer than anybody waits."""

    def check(self, text: str) -> None:
        time.sleep(0.2)


def test_nobody_waits_for_ever_for_a_grammar(
    served: Served, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert served.grammars is not None
    monkeypatch.setattr(constraints, "MAX_COMPILE_S", 0.01)
    http = Http(create_app(replace(served, grammars=Endless(served.grammars.load))))
    message = check(http.post(CHAT, {"messages": HELLO, "response_format": FORMAT}), 400, FORMAT_SCHEMA)
    assert "0.01 s" in message and not engine.requests
