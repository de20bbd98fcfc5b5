"""Chat messages: checked, and brought to the shape that chat templates expect.

Templates want: a system role (not `developer`), content as text, tool-call arguments as a mapping (clients send a JSON
string), and earlier thinking under `reasoning_content` (clients may say `reasoning`). Fields that this file does not
know pass through.

Arguments that are not JSON come back from clients that were sent a call cut off at max_tokens. They are the model's
own text and no mistake of the client's, so the template gets them, as one argument named `arguments`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from deltaserve.core.errors import RequestError, shown
from deltaserve.server.errors import NotOfferedError

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")
Message = dict[str, Any]


def normalize_messages(messages: Sequence[Message]) -> list[Message]:
    """New messages; the ones given are left alone."""
    if not messages:
        raise RequestError("messages must hold at least one message", "messages")
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_tools(tools: Sequence[dict[str, Any]] | None) -> None:
    """Each tool must be `{"type": "function", "function": {"name": ...}}`."""
    if tools is not None and not tools:
        raise RequestError("tools must hold at least one tool, or be left out", "tools")
    for index, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise RequestError(f'tools[{index}] must be {{"type": "function", "function": ...}}', f"tools[{index}]")
        if not isinstance(function.get("name"), str) or not function["name"].strip():
            raise RequestError(f"tools[{index}].function.name must be text", f"tools[{index}].function.name")
        if not isinstance(function.get("parameters") or {}, dict):
            path = f"tools[{index}].function.parameters"
            raise RequestError(f"{path} must be a JSON schema, not {shown(function['parameters'])}", path)


def _normalize(message: Message, path: str) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{path}.role must be one of {', '.join(ROLES)}, not {shown(role)}", f"{path}.role")
    if "tool_calls" in message and role != "assistant":
        raise RequestError(f"{path}.tool_calls: only an assistant calls tools", f"{path}.tool_calls")
    normal = {name: value for name, value in message.items() if name not in ("tool_calls", "reasoning")}
    normal["role"] = "system" if role == "developer" else role
    normal["content"] = _content(message.get("content"), role, f"{path}.content")
    for name in ("reasoning", "reasoning_content"):
        if message.get(name) is not None:
            normal["reasoning_content"] = _text(message[name], f"{path}.{name}")
    calls = message.get("tool_calls")
    if calls:
        normal["tool_calls"] = _tool_calls(calls, f"{path}.tool_calls")
    return normal


def _content(content: Any, role: str, path: str) -> str:
    if content is None:
        if role == "assistant":
            return ""
        raise RequestError(f"{path} is required for role {role}", path)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{path} must be text or a list of text parts, not {shown(content)}", path)
    return "".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RequestError(f"{path} must be a part with a type, not {shown(part)}", path)
    if part["type"] not in TEXT_PARTS:
        sentence = f"{path}: parts of type {shown(part['type'])} are not offered, only text"
        raise NotOfferedError(sentence, f"{path}.type")
    return _text(part.get("text"), f"{path}.text")


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{path} must be text, not {shown(value)}", path)
    return value


def _tool_calls(calls: Any, path: str) -> list[Message]:
    if not isinstance(calls, list):
        raise RequestError(f"{path} must be a list, not {shown(calls)}", path)
    return [_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, path: str) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError(f"{path}.function must be an object, not {shown(function)}", f"{path}.function")
    name = _text(function.get("name"), f"{path}.function.name")
    arguments = _arguments(function.get("arguments"), f"{path}.function.arguments")
    return {**call, "function": {**function, "name": name, "arguments": arguments}}


def _arguments(arguments: Any, path: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
        except msgspec.DecodeError:
            return {"arguments": arguments}
        except RecursionError:
            raise RequestError(f"{path} is nested too deep", path) from None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise RequestError(f"{path} must be a JSON object, not {shown(arguments)}", path)
    return arguments
