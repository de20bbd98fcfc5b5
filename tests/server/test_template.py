"""Where a chat template comes from, what it may do, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deltaserve.core.errors import CheckpointError, RequestError
from deltaserve.server.template import ChatTemplate

USER = {"role": "user", "content": "Hi"}


def render(source: str, messages: Any = (USER,), **kwargs: Any) -> str:
    return ChatTemplate.from_source(source).render(messages, kwargs=kwargs)


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": "inside {{ messages[0].content }}"},
        {"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "inside Hi"}]},
    ],
)
def test_template_inside_the_tokenizer_config(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    template = ChatTemplate.from_directory(tmp_path)
    assert template is not None
    assert template.render([USER]) == "inside Hi"


def test_own_file_wins_over_the_config_and_an_override_over_both(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "inside"}', "utf-8")
    (tmp_path / "chat_template.jinja").write_text("file", "utf-8")
    (tmp_path / "other.jinja").write_text("override", "utf-8")
    for override, text in ((None, "file"), (tmp_path / "other.jinja", "override")):
        template = ChatTemplate.from_directory(tmp_path, override)
        assert template is not None
        assert template.render([USER]) == text


def test_no_template(tmp_path: Path) -> None:
    assert ChatTemplate.from_directory(tmp_path) is None


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.jinja"):
        ChatTemplate.from_directory(tmp_path, tmp_path / "absent.jinja")
    (tmp_path / "tokenizer_config.json").write_text("{", "utf-8")
    with pytest.raises(CheckpointError, match="not JSON"):
        ChatTemplate.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 5}', "utf-8")
    with pytest.raises(CheckpointError, match="must be text"):
        ChatTemplate.from_directory(tmp_path)
    with pytest.raises(CheckpointError, match="line 2"):
        ChatTemplate.from_source("{# fine #}\n{% if %}")


def test_special_tokens_are_names_in_the_template(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    template = ChatTemplate.from_directory(tmp_path)
    assert template is not None
    assert template.render([USER]) == "<s></s>"


def test_kwargs_are_names_in_the_template_and_may_not_replace_the_messages() -> None:
    assert render("{{ mood }}", mood="fine") == "fine"
    for name in ("messages", "tools"):
        with pytest.raises(RequestError) as caught:
            ChatTemplate.from_source("x").render([USER], kwargs={name: []})
        assert caught.value.param == f"chat_template_kwargs.{name}"


def test_what_templates_expect_of_their_surroundings() -> None:
    assert render("{{ {'b': 1, 'a': '<é>'} | tojson }}") == '{"b": 1, "a": "<é>"}'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert render("{{ [{'a': 1}] | tojson(indent=1) }}") == '[\n {\n  "a": 1\n }\n]'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('No robots here') }}",
        "{{ messages[0].absent.field }}",
        "{{ messages[7].content }}{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ {}.update({1: 2}) }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_failures_of_a_template_are_the_requests(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_the_templates_own_words_reach_the_client() -> None:
    with pytest.raises(RequestError, match="No robots here"):
        render("{{ raise_exception('No robots here') }}")


def test_continuing_keeps_the_end_of_the_message_as_it_is() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
    template = ChatTemplate.from_source(source)
    messages = [USER, {"role": "assistant", "content": "Once upon \n"}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>Hi</user><assistant>Once upon \n"
    with pytest.raises(RequestError, match="drops the message"):
        ChatTemplate.from_source("nothing").render(messages, continue_final_message=True)
