"""Conversations, and their text in the checkpoint's chat format with a weight for every part.

`render` writes what `models/tiny/chat_template.jinja` writes, only faster; a test holds them equal. Weights say how
much a token counts in the loss: what the assistant writes counts fully, what others write little (so that the model
can still continue it), filler and markers that the server writes itself not at all.

A conversation thinks in every turn or in none. Each assistant turn therefore carries both its thought and, where they
differ, the answer that it gives without one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from training.draw import Draw

Parts = list[tuple[str, float]]
Value = str | int | float | bool

ANSWER = 1.0
SPOKEN = 0.01
GIVEN = 0.0

TOOLS_HEAD = "# Tools\n\nThese functions can be called:\n\n<tools>"
TOOLS_TAIL = (
    "\n</tools>\n\nA call is written like this, one parameter after the other:\n\n"
    "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>"
)
NO_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: Mapping[str, Value]

    def text(self) -> str:
        parameters = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for key, value in self.arguments.items()
        )
        return f"<tool_call>\n<function={self.name}>\n{parameters}</function>\n</tool_call>"


@dataclass(frozen=True, slots=True)
class Turn:
    """`text_unthought` is the answer without thinking where it differs. `weight` overrides the role's."""

    role: str
    text: str = ""
    thought: str = ""
    text_unthought: str | None = None
    calls: tuple[Call, ...] = ()
    weight: float | None = None

    def answer(self, thinking: bool) -> str:
        """What the assistant writes after its thought."""
        text = self.text if thinking or self.text_unthought is None else self.text_unthought
        calls = "\n".join(call.text() for call in self.calls)
        return f"{text}\n\n{calls}" if text and calls else text or calls


def user(text: str, weight: float | None = None) -> Turn:
    return Turn("user", text, weight=weight)


def assistant(
    text: str, thought: str = "This is simple.", unthought: str | None = None, calls: Sequence[Call] = ()
) -> Turn:
    return Turn("assistant", text, thought, unthought, tuple(calls))


@dataclass(slots=True)
class Conversation:
    """`tools` are the JSON objects, one line each. `preserve` keeps the thoughts of earlier turns in the prompt."""

    skill: str
    turns: list[Turn]
    system: str = ""
    tools: Sequence[str] = ()
    thinking: bool = False
    preserve: bool = True
    key: str = field(default="")

    def parts(self) -> Parts:
        """The whole conversation as text with weights."""
        parts = self._opening()
        last_query = max(i for i, turn in enumerate(self.turns) if turn.role == "user")
        for index, turn in enumerate(self.turns):
            if turn.role == "assistant":
                self._add_answer(parts, turn, self.preserve or index > last_query)
            elif turn.role == "user":
                parts.append(("<|im_start|>user\n", GIVEN))
                parts.append((turn.text, SPOKEN if turn.weight is None else turn.weight))
                parts.append(("<|im_end|>\n", GIVEN))
            else:
                self._add_result(parts, index)
        return parts

    def prompt(self) -> str:
        """What the server would send for the last answer."""
        before = Conversation(self.skill, self.turns[:-1], self.system, self.tools, self.thinking, self.preserve)
        text = "".join(text for text, _ in before.parts())
        return text + "<|im_start|>assistant\n" + ("<think>\n" if self.thinking else NO_THOUGHT)

    def expected(self) -> str:
        """The last answer, thought included."""
        last = self.turns[-1]
        thought = f"{last.thought}\n</think>\n\n" if self.thinking else ""
        return thought + last.answer(self.thinking)

    def messages(self) -> list[dict[str, Any]]:
        """As a client sends them, the last answer included."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        return messages + [self._message(turn) for turn in self.turns]

    def _message(self, turn: Turn) -> dict[str, Any]:
        if turn.role != "assistant":
            return {"role": turn.role, "content": turn.text}
        text = turn.text if self.thinking or turn.text_unthought is None else turn.text_unthought
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.thinking:
            message["reasoning_content"] = turn.thought
        if turn.calls:
            calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in turn.calls]
            message["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        return message

    def _opening(self) -> Parts:
        if not self.tools and not self.system:
            return []
        text = self.system
        if self.tools:
            tools = TOOLS_HEAD + "".join("\n" + tool for tool in self.tools) + TOOLS_TAIL
            text = f"{tools}\n\n{text}" if text else tools
        return [("<|im_start|>system\n", GIVEN), (text, GIVEN if self.tools else SPOKEN), ("<|im_end|>\n", GIVEN)]

    def _add_answer(self, parts: Parts, turn: Turn, shows_thought: bool) -> None:
        parts.append(("<|im_start|>assistant\n", GIVEN))
        text = turn.answer(self.thinking)
        if shows_thought and self.thinking:
            parts.append(("<think>\n", GIVEN))
            text = f"{turn.thought}\n</think>\n\n{text}"
        elif shows_thought:
            parts.append((NO_THOUGHT, GIVEN))
        parts.append((text + "<|im_end|>", ANSWER))
        parts.append(("\n", GIVEN))

    def _add_result(self, parts: Parts, index: int) -> None:
        if index == 0 or self.turns[index - 1].role != "tool":
            parts.append(("<|im_start|>user", GIVEN))
        parts.append((f"\n<tool_response>\n{self.turns[index].text}\n</tool_response>", GIVEN))
        if index + 1 == len(self.turns) or self.turns[index + 1].role != "tool":
            parts.append(("<|im_end|>\n", GIVEN))


def casual(draw: Draw, text: str) -> str:
    """A question as people type it: sometimes in small letters, sometimes without its mark."""
    kind = draw.random()
    if kind < 0.75:
        return text
    if kind < 0.85:
        return text.lower()
    bare = text.rstrip("?.!")
    return bare if kind < 0.93 else bare.lower()
