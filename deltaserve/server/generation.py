"""Running what one HTTP request asks for: one or several choices, as pieces of text in the order they come.

A request with several prompts, or `n` > 1, is as many engine requests; choice `p * n + k` is the k-th of prompt p.
Every way out (end, stop string, error, a client that leaves) closes the engine's iterators, which aborts what is
still running. One choice is followed directly; several are merged by one task each, never one task per token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from deltaserve.core.types import FinishReason, RequestOptions, SamplingParams, TokenChunk, TokenLogprob
from deltaserve.engine.info import EngineStats, RequestRecord
from deltaserve.engine.text import TextDelta, TextStream, Vocabulary
from deltaserve.server.errors import GenerationError
from deltaserve.server.metrics import Metrics
from deltaserve.server.parsers.message import MessageReader
from deltaserve.server.parsers.sink import Part


class EngineClient(Protocol):
    """What the edge needs of `engine.client.Client`."""

    @property
    def is_alive(self) -> bool: ...

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, options: RequestOptions
    ) -> AsyncGenerator[TokenChunk, None]:
        """Chunks of one request. Closing the iterator aborts it."""
        ...

    async def stats(self) -> EngineStats: ...
    async def records(self) -> list[RequestRecord]: ...
    async def reset_prefix_cache(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """One engine request. `is_first` marks the first choice of its prompt, which counts the prompt for usage."""

    index: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    is_first: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """What one chunk added to one choice. `parts` is what its text means, where the choice has a reader."""

    index: int
    delta: TextDelta
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    parts: tuple[Part, ...] = ()


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request, true at every moment of it. Each prompt counts once, however many choices.

    `num_reasoning` of the completion's tokens were thought; None where thinking is not looked for.
    """

    num_prompt: int = 0
    num_cached: int = 0
    num_completion: int = 0
    num_reasoning: int | None = None

    def start(self, choice: Choice, first: TokenChunk) -> None:
        """What was cached is known with the first chunk; every later one repeats it."""
        if choice.is_first:
            self.num_cached += first.num_cached

    def add(self, chunk: TokenChunk) -> None:
        self.num_completion += len(chunk.token_ids)

    def as_dict(self) -> dict[str, Any]:
        counts = {
            "prompt_tokens": self.num_prompt,
            "total_tokens": self.num_prompt + self.num_completion,
            "completion_tokens": self.num_completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }
        if self.num_reasoning is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning}
        return counts


def make_choices(prompts: Sequence[tuple[tuple[int, ...], SamplingParams]], num_each: int) -> list[Choice]:
    """`num_each` choices of every prompt. With a seed, the k-th choice of a prompt uses seed + k."""
    choices: list[Choice] = []
    for prompt_ids, params in prompts:
        for k in range(num_each):
            seed = None if params.seed is None else _shifted(params.seed, k)
            choices.append(Choice(len(choices), prompt_ids, replace(params, seed=seed), is_first=k == 0))
    return choices


@dataclass(slots=True)
class Generation:
    """All choices of one HTTP request. `readers`, one for each choice, say what the text means; chats have them."""

    engine: EngineClient
    vocabulary: Vocabulary
    metrics: Metrics
    choices: list[Choice]
    options: RequestOptions
    readers: Sequence[MessageReader] = ()
    usage: Usage = field(default_factory=Usage)

    def __post_init__(self) -> None:
        self.usage.num_prompt = sum(len(choice.prompt_ids) for choice in self.choices if choice.is_first)

    def pieces(self) -> AsyncGenerator[Piece, None]:
        """Pieces of all choices; the last of each has a finish reason. Close it to abort.

        Raises EngineDeadError, or GenerationError where the engine gave up on a request.
        """
        streams = [self._follow(choice) for choice in self.choices]
        return streams[0] if len(streams) == 1 else _merge(streams)

    async def _follow(self, choice: Choice) -> AsyncGenerator[Piece, None]:
        text = TextStream(self.vocabulary, choice.params)
        timer = self.metrics.start(len(choice.prompt_ids))
        is_started = False
        try:
            stream = self.engine.generate(choice.prompt_ids, choice.params, options=self.options)
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    if chunk.finish_reason is FinishReason.ERROR:
                        timer.fail()
                        raise GenerationError(chunk.error or "the engine gave up on this request")
                    if not is_started:
                        is_started = True
                        self.usage.start(choice, chunk)
                    self.usage.add(chunk)
                    piece = self._read(Piece(choice.index, text.feed(chunk), chunk.prompt_logprobs))
                    timer.advance(len(chunk.token_ids), chunk.num_cached, piece.delta.finish_reason)
                    yield piece
                    if piece.delta.finish_reason is not None:
                        return
                raise GenerationError("the engine ended this request without a reason")
        finally:
            timer.close()

    def _read(self, piece: Piece) -> Piece:
        """With what it means. A reader that wants no more ends the choice."""
        if not self.readers:
            return piece
        reader, delta = self.readers[piece.index], piece.delta
        num_before = reader.num_reasoning
        parts = reader.feed(delta)
        if self.usage.num_reasoning is not None:
            self.usage.num_reasoning += reader.num_reasoning - num_before
        if reader.is_done:
            delta = replace(delta, finish_reason=FinishReason.STOP, stop_reason=None)
        return replace(piece, delta=delta, parts=parts)


def _shifted(seed: int, offset: int) -> int:
    """seed + offset, wrapped into signed 64 bits."""
    return (seed + offset + 2**63) % 2**64 - 2**63


async def _merge(streams: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[Piece, None]:
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(stream: AsyncGenerator[Piece, None], queue: asyncio.Queue[Piece | Exception | None]) -> None:
    """Everything of one stream into the queue, then None, or the exception that ended it."""
    try:
        async with aclosing(stream):
            async for piece in stream:
                queue.put_nowait(piece)
        queue.put_nowait(None)
    except Exception as error:  # noqa: BLE001 - it is raised again by the reader
        queue.put_nowait(error)


@dataclass(slots=True)
class Finished:
    """One choice after its end. Lists but `parts` are parallel to `token_ids`."""

    text: str = ""
    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        delta = piece.delta
        self.text += delta.text
        self.parts += piece.parts
        self.token_ids += delta.token_ids
        self.offsets += delta.offsets
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


async def collect(generation: Generation) -> list[Finished]:
    """Run to the end; one entry per choice."""
    finished = [Finished() for _ in generation.choices]
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            finished[piece.index].add(piece)
    return finished
