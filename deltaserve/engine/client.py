"""Talks to an engine process from asyncio: starts it, streams chunks, notices its death. No torch.

    async with await Client.start(config) as client:
        async for chunk in client.generate(prompt_ids, params): ...

One task receives and hands chunks to the requests they belong to; another watches the process. A request that reads
slowly gets what has gathered in one chunk, and delays nobody. An iterator that is closed early, by `aclose`, by
cancelling the task that reads it, or by being dropped, aborts its request.

When the engine is gone, whatever the cause, every open request raises EngineDeadError within a second, as does every
later one; `dead_reason` says why. A client belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import subprocess
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import zmq
import zmq.asyncio

from deltaserve.core.config import EngineConfig
from deltaserve.core.errors import DeltaserveError, EngineDeadError
from deltaserve.core.events import CacheEvent
from deltaserve.core.types import FinishReason, RequestOptions, SamplingParams, TokenChunk
from deltaserve.engine import launch, messages
from deltaserve.engine.admission import admit, check_options
from deltaserve.engine.child import Failure, read_failure, write_failure
from deltaserve.engine.info import EngineInfo, EngineStats, RequestRecord

V = TypeVar("V")
R = TypeVar("R", messages.Stats, messages.Records, messages.Events, messages.Done)

_WATCH_S = 0.2
_STOP_TIMEOUT_S = 5.0


class Client:
    """Made by `start`. `info` is what the engine said when it was ready."""

    info: EngineInfo

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, sockets: _Sockets) -> None:
        self.dead_reason: str | None = None
        self._process = process
        self._directory = directory
        self._sockets = sockets
        self._ids = itertools.count(1)
        self._inboxes: dict[int, _Inbox] = {}
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._answers: deque[asyncio.Future[messages.Reply]] = deque()  # to the questions that are out, in order
        self._on_progress: Callable[[str, float], None] = lambda stage, fraction: None
        self._is_closing = False
        self._died = asyncio.Event()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    @classmethod
    async def start(cls, config: EngineConfig, on_progress: Callable[[str, float], None] | None = None) -> Self:
        """Start an engine process and wait until it is ready.

        `on_progress` hears of stages and their share done, 0 to 1. Raises ConfigError or CheckpointError with the
        engine's sentence, EngineDeadError if the process ends otherwise.
        """
        directory = launch.make_private_directory()
        sockets = _Sockets(directory)
        client = cls(launch.start_engine(config, directory), directory, sockets)
        if on_progress is not None:
            client._on_progress = on_progress
        try:
            client.info = await client._ready
        except BaseException:
            client._process.kill()
            await client.shutdown()
            raise
        return client

    @property
    def is_alive(self) -> bool:
        return self.dead_reason is None

    @property
    def num_open(self) -> int:
        """Requests that are being read."""
        return len(self._inboxes)

    @property
    def process_id(self) -> int:
        return self._process.pid

    def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: int | None = None,
        options: RequestOptions = RequestOptions(),  # noqa: B008 - frozen
    ) -> AsyncGenerator[TokenChunk, None]:
        """The chunks of one request; the last one has a finish_reason.

        A wrong request raises RequestError or ContextLengthError here, at the call. The request reaches the engine
        when the first chunk is asked for, which raises OverloadedError if the queue is full. `request_id`, if given,
        comes from `new_request_id`.
        """
        self._refuse_if_gone()
        admit(prompt_ids, params, self.info.limits)
        request_id = self.new_request_id() if request_id is None else request_id
        return self._stream(messages.Submit(request_id, tuple(prompt_ids), params, check_options(options)))

    def new_request_id(self) -> int:
        """An id for `generate`, for who wants to `abort` by it."""
        return next(self._ids)

    def abort(self, request_id: int) -> None:
        """End a request; who reads it gets a last chunk that says so. Nothing happens if it is not open."""
        inbox = self._inboxes.get(request_id)
        if inbox is not None and not inbox.is_complete:
            inbox.put(TokenChunk(request_id, finish_reason=FinishReason.ABORT))
            self._send(messages.Abort(request_id))

    async def stats(self) -> EngineStats:
        """How the engine stands; answered between two steps, after everything sent before."""
        return (await self._ask(messages.GetStats(), messages.Stats)).stats

    async def records(self) -> list[RequestRecord]:
        """How the latest requests met the prefix cache, oldest first."""
        return (await self._ask(messages.GetRecords(), messages.Records)).records

    async def cache_events(self) -> tuple[CacheEvent, ...]:
        """What has happened in the prefix cache since the last call, in order; a gap in their numbers is a loss."""
        return (await self._ask(messages.GetEvents(), messages.Events)).in_order()

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running requests keep what they use."""
        await self._ask(messages.ResetPrefixCache(), messages.Done)

    async def wait_dead(self) -> str:
        """Returns when the engine has died, with the reason. A shutdown is not a death."""
        await self._died.wait()
        return self.dead_reason or ""

    async def shutdown(self, drain_s: float = 0.0) -> int:
        """Take no new requests, give open ones `drain_s` to finish, abort the rest, stop the process; its exit code."""
        self._is_closing = True
        if self.is_alive:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_idle.wait(), drain_s)
            for request_id in tuple(self._inboxes):
                self.abort(request_id)
            self._send(messages.Stop())
        code = await asyncio.to_thread(launch.end, self._process, _STOP_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.is_alive:
            self._end(code)
        self._sockets.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        return code

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def _stream(self, submit: messages.Submit) -> AsyncGenerator[TokenChunk, None]:
        self._refuse_if_gone()
        request_id = submit.request_id
        inbox = self._inboxes[request_id] = _Inbox()
        self._is_idle.clear()
        try:
            self._send(submit)
            while True:
                chunk = await inbox.take()
                yield chunk
                if chunk.finish_reason is not None:
                    return
        finally:
            del self._inboxes[request_id]
            if not self._inboxes:
                self._is_idle.set()
            if not inbox.is_complete:
                self._send(messages.Abort(request_id))

    async def _ask(self, question: messages.Question, kind: type[R]) -> R:
        self._refuse_if_gone()
        future: asyncio.Future[messages.Reply] = asyncio.get_running_loop().create_future()
        self._answers.append(future)
        self._send(question)
        answer = await future
        assert isinstance(answer, kind), answer
        return answer

    def _refuse_if_gone(self) -> None:
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        if self._is_closing:
            raise EngineDeadError("the engine is shutting down")

    def _send(self, message: messages.ToEngine) -> None:
        if self.is_alive:
            self._sockets.send(messages.encode(message))

    async def _receive(self) -> None:
        """An engine that cannot be understood is ended: whoever waits for its messages would wait for ever."""
        try:
            while True:
                self._take(messages.decode_from_engine(await self._sockets.receive()))
        except Exception as error:  # noqa: BLE001 - whatever it is, no further message would be read
            sentence = f"a message of the engine could not be taken: {type(error).__name__}: {error}"
            write_failure(self._directory, Failure(EngineDeadError.__name__, sentence))
            self._process.kill()

    def _take(self, message: messages.FromEngine) -> None:
        match message:
            case messages.Chunks():
                for chunk in message.chunks:
                    if (inbox := self._inboxes.get(chunk.request_id)) is not None:
                        inbox.put(chunk)
            case messages.Rejected():
                if (inbox := self._inboxes.get(message.request_id)) is not None:
                    inbox.fail(message.to_error())
            case messages.Progress():
                self._on_progress(message.stage, message.fraction)
            case messages.Ready():
                _resolve(self._ready, message.info)
            case _:
                _resolve(self._answers.popleft(), message)

    async def _watch(self) -> None:
        while (code := self._process.poll()) is None:
            await asyncio.sleep(_WATCH_S)
        self._end(code)

    def _end(self, code: int) -> None:
        """The process is gone: an expected end closes what is open, any other is a death."""
        failure = read_failure(self._directory)
        if failure is not None:
            error = failure.to_error()
        elif self._is_closing:
            error = EngineDeadError("the engine is shut down")
        else:
            error = EngineDeadError(f"the engine process {launch.describe_exit(code)}")
        self.dead_reason = str(error)
        if not self._ready.done():
            self._ready.set_exception(error)
        for inbox in self._inboxes.values():
            inbox.fail(EngineDeadError(self.dead_reason))
        for future in self._answers:
            if not future.done():
                future.set_exception(EngineDeadError(self.dead_reason))
        if not self._is_closing:
            self._died.set()


class _Sockets:
    """The client's end. Sending never waits: the engine reads between any two steps."""

    def __init__(self, directory: Path) -> None:
        self._sync = zmq.Context()
        self._async = zmq.asyncio.Context()
        self._outbox = self._sync.socket(zmq.PUSH)
        self._inbox = self._async.socket(zmq.PULL)
        for socket, name in ((self._outbox, messages.REQUESTS_SOCKET), (self._inbox, messages.CHUNKS_SOCKET)):
            socket.set_hwm(0)
            socket.bind(f"ipc://{directory / name}")

    def send(self, data: bytes) -> None:
        """Dropped where no engine is connected: one that is not there yet, or no longer, is ended by its process."""
        with contextlib.suppress(zmq.Again):
            self._outbox.send(data, zmq.DONTWAIT)

    async def receive(self) -> bytes:
        data: bytes = await self._inbox.recv()
        return data

    def close(self) -> None:
        self._async.destroy(linger=0)
        self._sync.destroy(linger=0)


class _Inbox:
    """Chunks of one request that wait to be read."""

    def __init__(self) -> None:
        self._chunks: list[TokenChunk] = []
        self._error: DeltaserveError | None = None
        self._has_news = asyncio.Event()
        self.is_complete = False  # nothing more will come: a last chunk or an error is here

    def put(self, chunk: TokenChunk) -> None:
        if not self.is_complete:
            self._chunks.append(chunk)
            self.is_complete = chunk.finish_reason is not None
            self._has_news.set()

    def fail(self, error: DeltaserveError) -> None:
        if not self.is_complete:
            self._error = error
            self.is_complete = True
            self._has_news.set()

    async def take(self) -> TokenChunk:
        """All that has gathered, as one chunk; waits if there is nothing. What came before an error comes first."""
        await self._has_news.wait()
        if not self._chunks:
            assert self._error is not None
            raise self._error
        chunks, self._chunks = self._chunks, []
        if self._error is None:
            self._has_news.clear()
        return merge(chunks)


def merge(chunks: Sequence[TokenChunk]) -> TokenChunk:
    """Consecutive chunks of one request as one."""
    first, last = chunks[0], chunks[-1]
    if len(chunks) == 1:
        return first
    logprobs = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    prompt_logprobs = [chunk.prompt_logprobs for chunk in chunks if chunk.prompt_logprobs is not None]
    return TokenChunk(
        request_id=first.request_id,
        token_ids=tuple(itertools.chain.from_iterable(chunk.token_ids for chunk in chunks)),
        logprobs=tuple(itertools.chain.from_iterable(logprobs)) if logprobs else None,
        prompt_logprobs=prompt_logprobs[0] if prompt_logprobs else None,
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        num_cached=max(chunk.num_cached for chunk in chunks),
        cache=next((chunk.cache for chunk in chunks if chunk.cache is not None), None),
        error=last.error,
    )


def _resolve(future: asyncio.Future[V], value: V) -> None:
    if not future.done():
        future.set_result(value)
