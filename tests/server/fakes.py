"""An engine client without an engine: it says what it is told to say, one token a chunk, and remembers who asked.

`Asgi` calls an application in-process and can leave in the middle of an answer, as a browser tab does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI

from deltaserve.core.errors import DeltaserveError, EngineDeadError
from deltaserve.core.types import (
    CacheNote,
    CacheRecord,
    FinishReason,
    RequestOptions,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
)
from deltaserve.engine.admission import Limits, admit
from deltaserve.engine.info import EngineStats, RequestRecord
from deltaserve.engine.tokenizer import Tokenizer

MAX_MODEL_LEN = 512


def fake_logprob(token_id: int, count: int) -> TokenLogprob:
    """Something that depends on the token alone: alternatives are its neighbours in the vocabulary."""
    top = tuple((token_id + k, -0.5 - k) for k in range(count))
    return TokenLogprob(token_id, -0.5, 1, top)


@dataclass
class FakeClient:
    """`reply` gives the text of request k (0, 1, ...); it is tokenised, and ends with the end of a turn."""

    tokenizer: Tokenizer
    vocab_size: int
    reply: Callable[[int], str] = lambda k: f"Answer {k}."
    reply_ids: tuple[int, ...] | None = None  # instead of a text
    error_after: int | None = None  # tokens before the engine gives up on a request
    stall_after: int | None = None  # tokens before it says nothing more
    num_cached: int = 0  # in every chunk, as the scheduler says it
    refusal: DeltaserveError | None = None  # of every request, once its first chunk is asked for
    figures: dict[str, Any] = field(default_factory=dict)  # more of the stats
    is_alive: bool = True
    requests: list[tuple[tuple[int, ...], SamplingParams]] = field(default_factory=list)
    options: list[RequestOptions] = field(default_factory=list)
    num_resets: int = 0
    num_running: int = 0
    num_aborted: int = 0

    def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, options: RequestOptions
    ) -> AsyncGenerator[TokenChunk, None]:
        self._refuse_if_dead()
        params = admit(prompt_ids, params, Limits(MAX_MODEL_LEN, self.vocab_size))
        self.requests.append((tuple(prompt_ids), params))
        self.options.append(options)
        return self._stream(len(self.requests) - 1, tuple(prompt_ids), params)

    async def stats(self) -> EngineStats:
        self._refuse_if_dead()
        fixed = (90, 100, 7, 8, 3, len(self.requests), 5, 0, 40, 60, 20, 0.5)
        return EngineStats(self.num_running, 0, *fixed, **{"num_available_pages": 95, **self.figures})

    async def records(self) -> list[RequestRecord]:
        self._refuse_if_dead()
        record = CacheRecord(100, self.num_cached, 128, 0, CacheNote.NO_SNAPSHOT)
        return [RequestRecord(k, record) for k in range(len(self.requests))]

    async def reset_prefix_cache(self) -> None:
        self._refuse_if_dead()
        self.num_resets += 1

    async def _stream(
        self, k: int, prompt_ids: tuple[int, ...], params: SamplingParams
    ) -> AsyncGenerator[TokenChunk, None]:
        if self.refusal is not None:
            raise self.refusal
        self.num_running += 1
        is_done = False
        try:
            for position, chunk in enumerate(self._chunks(k, prompt_ids, params)):
                await self._maybe_stall(position)
                is_done = chunk.finish_reason is not None
                yield chunk
                if is_done:
                    return
        finally:
            self.num_running -= 1
            self.num_aborted += not is_done

    async def _maybe_stall(self, position: int) -> None:
        await asyncio.sleep(0)
        self._refuse_if_dead()
        if position == self.stall_after:
            await asyncio.Event().wait()

    def _refuse_if_dead(self) -> None:
        if not self.is_alive:
            raise EngineDeadError("the engine process exited with code 9")

    def _chunks(self, k: int, prompt_ids: tuple[int, ...], params: SamplingParams) -> list[TokenChunk]:
        reply = self.tokenizer.encode(self.reply(k)) if self.reply_ids is None else self.reply_ids
        ids = [*reply, self.tokenizer.eos_ids[0]][: params.max_tokens]
        chunks = [self._chunk(token_id, params) for token_id in ids]
        reason = FinishReason.STOP if ids[-1] in self.tokenizer.eos_ids else FinishReason.LENGTH
        if self.error_after is not None:
            chunks[self.error_after :] = [TokenChunk(k, finish_reason=FinishReason.ERROR, error="no page was free")]
        else:
            stop_id = ids[-1] if reason is FinishReason.STOP else None
            chunks[-1] = TokenChunk(k, (ids[-1],), chunks[-1].logprobs, None, reason, stop_id, self.num_cached)
        chunks[0] = self._with_prompt(chunks[0], prompt_ids, params)
        return chunks

    def _chunk(self, token_id: int, params: SamplingParams) -> TokenChunk:
        logprobs = None if params.logprobs is None else (fake_logprob(token_id, params.logprobs),)
        return TokenChunk(0, (token_id,), logprobs, num_cached=self.num_cached)

    def _with_prompt(self, chunk: TokenChunk, prompt_ids: tuple[int, ...], params: SamplingParams) -> TokenChunk:
        count = params.prompt_logprobs
        entries = None if count is None else (None, *(fake_logprob(i, count) for i in prompt_ids[1:]))
        return TokenChunk(
            chunk.request_id,
            chunk.token_ids,
            chunk.logprobs,
            entries,
            chunk.finish_reason,
            chunk.stop_token_id,
            self.num_cached,
            error=chunk.error,
        )


@dataclass
class Http:
    """A client of an application in this process; each call has an event loop of its own."""

    app: FastAPI

    def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        return asyncio.run(self._request(method, path, **arguments))

    def get(self, path: str) -> httpx.Response:
        return self.request("GET", path)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.request("POST", path, json=body)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream, which must end in [DONE]."""
        response = self.post(path, body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def leave(self, path: str, body: dict[str, Any], num_parts: int) -> list[dict[str, Any]]:
        """Send a request, leave after `num_parts` parts of the answer's body; the messages that were sent."""
        return asyncio.run(self._leave(path, body, num_parts))

    async def _request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **arguments)

    async def _leave(self, path: str, body: dict[str, Any], num_parts: int) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        is_gone = asyncio.Event()
        incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop()
            await is_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if sum(message["type"] == "http.response.body" for message in sent) >= num_parts:
                is_gone.set()

        if num_parts == 0:
            asyncio.get_running_loop().call_later(0.02, is_gone.set)
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        await asyncio.wait_for(self.app(scope, receive, send), 5)
        return sent
