"""POST /v1/responses, the way in: from OpenAI's items to a chat.

| item                         | becomes                                                                           |
| ---------------------------- | --------------------------------------------------------------------------------- |
| `message` (or just a role)   | a message; an assistant's is joined with the calls and thoughts next to it        |
| `reasoning`                  | the thought of the assistant's message that follows                               |
| `function_call`              | a call of the assistant's message before it                                       |
| `function_call_output`       | a tool's message                                                                  |

Of tools, the model gets the functions. `web_search` is left out of them and of the answer's `tools`: agents list it
whatever the server, and nothing here searches. Any other kind is refused by name, as is a choice of `web_search`.

Answers are not kept here, so that what refers to them is refused by name. A thought goes back to the model from
`content`; clients that only pass on `encrypted_content` get the thought in it, encoded and not secret, where they ask
for it by `include`. Thoughts that another server has encrypted cannot be read, and are left out.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from deltaserve.core.errors import RequestError, shown
from deltaserve.server.errors import NotOfferedError
from deltaserve.server.schema import ChatRequest, GenerationRequest, Range
from deltaserve.server.turns import Turns, chat_request, function, joined, text_at, typed

ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"
LEFT_OUT = ("web_search", "web_search_preview")
PACKED = "deltaserve:"
TEXT_PARTS = ("input_text", "output_text", "text")
ROLES = ("system", "developer", "user", "assistant")
NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
_POSITIVE = Range(1)


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class TextOptions(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesRequest(GenerationRequest, kw_only=True):
    """POST /v1/responses. Items and tools are looked into by this file."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    truncation: str | None = None
    top_logprobs: int | None = None


# Fields that this server cannot honour, the values that ask for nothing, and what to do instead.
REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("store", (False,), "answers are not kept here; leave it out or send false"),
    ("previous_response_id", (), "answers are not kept here; send the earlier items in input"),
    ("conversation", (), "conversations are not kept here; send the earlier items in input"),
    ("prompt", (), "prompts are not kept here; send their text in instructions and input"),
    ("background", (False,), "answers are not kept here; use stream"),
    ("truncation", ("disabled",), "nothing is left out of a conversation here; leave it out or send disabled"),
    ("top_logprobs", (0,), "log-probabilities are offered by /v1/chat/completions"),
    ("n", (1,), "a response is one answer; send several requests"),
)


def to_chat(request: ResponsesRequest) -> ChatRequest:
    """Raises RequestError naming the field."""
    _refuse(request)
    budget = request.max_output_tokens
    if budget is not None and not _POSITIVE.holds(budget):
        raise RequestError(f"max_output_tokens must be {_POSITIVE}, not {shown(budget)}", "max_output_tokens")
    values = {
        "messages": _messages(request),
        "max_tokens": budget,
        "tools": _tools(request.tools or ()) or None,
        "tool_choice": _tool_choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "chat_template_kwargs": request.chat_template_kwargs,
        "response_format": _format(request.text),
        "session_id": request.session_id or request.prompt_cache_key or None,
    }
    return chat_request(request, values)


def pack(thought: str) -> str:
    """A thought for clients that pass on what they need not read."""
    return PACKED + base64.b64encode(thought.encode("utf-8")).decode("ascii")


def unpack(packed: str) -> str:
    """Empty where it is not ours."""
    try:
        return base64.b64decode(packed.removeprefix(PACKED), validate=True).decode() if _is_ours(packed) else ""
    except (binascii.Error, ValueError):
        return ""


def _is_ours(packed: str) -> bool:
    return packed.startswith(PACKED)


def _refuse(request: ResponsesRequest) -> None:
    for name, harmless, remedy in REFUSED:
        value = getattr(request, name)
        if value is not None and value not in harmless:
            raise NotOfferedError(f"{name} was {shown(value)}: {remedy}", name)
    if LOGPROBS in (request.include or ()):
        place = f"include[{(request.include or []).index(LOGPROBS)}]"
        raise NotOfferedError(f"{place}: log-probabilities are offered by /v1/chat/completions", place)


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    turns = Turns((request.instructions or "",))
    if isinstance(request.input, str):
        turns.user(request.input)
    elif not request.input:
        raise RequestError("input must hold at least one item", "input")
    else:
        _add_items(turns, request.input)
    return turns.build()


def _add_items(turns: Turns, items: Sequence[Mapping[str, Any]]) -> None:
    for index, item in enumerate(items):
        path = f"input[{index}]"
        kind = item.get("type", "message" if "role" in item else None)
        add = READERS.get(kind) if isinstance(kind, str) else None
        if add is None:
            sentence = f"{path}.type must be one of {', '.join(READERS)}, not {shown(kind)}"
            raise NotOfferedError(sentence, f"{path}.type")
        add(turns, item, path)


def _add_message(turns: Turns, item: Mapping[str, Any], path: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise RequestError(f"{path}.role must be one of {', '.join(ROLES)}, not {shown(role)}", f"{path}.role")
    text = joined(item.get("content"), f"{path}.content", _part)
    if role == "assistant":
        turns.say(text, new=True)
    elif role == "user":
        turns.user(text)
    else:
        turns.system(text)


def _add_thought(turns: Turns, item: Mapping[str, Any], path: str) -> None:
    packed = item.get("encrypted_content")
    content = item.get("content")
    thought = joined(content, f"{path}.content", _thought) if content else ""
    if not thought and packed is not None:
        thought = unpack(typed((packed, f"{path}.encrypted_content"), str, "text"))
    if thought:
        turns.think(thought)


def _add_call(turns: Turns, item: Mapping[str, Any], path: str) -> None:
    call_id, name = text_at(item, "call_id", path), text_at(item, "name", path)
    turns.call(call_id, name, text_at(item, "arguments", path))


def _add_output(turns: Turns, item: Mapping[str, Any], path: str) -> None:
    turns.result(text_at(item, "call_id", path), joined(item.get("output"), f"{path}.output", _part))


READERS = {
    "message": _add_message,
    "reasoning": _add_thought,
    "function_call": _add_call,
    "function_call_output": _add_output,
}


def _part(part: Mapping[str, Any], path: str) -> str:
    kind = part.get("type")
    if kind == "refusal":
        return text_at(part, "refusal", path)
    if kind not in TEXT_PARTS:
        sentence = f"{path}.type: parts of type {shown(kind)} are not offered, only text"
        raise NotOfferedError(sentence, f"{path}.type")
    return text_at(part, "text", path)


def _thought(part: Mapping[str, Any], path: str) -> str:
    return text_at(part, "text", path)


def _tools(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    offered = ((tool, f"tools[{index}]") for index, tool in enumerate(tools) if not is_left_out(tool))
    return [_tool(tool, path) for tool, path in offered]


def is_left_out(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") in LEFT_OUT


def _tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        sentence = f"{path}.type: tools of type {shown(tool.get('type'))} are not offered, only function; leave it out"
        raise NotOfferedError(sentence, f"{path}.type")
    return function(tool, path, "parameters")


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    """A function is named without the object around it that chats have."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        sentence = f'tool_choice must be {{"type": "function", "name": ...}}, not {shown(choice)}'
        raise NotOfferedError(sentence, "tool_choice.type")
    return {"type": "function", "function": {"name": text_at(choice, "name", "tool_choice")}}


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    """`text.format` as a chat's `response_format`, which holds the schema one level deeper."""
    given = text.format if text else None
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}
