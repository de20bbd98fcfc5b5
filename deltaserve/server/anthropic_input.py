"""POST /v1/messages, the way in: from Anthropic's blocks to a chat.

| block                        | becomes                                                                            |
| ---------------------------- | ---------------------------------------------------------------------------------- |
| `text`                       | text of the message                                                                |
| `thinking`                   | the thought of the assistant's message; `redacted_thinking` is left out            |
| `tool_use`                   | a call of the assistant's message                                                  |
| `tool_result`                | a tool's message, before what else the user says                                   |

A last message of the assistant is a beginning that the answer goes on from. Thinking is off unless `thinking` asks for
it, as the format has it. A billing header that some clients put before the system prompt changes with every request and
says nothing to a model: it is dropped, as nothing after it could be found in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from deltaserve.core.errors import RequestError, shown
from deltaserve.server.errors import NotOfferedError
from deltaserve.server.schema import ChatRequest, GenerationRequest
from deltaserve.server.turns import Turns, chat_request, function, joined, text_at, typed

BILLING_HEADER = "x-anthropic-billing-header"
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
ROLES = ("user", "assistant", "system")
NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
}


class Thinking(msgspec.Struct):
    type: str
    budget_tokens: int | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountTokensRequest(GenerationRequest, kw_only=True):
    """POST /v1/messages/count_tokens. Messages and tools are looked into by this file."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None


def to_chat(request: CountTokensRequest) -> ChatRequest:
    """Without `max_tokens`, which `anthropic` fits into the context. Raises RequestError naming the field."""
    _refuse(request)
    turns = _turns(request)
    choice = request.tool_choice or {}
    values: dict[str, Any] = {
        "messages": turns.build(),
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())] or None,
        "tool_choice": _tool_choice(choice) if choice else None,
        "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") is True else None,
        "reasoning_effort": request.output_config.effort if request.output_config else None,
        "chat_template_kwargs": _thinking(request) | (request.chat_template_kwargs or {}),
        "thinking_token_budget": _budget(request),
        "response_format": _format(request.output_config),
    }
    if isinstance(request, MessagesRequest) and request.stop_sequences:
        values["stop"] = request.stop_sequences
    if turns.ends_in_text:
        values |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat_request(request, values)


def _refuse(request: CountTokensRequest) -> None:
    if isinstance(request, MessagesRequest):
        for name in ("mcp_servers", "container"):
            if getattr(request, name):
                raise NotOfferedError(f"{name}: nothing is run on this server; leave it out", name)
    if request.n not in (None, 1):
        raise NotOfferedError("n: a message is one answer; send several requests", "n")


def _turns(request: CountTokensRequest) -> Turns:
    if not request.messages:
        raise RequestError("messages must hold at least one message", "messages")
    turns = Turns(_system(request.system))
    for index, message in enumerate(request.messages):
        path = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise RequestError(f"{path}.role must be one of {', '.join(ROLES)}, not {shown(role)}", f"{path}.role")
        if role == "system":
            turns.system(joined(content, f"{path}.content", _text))
        elif role == "assistant":
            _add_assistant(turns, content, f"{path}.content")
        else:
            _add_user(turns, content, f"{path}.content")
    return turns


def _system(system: str | list[dict[str, Any]] | None) -> list[str]:
    if system is None or isinstance(system, str):
        return [system or ""]
    texts = [_text(block, f"system[{index}]") for index, block in enumerate(system)]
    return [text for text in texts if not text.startswith(BILLING_HEADER)]


def _add_user(turns: Turns, content: Any, path: str) -> None:
    """Text between results becomes one message with its neighbours."""
    said = ""
    is_said = False
    for block, place in _blocks(content, path):
        if block.get("type") == "tool_result":
            if is_said:
                turns.user(said)
            said, is_said = "", False
            _add_result(turns, block, place)
        else:
            said, is_said = said + _text(block, place), True
    if is_said:
        turns.user(said)


def _add_result(turns: Turns, block: Mapping[str, Any], path: str) -> None:
    content = block.get("content")
    call_id = text_at(block, "tool_use_id", path)
    turns.result(call_id, "" if content is None else joined(content, f"{path}.content", _text))


def _add_assistant(turns: Turns, content: Any, path: str) -> None:
    turns.new_assistant()
    for block, place in _blocks(content, path):
        kind = block.get("type")
        if kind == "thinking":
            turns.think(text_at(block, "thinking", place))
        elif kind == "tool_use":
            call_id, name = text_at(block, "id", place), text_at(block, "name", place)
            turns.call(call_id, name, typed((block.get("input"), f"{place}.input"), dict, "an object"))
        elif kind != "redacted_thinking":
            turns.say(_text(block, place))


def _blocks(content: Any, path: str) -> list[tuple[Mapping[str, Any], str]]:
    """The blocks and their places; text alone is one block."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, path)]
    blocks = typed((content, path), list, "text or a list of blocks")
    if not blocks:
        raise RequestError(f"{path} must hold at least one block", path)
    places = [(block, f"{path}[{index}]") for index, block in enumerate(blocks)]
    return [(typed(place, dict, "a block with a type"), place[1]) for place in places]


def _text(block: Mapping[str, Any], path: str) -> str:
    if block.get("type") != "text":
        sentence = f"{path}.type: blocks of type {shown(block.get('type'))} are not offered here, only text"
        raise NotOfferedError(sentence, f"{path}.type")
    return text_at(block, "text", path)


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        sentence = f"{path}.type: tools of type {shown(tool['type'])} are not run here, only custom ones; leave it out"
        raise NotOfferedError(sentence, f"{path}.type")
    typed((tool.get("input_schema"), f"{path}.input_schema"), dict, "a JSON schema")
    return function(tool, path, "input_schema")


def _tool_choice(choice: Mapping[str, Any]) -> str | dict[str, Any]:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": text_at(choice, "name", "tool_choice")}}
    if not isinstance(kind, str) or kind not in TOOL_CHOICES:
        names = ", ".join((*TOOL_CHOICES, "tool"))
        raise RequestError(f"tool_choice.type must be one of {names}, not {shown(kind)}", "tool_choice.type")
    return TOOL_CHOICES[kind]


def _thinking(request: CountTokensRequest) -> dict[str, Any]:
    kind = request.thinking.type if request.thinking else "disabled"
    if kind not in ("enabled", "disabled", "adaptive"):
        sentence = f"thinking.type must be one of enabled, disabled, adaptive, not {shown(kind)}"
        raise RequestError(sentence, "thinking.type")
    return {"enable_thinking": kind != "disabled"}


def _budget(request: CountTokensRequest) -> int | None:
    budget = request.thinking.budget_tokens if request.thinking else None
    if budget is None:
        return None
    if budget < 1 or (isinstance(request, MessagesRequest) and budget >= request.max_tokens):
        sentence = f"thinking.budget_tokens must be at least 1 and below max_tokens, not {shown(budget)}"
        raise RequestError(sentence, "thinking.budget_tokens")
    return budget


def _format(config: OutputConfig | None) -> dict[str, Any] | None:
    """`output_config.format` as a chat's `response_format`."""
    given = config.format if config else None
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {"name": "output", "strict": True, "schema": given.get("schema")}}
