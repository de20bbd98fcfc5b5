"""Server-sent events, and watching for clients that leave.

One task waits for the client's disconnect while another does the work; whichever ends first ends the other. Nothing
polls, and no task is made per token. The head of a stream is sent with its first event, so a failure before that is
still an ordinary error with its own status; a failure after it is one more event that holds the error object.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deltaserve.server.errors import describe, error_response

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"


def named_event(name: str, body: bytes) -> bytes:
    return b"event: " + name.encode("ascii") + b"\ndata: " + body + b"\n\n"


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`, or None if the client left first; `work` is then cancelled and awaited."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True, slots=True)
class StreamForm:
    """What the formats of streams differ in: how one ends, and what becomes of an error before and after its start."""

    done: bytes
    refuse: Callable[[Exception], Response]
    fail: Callable[[Exception], bytes]


class EventStream(Response):
    """Sends every item of `events` (whole events, already framed), then the form's last words: `[DONE]`."""

    def __init__(self, events: AsyncGenerator[bytes, None], form: StreamForm | None = None) -> None:
        super().__init__()
        self._events = events
        self._form = form or StreamForm(DONE, error_response, _failure)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = await unless_disconnected(receive, self._run(send))
        if failure is not None:
            await self._form.refuse(failure)(scope, receive, send)

    async def _run(self, send: Send) -> Exception | None:
        """The exception, if one came before anything was sent."""
        is_started = False
        async with aclosing(self._events) as events:
            try:
                async for data in events:
                    if not is_started:
                        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
                        is_started = True
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            except Exception as error:  # noqa: BLE001 - the client hears of it, whatever it is
                _log_unexpected(error)
                if not is_started:
                    return error
                await send({"type": "http.response.body", "body": self._form.fail(error), "more_body": True})
        await send({"type": "http.response.body", "body": self._form.done})
        return None


def _log_unexpected(error: Exception) -> None:
    if describe(error)[0] == HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("a stream failed", exc_info=error)


def _failure(error: Exception) -> bytes:
    return event(msgspec.json.encode(describe(error)[1]))
