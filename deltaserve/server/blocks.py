"""An answer as a row of blocks, each a thought, a text or a call: what Responses and Messages are both made of.

The parts that the readers find (`parsers.sink.Part`) come in the order of the model's text. Neighbours of one kind are
one block; a call is a block of its own, and its arguments are the block's text. A stream tells of the steps, a whole
answer holds the blocks that the same steps lead to, so that the two cannot differ.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from deltaserve.core.types import FinishReason
from deltaserve.server.errors import GenerationError
from deltaserve.server.generation import Generation, Piece, collect
from deltaserve.server.parsers.sink import Kind, Part
from deltaserve.server.stream import StreamForm


class Step(enum.Enum):
    OPEN = enum.auto()
    GROW = enum.auto()
    CLOSE = enum.auto()


@dataclass(slots=True)
class Block:
    """`kind` is REASONING, CONTENT or CALL; `name` and `call_id` are a call's, and its `text` the arguments' JSON.

    `is_cut`: a limit ended the answer within this block.
    """

    index: int
    kind: Kind
    name: str = ""
    call_id: str = ""
    is_cut: bool = False
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Change(NamedTuple):
    """`text` is what a GROW step adds."""

    step: Step
    block: Block
    text: str = ""


class Blocks:
    """Feed it the parts of one choice, then `finish`. `all` are the blocks so far, the last of which may be open."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._is_open = False

    def feed(self, parts: Iterable[Part]) -> Iterator[Change]:
        """Each step as it is done: a block is empty when it opens, and whole when it closes."""
        for part in parts:
            kind = Kind.CALL if part.kind is Kind.ARGUMENTS else part.kind
            if part.kind is Kind.CALL or not self._is_open or self.all[-1].kind is not kind:
                yield from self.finish()
                yield self._start(part, kind)
            if part.kind is not Kind.CALL:
                self.all[-1].pieces.append(part.text)
                yield Change(Step.GROW, self.all[-1], part.text)

    def finish(self, *, is_cut: bool = False) -> Iterator[Change]:
        """Close the open block, if there is one."""
        if self._is_open:
            self._is_open = False
            self.all[-1].is_cut = is_cut
            yield Change(Step.CLOSE, self.all[-1])

    def _start(self, part: Part, kind: Kind) -> Change:
        name = part.text if kind is Kind.CALL else ""
        self.all.append(Block(len(self.all), kind, name, part.call_id))
        self._is_open = True
        return Change(Step.OPEN, self.all[-1])


@dataclass(frozen=True, slots=True)
class Ending:
    """How an answer ended. `stop` is the stop string that did it, if one did."""

    is_cut: bool
    stop: str | None
    has_calls: bool

    @classmethod
    def of(cls, reason: FinishReason | None, stop: str | int | None, blocks: Blocks) -> Ending:
        """Raises GenerationError for an answer that the server broke off: these formats have no word for that."""
        if reason is FinishReason.ABORT:
            raise GenerationError("the server stopped before the answer was complete; send the request again")
        has_calls = any(block.kind is Kind.CALL for block in blocks.all)
        return cls(reason is FinishReason.LENGTH, stop if isinstance(stop, str) else None, has_calls)


class BlockAnswer(Protocol):
    """One request on its way to the client, in the form of its endpoint."""

    generation: Generation
    form: StreamForm

    def begin(self) -> bytes:
        """The first events, once the engine has begun: what was cached is known then."""
        ...

    def write(self, change: Change) -> bytes:
        """The events of one step."""
        ...

    def end(self, blocks: Blocks, ending: Ending) -> bytes:
        """The last events."""
        ...

    def body(self, blocks: Blocks, ending: Ending) -> bytes:
        """The whole answer."""
        ...


async def block_events(answer: BlockAnswer) -> AsyncGenerator[bytes, None]:
    """The events of a stream, those of one piece together."""
    blocks = Blocks()
    is_started = False
    async with aclosing(answer.generation.pieces()) as pieces:
        async for piece in pieces:
            data = b"" if is_started else answer.begin()
            is_started = True
            data += _write(answer, blocks, piece)
            if data:
                yield data


async def whole_blocks(answer: BlockAnswer) -> bytes:
    (finished,) = await collect(answer.generation)
    blocks = Blocks()
    list(blocks.feed(finished.parts))
    ending = Ending.of(finished.finish_reason, finished.stop_reason, blocks)
    list(blocks.finish(is_cut=ending.is_cut))
    return answer.body(blocks, ending)


def _write(answer: BlockAnswer, blocks: Blocks, piece: Piece) -> bytes:
    data = b"".join(map(answer.write, blocks.feed(piece.parts)))
    reason = piece.delta.finish_reason
    if reason is None:
        return data
    ending = Ending.of(reason, piece.delta.stop_reason, blocks)
    return data + b"".join(map(answer.write, blocks.finish(is_cut=ending.is_cut))) + answer.end(blocks, ending)
