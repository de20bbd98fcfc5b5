"""What an exception becomes over HTTP: one table, and the two shapes that clients read.

| path               | body                                                                                           |
| ------------------ | ---------------------------------------------------------------------------------------------- |
| `/v1/messages` ... | Anthropic's: `{"type": "error", "error": {"type", "message"}}`; the message names the field    |
| any other          | OpenAI's: `{"error": {"message", "type", "param", "code"}}`; `param` is the field              |

A field is named as the client wrote it. An exception that the table does not know is our own mistake: the log has its
traceback, and the client gets a 500 that says nothing of the inside.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from deltaserve.core.errors import (
    ContextLengthError,
    DeltaserveError,
    EngineDeadError,
    ModelNotFoundError,
    OverloadedError,
    RequestError,
)


class NotOfferedError(RequestError):
    """A field that is understood but that this server cannot honour."""


class MediaTypeError(RequestError):
    """A body that does not claim to be JSON."""


class UnauthorizedError(DeltaserveError):
    """A request without one of the server's keys."""


class BodyTooLargeError(RequestError):
    """A body beyond what the server reads into memory."""


class GenerationError(Exception):
    """The engine gave up on one request; the others go on."""


# First match wins: subclasses stand before their bases. (exception, status, type, code)
TABLE: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
    (ModelNotFoundError, 404, "invalid_request_error", "model_not_found"),
    (NotOfferedError, 400, "invalid_request_error", "unsupported_parameter"),
    (MediaTypeError, 415, "invalid_request_error", "unsupported_media_type"),
    (BodyTooLargeError, 413, "invalid_request_error", "body_too_large"),
    (RequestError, 400, "invalid_request_error", None),
    (UnauthorizedError, 401, "invalid_request_error", "invalid_api_key"),
    (OverloadedError, 429, "rate_limit_error", "overloaded"),
    (ClientDisconnect, 400, "invalid_request_error", "client_disconnected"),
    (EngineDeadError, 503, "server_error", "engine_dead"),
    (GenerationError, 500, "server_error", "generation_failed"),
    (Exception, 500, "server_error", "internal_error"),
)

ANTHROPIC_PATHS = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
RETRY_AFTER = {"retry-after": "1"}  # seconds; with 429
INTERNAL_MESSAGE = "the server failed on this request; its log has the details"


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of one exception, in OpenAI's shape."""
    status, kind, code = next(row[1:] for row in TABLE if isinstance(error, row[0]))
    message = INTERNAL_MESSAGE if code == "internal_error" else str(error)
    param = error.param if isinstance(error, RequestError) else None
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def anthropic_body(status: int, body: dict[str, Any]) -> dict[str, Any]:
    """The same in Anthropic's shape. It has no place for the field, so that the message says it, where it does not."""
    message, param = body["error"]["message"], body["error"]["param"]
    if param is not None and param not in message:
        message = f"{param}: {message}"
    kind = ANTHROPIC_TYPES.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_response(error: Exception, path: str = "") -> Response:
    """For a request to `path`."""
    status, body = describe(error)
    if path.startswith(ANTHROPIC_PATHS):
        body = anthropic_body(status, body)
    headers = RETRY_AFTER if status == HTTPStatus.TOO_MANY_REQUESTS else None
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def install(app: FastAPI) -> None:
    """Answer every exception of `app` by the table, and unknown paths and methods in the same shape."""

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
        if request.url.path.startswith(ANTHROPIC_PATHS):
            body = anthropic_body(error.status_code, body)
        return Response(msgspec.json.encode(body), error.status_code, error.headers, "application/json")

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(error, request.url.path)

    app.add_exception_handler(HTTPException, on_http)
    for kind, *_ in TABLE[:-1]:
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(Exception, on_error)
