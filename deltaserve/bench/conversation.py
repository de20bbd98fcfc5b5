"""Made-up conversations as the family's chat template writes them, in token ids, without a tokenizer.

A `Text` is some words of a known length: its number says which, so that equal numbers are equal tokens. A conversation
is a tuple of messages; `prompt_parts` writes it with the markup of the template:

    <|im_start|>system \\n TEXT <|im_end|> \\n                                        system prompt and tools
    <|im_start|>user \\n TEXT <|im_end|> \\n                                          a real user message
    <|im_start|>user \\n <tool_response> \\n TEXT \\n </tool_response> <|im_end|> \\n   results; parallel ones in one
    <|im_start|>assistant \\n [<think> \\n TEXT \\n </think> \\n\\n] TEXT <|im_end|> \\n

An assistant message keeps its thinking only while no real user message comes after it. So a prompt in a loop of tool
calls continues what came before it word for word, and the one after the next user message leaves that path where the
loop began. The ids of markup are those of Qwen3.5's vocabulary where it has one id for them.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deltaserve.core.chat import ChatMarkers

IM_START, IM_END = 248045, 248046
TOOL_RESPONSE, TOOL_RESPONSE_END = 248066, 248067
THINK, THINK_END = 248068, 248069
NEWLINE, TWO_NEWLINES = 198, 271
SYSTEM, USER, ASSISTANT = 8678, 846, 74455
_FIRST_WORD, _NUM_WORDS = 100_000, 4096
_HEAD_TOKENS = 4
_NOISE_TOKENS = 1 << 16

Ids = tuple[int, ...]
MARKERS = ChatMarkers(
    im_start=IM_START,
    im_end=IM_END,
    newline=(NEWLINE,),
    system=(SYSTEM,),
    user=(USER,),
    assistant=(ASSISTANT,),
    tool_response=(TOOL_RESPONSE,),
)


class Part(enum.IntEnum):
    """What decides how long a text is: generators scale each kind by itself."""

    BASE = 0  # system prompts, tools, documents: there before a conversation moves
    TURN = 1  # what users and tools add
    OUTPUT = 2  # what the model writes


class Role(enum.IntEnum):
    SYSTEM = SYSTEM
    USER = USER
    ASSISTANT = ASSISTANT
    TOOL = 0  # written as a user message


@dataclass(frozen=True, slots=True)
class Text:
    number: int
    part: Part
    length: int


@dataclass(frozen=True, slots=True)
class Message:
    """`texts` is one, or several results of parallel tool calls; `thinking` is an assistant's."""

    role: Role
    texts: tuple[Text, ...]
    thinking: Text | None = None


Piece = Text | Ids
_END: Ids = (IM_END, NEWLINE)
_THINK_HEAD: Ids = (THINK, NEWLINE)
_THINK_TAIL: Ids = (NEWLINE, THINK_END, TWO_NEWLINES)
_TOOL_HEAD: Ids = (IM_START, USER)
_RESULT_HEAD: Ids = (NEWLINE, TOOL_RESPONSE, NEWLINE)
_RESULT_TAIL: Ids = (NEWLINE, TOOL_RESPONSE_END)
_GENERATE: Ids = (IM_START, ASSISTANT, NEWLINE)
_HEADS: dict[Role, Ids] = {role: (IM_START, int(role), NEWLINE) for role in Role if role is not Role.TOOL}


def prompt_parts(messages: Sequence[Message]) -> list[Piece]:
    """The whole prompt, up to and including the opening of the model's thinking."""
    last_user = max((at for at, message in enumerate(messages) if message.role is Role.USER), default=-1)
    pieces: list[Piece] = []
    for at, message in enumerate(messages):
        if message.role is Role.TOOL:
            pieces.append(_TOOL_HEAD)
            for text in message.texts:
                pieces += (_RESULT_HEAD, text, _RESULT_TAIL)
        else:
            pieces.append(_HEADS[message.role])
            if message.thinking is not None and at > last_user:
                pieces += (_THINK_HEAD, message.thinking, _THINK_TAIL)
            pieces += message.texts
        pieces.append(_END)
    return [*pieces, _GENERATE, _THINK_HEAD]


def reply_parts(reply: Message) -> list[Piece]:
    """What the model writes after `prompt_parts`, its <|im_end|> included."""
    assert reply.thinking is not None, reply
    return [reply.thinking, _THINK_TAIL, *reply.texts, (IM_END,)]


def num_tokens(pieces: Iterable[Piece]) -> int:
    return sum(piece.length if isinstance(piece, Text) else len(piece) for piece in pieces)


class Words:
    """Token ids of texts. Two texts of different numbers differ in their first four tokens."""

    def __init__(self) -> None:
        self._words = tuple(range(_FIRST_WORD, _FIRST_WORD + _NUM_WORDS))
        self._noise = tuple(random.Random("words").choices(self._words, k=_NOISE_TOKENS))

    def ids(self, pieces: Iterable[Piece]) -> Ids:
        flat: list[int] = []
        for piece in pieces:
            flat += self._text(piece) if isinstance(piece, Text) else piece
        return tuple(flat)

    def _text(self, text: Text) -> Ids:
        head = tuple(self._words[text.number // _NUM_WORDS**digit % _NUM_WORDS] for digit in range(_HEAD_TOKENS))
        start = text.number * 7919 % _NOISE_TOKENS
        body = self._noise[start : start + text.length]
        while len(body) < text.length:
            body += self._noise[: text.length - len(body)]
        return (head + body)[: text.length]
