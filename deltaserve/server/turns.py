"""From the items and blocks of agents' formats to chat messages, so that all formats are rendered by one template.

An assistant's thought, text and calls come as separate items; those of one turn become one message, as chat clients
send it. A system message that is not the first becomes a user's message where it stands: templates of this family
refuse it elsewhere, and moving it to the front would change a prefix that is cached. System texts before everything
else are one message, with a blank line between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from deltaserve.core.errors import RequestError, shown
from deltaserve.server.schema import ChatRequest, GenerationRequest

Message = dict[str, Any]
Place = tuple[Any, str]  # a value, and the path by which the client would name it
GAP = "\n\n"
# The fields that a chat takes over from another format as they are; the rest of GenerationRequest is chat's alone.
SHARED = tuple(
    name
    for name in GenerationRequest.__struct_fields__
    if name not in ("n", "max_tokens", "stream_options", "prompt_logprobs", "return_token_ids")
)
T = TypeVar("T")


class Turns:
    """Messages as they grow. `system` is what stands before all of them."""

    def __init__(self, system: Iterable[str] = ()) -> None:
        self.messages: list[Message] = []
        self._system = [text for text in system if text]
        self._last = ""  # what the assistant's message got last: reasoning, text or call

    def build(self) -> list[Message]:
        head = [{"role": "system", "content": GAP.join(self._system)}] if self._system else []
        return head + self.messages

    def system(self, text: str) -> None:
        if self.messages:
            self.user(text)
        elif text:
            self._system.append(text)

    def user(self, text: str) -> None:
        self._add({"role": "user", "content": text})

    def result(self, call_id: str, text: str) -> None:
        self._add({"role": "tool", "tool_call_id": call_id, "content": text})

    def think(self, text: str) -> None:
        message = self._assistant(new=self._last in ("text", "call"))
        message["reasoning_content"] = message.get("reasoning_content", "") + text
        self._last = "reasoning"

    def say(self, text: str, *, new: bool = False) -> None:
        self._assistant(new=new and self._last == "text")["content"] += text
        self._last = "text"

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._assistant(new=False).setdefault("tool_calls", []).append(call)
        self._last = "call"

    def new_assistant(self) -> None:
        """What the assistant does next begins a message of its own."""
        self._last = ""

    @property
    def ends_in_text(self) -> bool:
        """Whether the last message is the assistant's, with text that an answer could go on from."""
        last = self.messages[-1] if self.messages else {}
        return last.get("role") == "assistant" and bool(last["content"]) and not last.get("tool_calls")

    def _assistant(self, *, new: bool) -> Message:
        """The assistant's message that is being written."""
        if new or not self._last:
            self._add({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _add(self, message: Message) -> None:
        self.messages.append(message)
        self._last = ""


def chat_request(body: GenerationRequest, values: Mapping[str, Any]) -> ChatRequest:
    """`values` are what the format says in words of its own. Their types were checked."""
    return ChatRequest(**{**{name: getattr(body, name) for name in SHARED}, **values})


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """An error about a chat's field, told of the field that it came from. A longer name stands before its beginning."""
    param = error.param or ""
    name = next((name for name in names if f"{param}.".startswith(f"{name}.")), None)
    if name is None:
        return error
    ours = names[name] + param.removeprefix(name)
    message = error.message
    return type(error)(ours + message.removeprefix(param) if message.startswith(param) else message, ours)


def typed(place: Place, kind: type[T], word: str) -> T:
    """The value, which must be of `kind`, in a `word` for people."""
    value, path = place
    if value is None:
        raise RequestError(f"{path} is required", path)
    if not isinstance(value, kind):
        raise RequestError(f"{path} must be {word}, not {shown(value)}", path)
    return value


def text_at(item: Mapping[str, Any], name: str, path: str) -> str:
    return typed((item.get(name), f"{path}.{name}"), str, "text")


def joined(value: Any, path: str, part: Callable[[Mapping[str, Any], str], str]) -> str:
    """Text, or a list of parts, each read by `part`."""
    if isinstance(value, str):
        return value
    parts = typed((value, path), list, "text or a list")
    places = ((item, f"{path}[{index}]") for index, item in enumerate(parts))
    return "".join(part(typed(place, dict, "an object with a type"), place[1]) for place in places)


def function(tool: Mapping[str, Any], path: str, schema_field: str) -> dict[str, Any]:
    """A tool in the shape of chats. `schema_field` is what the format calls the parameters' schema."""
    name = text_at(tool, "name", path)
    if not name.strip():
        raise RequestError(f"{path}.name must not be empty", f"{path}.name")
    described = tool.get("description")
    fields: dict[str, Any] = {"name": name}
    if described is not None:
        fields["description"] = typed((described, f"{path}.description"), str, "text")
    if tool.get(schema_field) is not None:
        fields["parameters"] = typed((tool[schema_field], f"{path}.{schema_field}"), dict, "a JSON schema")
    return {"type": "function", "function": fields}
