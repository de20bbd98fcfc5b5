"""A checkpoint's chat template: from messages to the prompt's text.

The template is the checkpoint's own (`chat_template.jinja`, or `chat_template` inside `tokenizer_config.json`),
compiled once and rendered in jinja2's immutable sandbox, set up as `transformers` sets it up: blocks trimmed,
loop controls, a plain `tojson`, `raise_exception` and `strftime_now`. A template that refuses the messages gives a
RequestError with the template's own words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from deltaserve.core.errors import CheckpointError, RequestError

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# Marks the end of a message that is to be continued; the prompt is cut there.
CONTINUE_MARK = "\N{OBJECT REPLACEMENT CHARACTER}continue-here\N{OBJECT REPLACEMENT CHARACTER}"
RESERVED_KWARGS = frozenset(("messages", "tools", "chat_template", "tokenize", "return_dict"))


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """`special_tokens` are what templates may name: bos_token, eos_token, ... `source` is the template's text."""

    template: jinja2.Template
    special_tokens: dict[str, str] = field(default_factory=dict)
    source: str = ""

    @classmethod
    def from_source(cls, source: str, special_tokens: dict[str, str] | None = None) -> ChatTemplate:
        """Compile. A syntax error is a CheckpointError that names the line."""
        try:
            return cls(_environment().from_string(source), special_tokens or {}, source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template does not compile: line {error.lineno}: {error}") from error

    @classmethod
    def from_directory(cls, directory: Path, override: Path | None = None) -> ChatTemplate | None:
        """The checkpoint's template, or the file `override`; None if there is neither."""
        config = _read_tokenizer_config(directory)
        source = _template_source(directory, config, override)
        return None if source is None else cls.from_source(source, _special_tokens(config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `kwargs` are the request's `chat_template_kwargs`."""
        kwargs = dict(kwargs or {})
        for name in RESERVED_KWARGS & kwargs.keys():
            raise RequestError(f"chat_template_kwargs may not set {name!r}", f"chat_template_kwargs.{name}")
        if continue_final_message:
            messages = _marked(messages)
        values = {"add_generation_prompt": add_generation_prompt, **self.special_tokens, **kwargs}
        text = self._render({**values, "messages": list(messages), "tools": list(tools) if tools else None})
        return _cut_at_mark(text) if continue_final_message else text

    def _render(self, values: dict[str, Any]) -> str:
        try:
            return self.template.render(values)
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, LookupError, ArithmeticError) as error:
            raise RequestError(f"the chat template cannot render these messages: {error}", "messages") from error
        except RecursionError as error:
            raise RequestError("messages are nested too deep for the chat template", "messages") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter: no HTML escapes, keys in the order given."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _read_tokenizer_config(directory: Path) -> dict[str, Any]:
    path = directory / TOKENIZER_CONFIG_FILE
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return config


def _template_source(directory: Path, config: dict[str, Any], override: Path | None) -> str | None:
    if override is not None:
        if not override.is_file():
            raise CheckpointError(f"--chat-template: {override} is not a file")
        return override.read_text("utf-8")
    if (directory / TEMPLATE_FILE).is_file():
        return (directory / TEMPLATE_FILE).read_text("utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if source is None or isinstance(source, str):
        return source
    raise CheckpointError(f"chat_template in {directory / TOKENIZER_CONFIG_FILE} must be text")


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    last = messages[-1]
    if last["role"] != "assistant" or not last["content"]:
        raise RequestError(
            "continue_final_message needs a last message of role assistant with text to continue",
            f"messages[{len(messages) - 1}]",
        )
    return [*messages[:-1], {**last, "content": last["content"] + CONTINUE_MARK}]


def _cut_at_mark(text: str) -> str:
    head, mark, _ = text.rpartition(CONTINUE_MARK)
    if not mark:
        raise RequestError("the chat template drops the message that continue_final_message names", "messages")
    return head
