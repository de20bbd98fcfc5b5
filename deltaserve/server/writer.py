"""Stream chunks as bytes, put together from parts that are encoded once per request.

A chunk is `start of the choice` + the piece's own fields + `end`; for a plain text piece only the text itself is
encoded. Everything else (log-probabilities, token ids, finish reasons, running usage) takes the slower way through a
dict, with the same result.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from deltaserve.server.generation import Finished, Generation, Piece, collect
from deltaserve.server.schema import GenerationRequest
from deltaserve.server.served import Head
from deltaserve.server.stream import event

PLAIN = b',"logprobs":null,"finish_reason":null'
encode = msgspec.json.encode


class Frame:
    """The unchanging parts of the chunks of one request."""

    def __init__(self, head: Head, kind: str, request: GenerationRequest, generation: Generation) -> None:
        options = request.stream_options
        self._head = encode(head.fields(kind))[:-1]
        self._starts = [self._head + b',"choices":[{"index":%d,' % choice.index for choice in generation.choices]
        self._usage = generation.usage
        self._with_usage = bool(options and options.include_usage)
        self._runs_usage = self._with_usage and bool(options and options.continuous_usage_stats)

    def chunk(self, index: int, fields: bytes) -> bytes:
        """One event of choice `index`; `fields` are JSON members without the braces."""
        return event(self._starts[index] + fields + self._end())

    def usage_chunk(self) -> bytes:
        """The closing event with no choices, where the client asked for it."""
        if not self._with_usage:
            return b""
        return event(self._head + b',"choices":[],"usage":' + encode(self._usage.as_dict()) + b"}")

    def _end(self) -> bytes:
        if self._runs_usage:
            return b'}],"usage":' + encode(self._usage.as_dict()) + b"}"
        return b'}],"usage":null}' if self._with_usage else b"}]}"


def members(fields: dict[str, Any]) -> bytes:
    """A dict as JSON members, with a comma before them."""
    return b"," + encode(fields)[1:-1]


class Answer(Protocol):
    """One request on its way to the client, in the form of its endpoint."""

    generation: Generation
    frame: Frame

    def body(self, finished: list[Finished]) -> bytes:
        """The whole answer."""
        ...

    def write(self, piece: Piece) -> bytes:
        """The events of one piece; may be none."""
        ...


async def events(answer: Answer) -> AsyncGenerator[bytes, None]:
    """Everything a stream sends but `[DONE]`."""
    async with aclosing(answer.generation.pieces()) as pieces:
        async for piece in pieces:
            data = answer.write(piece)
            if data:
                yield data
    closing = answer.frame.usage_chunk()
    if closing:
        yield closing


async def whole(answer: Answer) -> bytes:
    return answer.body(await collect(answer.generation))
