"""Held-out questions with their one right answer, by skill: what scores are made of.

Nothing in them was seen in training: code words, operands, tool names, lists and wordings come from the held-out side.
The answer to compare with includes the thought where the case thinks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from training.chat import Conversation
from training.data import Source
from training.draw import Draw
from training.encoder import Encoder, shared_encoder
from training.tasks import recall, tools

END_OF_TURN = "<|im_end|>"
DEPTHS = (0.1, 0.5, 0.9)
# What a needle's answer may take of the context, and by how much a text is shortened until it fits.
ANSWER_ROOM = 48
SHORTER = 0.985

Example = tuple[list[int], list[int]]
Maker = Callable[[Source], Conversation]


@dataclass(frozen=True, slots=True)
class Case:
    skill: str
    prompt: str
    answer: str

    def is_exact(self, text: str) -> bool:
        return text == self.answer

    def is_right(self, text: str) -> bool:
        """The looser measure: for objects the right keys and types, else the part after the thought."""
        if self.skill == "objects":
            return _kinds(text) == _kinds(self.answer) is not None
        return _said(text) == _said(self.answer)


def _spoken(skill: str, thinking: bool, source: Source) -> Conversation:
    made = source.conversation(skill)
    made.thinking, made.preserve = thinking, True
    return made


def _ending(wanted: Callable[[Conversation], bool], source: Source) -> Conversation:
    """A tool conversation whose last answer is of the wanted kind."""
    while True:
        made = _spoken("tools", False, source)
        if wanted(made):
            return made


def _num_calls(made: Conversation) -> int:
    return len(made.turns[-1].calls)


SKILLS: dict[str, Maker] = {
    "facts": partial(_spoken, "facts", False),
    "deltaserve": partial(_spoken, "deltaserve", False),
    "chat": partial(_spoken, "chat", False),
    "unknown": partial(_spoken, "unknown", False),
    "mixed": partial(_spoken, "mixed", False),
    "where": partial(_spoken, "where", False),
    "story": partial(_spoken, "story", False),
    "copy": partial(_spoken, "copy", False),
    "lists": partial(_spoken, "lists", False),
    "sums_thinking": partial(_spoken, "sums", True),
    "sums": partial(_spoken, "sums", False),
    "tool_call": partial(_ending, lambda made: _num_calls(made) == 1),
    "tool_calls": partial(_ending, lambda made: _num_calls(made) > 1),
    "tool_result": partial(_ending, lambda made: made.turns[-2].role == "tool"),
    "tool_none": partial(_ending, lambda made: made.turns[-1].text == tools.NO_TOOL),
    "objects": partial(_spoken, "objects", False),
    "system": partial(_spoken, "system", False),
    "code": partial(_spoken, "code", False),
}
# Of a given length, at several depths.
NEEDLE = "needle"


def cases(tokenizer_path: Path | str, skill: str, count: int, seed: int = 0, context: int | None = None) -> list[Case]:
    """`count` of this skill; `context` is for the needle alone: as many tokens as prompt and answer may take."""
    draw = Draw("heldout", seed)
    if skill == NEEDLE:
        assert context is not None, "a needle needs the length of its text"
        encode = shared_encoder(str(tokenizer_path))
        filler = recall.Filler(draw, lambda text: len(encode(text)))
        depths = [DEPTHS[index % len(DEPTHS)] for index in range(count)]
        return [_needle(draw, filler, encode, context, depth) for depth in depths]
    source = Source(draw, longest=600)
    made = [SKILLS[skill](source) for _ in range(count)]
    return [Case(skill, conversation.prompt(), conversation.expected()) for conversation in made]


def heldout_examples(
    tokenizer_path: Path | str, skill: str, count: int, seed: int = 0, context: int | None = None
) -> list[Example]:
    """The same as ids of prompt and answer, with the token that ends the turn."""
    encode = shared_encoder(str(tokenizer_path))
    found = cases(tokenizer_path, skill, count, seed, context)
    return [(encode(case.prompt), encode(case.answer + END_OF_TURN)) for case in found]


def _needle(draw: Draw, filler: recall.Filler, encode: Encoder, context: int, depth: float) -> Case:
    """As long as fits."""
    room = context - ANSWER_ROOM
    num_tokens = float(room)
    while True:
        made = recall.single(draw, filler, int(num_tokens), depth)
        if len(encode(made.prompt())) <= room:
            return Case(NEEDLE, made.prompt(), made.expected())
        num_tokens *= SHORTER


def _said(text: str) -> str:
    return text.rpartition("</think>")[2].strip()


def _kinds(text: str) -> dict[str, str] | None:
    """Type of each key of a flat object; None if it is none."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return {key: type(value).__name__ for key, value in found.items()} if isinstance(found, dict) else None
