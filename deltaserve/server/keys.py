"""Keys of the API: with `--api-key`, every path but the few below wants one of them.

A key comes as `Authorization: Bearer KEY` or as `x-api-key: KEY`. Without `--api-key` nothing is asked for. Open stay
what load balancers, dashboards and browsers fetch without a key, and what says nothing of any request.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deltaserve.server.errors import UnauthorizedError, error_response

OPEN_PATHS = frozenset(("/", "/health", "/metrics", "/version"))
PAGE_FILES = "/page/"


class ApiKeys:
    """Wraps an application. `keys` must not be empty."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode("utf-8") for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]) or self._has_key(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = UnauthorizedError("a key is needed: send Authorization: Bearer KEY, or x-api-key: KEY")
        response = error_response(error, scope["path"])
        response.headers["www-authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
        # Every pair is compared, so that the time taken says nothing of the keys.
        matches = [hmac.compare_digest(text.encode("utf-8"), key) for text in given for key in self._keys]
        return any(matches)


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(PAGE_FILES)
