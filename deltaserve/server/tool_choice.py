"""What a request's `tools`, `tool_choice` and `parallel_tool_calls` come to.

| tool_choice         | the tools are shown | calls are read  | the turn begins with                      |
| ------------------- | ------------------- | --------------- | ----------------------------------------- |
| none                | no                  | no              |                                           |
| auto, or left out   | yes                 | yes             |                                           |
| required            | yes                 | yes             | `<tool_call>`                             |
| a function's name   | yes                 | the first one   | `<tool_call>` and the name, in its format |

A turn that begins with a call has no thinking. For a named function the name is certain; the arguments are the
model's own, not held to the schema. `required` leaves the name to the model too, unless there is only one tool; an
answer that makes no call after all stays text. `parallel_tool_calls` false ends the answer after the first call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deltaserve.core.errors import RequestError, shown
from deltaserve.server.errors import NotOfferedError
from deltaserve.server.parsers.formats import Formats, ToolFormat
from deltaserve.server.parsers.marks import THINK, THINK_END
from deltaserve.server.parsers.message import MessageReader
from deltaserve.server.parsers.reasoning import ReasoningSplitter, State
from deltaserve.server.parsers.tools import make_tools
from deltaserve.server.schema import ChatRequest, TokenizeRequest

CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """`shown` are the tools that the template gets; `format` None: calls stay text; `opening` begins the turn."""

    shown: Sequence[dict[str, Any]] = ()
    format: ToolFormat | None = None
    opening: str = ""
    is_single: bool = False

    @property
    def reads_calls(self) -> bool:
        return self.format is not None and bool(self.shown)

    def begin(self, prompt: str) -> str:
        """The rendered prompt with the opening; thinking that it leaves open is closed first, as if switched off."""
        if not self.opening:
            return prompt
        return re.sub(rf"{THINK}\s*\Z", f"{THINK}\n\n{THINK_END}\n\n", prompt) + self.opening

    def reader(self, state: State) -> MessageReader:
        """A reader of one choice, whose thinking starts in `state`."""
        if self.format is None or not self.reads_calls:
            return MessageReader(ReasoningSplitter(state))
        tools = make_tools(self.shown)
        calls = self.format.splitter(tools, is_single=self.is_single)
        return MessageReader(ReasoningSplitter(state, tools), calls, self.opening)


def plan_tools(request: ChatRequest | TokenizeRequest, formats: Formats) -> ToolPlan:
    """Raises RequestError naming the field. The tools themselves are checked by `messages.check_tools`."""
    tools, choice = request.tools or (), request.tool_choice
    name = _name(choice) if isinstance(choice, dict) else None
    if isinstance(choice, str) and choice not in CHOICES:
        raise RequestError(
            f"tool_choice must be one of {', '.join(CHOICES)}, or name a function, not {shown(choice)}", "tool_choice"
        )
    if choice == "none":
        return ToolPlan()
    is_single = isinstance(request, ChatRequest) and request.parallel_tool_calls is False
    if choice in (None, "auto"):
        return ToolPlan(tools, formats.tools, is_single=is_single)
    names = [tool["function"]["name"] for tool in tools]
    _check_forced(request, names, name, formats)
    assert formats.tools is not None
    if name is None and len(names) == 1:
        name = names[0]
    opening = formats.tools.opening(name)
    return ToolPlan(tools, formats.tools, opening, is_single or choice != "required")


def _check_forced(request: ChatRequest | TokenizeRequest, names: list[str], name: str | None, formats: Formats) -> None:
    """A call that must be made needs tools, a format, and a turn of its own."""
    if not names:
        raise RequestError("tool_choice needs tools", "tool_choice")
    if name is not None and name not in names:
        raise RequestError(f"tool_choice names {shown(name)}, which is not one of the tools", "tool_choice")
    if formats.tools is None:
        raise NotOfferedError(
            "tool_choice can only be none or auto: no format of tool calls is known for this model; start the server "
            "with --tool-call-parser",
            "tool_choice",
        )
    if request.continue_final_message or request.add_generation_prompt is False:
        raise RequestError("a tool_choice that makes a call needs add_generation_prompt", "tool_choice")


def _name(choice: dict[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        sentence = f'tool_choice must be {{"type": "function", "function": {{"name": ...}}}}, not {shown(choice)}'
        raise RequestError(sentence, "tool_choice")
    return name
