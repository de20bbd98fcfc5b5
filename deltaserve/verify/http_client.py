"""Requests to one server with the standard library, and sentences for everything that can go wrong on the way."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from deltaserve.core.errors import ConfigError, DeltaserveError
from deltaserve.verify.book import TargetGoneError

TIMEOUT_S = 900.0
CONNECT_TIMEOUT_S = 10.0


class RefusedError(DeltaserveError):
    """The server answered a request with an error; the sentence is the server's."""


class Http:
    """One connection a request. Safe to share between threads."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        address = urlsplit(url if "//" in url else f"http://{url}")
        if not address.hostname or address.scheme not in ("http", "https"):
            raise ConfigError(f"{url!r} is no address of a server; give one such as http://localhost:8000")
        self._is_secure = address.scheme == "https"
        try:
            self._address = address.hostname, address.port or (443 if self._is_secure else 80)
        except ValueError:
            raise ConfigError(f"{url!r} has no valid port; give an address such as http://localhost:8000") from None
        self._path = address.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def model_card(self) -> dict[str, Any]:
        """The first model. Raises ConfigError where nothing answers, or something that is not a server of models."""
        try:
            card = self.get("/v1/models")["data"][0]
        except TargetGoneError as error:
            raise ConfigError(f"{error}; start one with `deltaserve serve`, or correct the URL") from error
        except (RefusedError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{self._name} answers, but not as a server of models ({error}); is the URL right?"
            ) from error
        if "max_model_len" not in card:
            raise ConfigError(
                f"{self._name} serves {card.get('id')!r} without saying its max_model_len; is it Deltaserve?"
            )
        return dict(card)

    def stats(self) -> dict[str, Any]:
        try:
            return self.get("/stats")
        except RefusedError as error:
            raise ConfigError(
                f"{self._name} has no /stats ({error}); only Deltaserve's own servers can be verified"
            ) from error

    def get(self, path: str) -> dict[str, Any]:
        return self._request("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._request("POST", path, body)

    @property
    def _name(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """The JSON object of a good answer ({} if it is empty). Raises RefusedError or TargetGoneError."""
        data = None if body is None else json.dumps(body)
        connection = self._connection()
        try:
            connection.connect()
            if connection.sock is not None:
                connection.sock.settimeout(TIMEOUT_S)
            connection.request(method, self._path + path, data, self._headers)
            response = connection.getresponse()
            status, raw = response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise TargetGoneError(f"no server answers at {self._name} ({_reason(error)})") from error
        finally:
            connection.close()
        return self._read(status, raw, path)

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        return kind(*self._address, timeout=CONNECT_TIMEOUT_S)

    def _read(self, status: int, raw: bytes, path: str) -> dict[str, Any]:
        try:
            value = json.loads(raw) if raw else {}
        except ValueError:
            value = None
        if status == http.HTTPStatus.SERVICE_UNAVAILABLE:
            raise TargetGoneError(f"the server at {self._name} has lost its engine: {_sentence(value, raw)}")
        if status != http.HTTPStatus.OK or not isinstance(value, dict):
            raise RefusedError(f"{path} was answered with status {status}: {_sentence(value, raw)}")
        return value


def _sentence(value: Any, raw: bytes) -> str:
    """The message of an OpenAI error, else the beginning of what came."""
    error = value.get("error") if isinstance(value, dict) else None
    if isinstance(error, dict) and "message" in error:
        return str(error["message"])
    return raw[:120].decode(errors="replace")


def _reason(error: Exception) -> str:
    """Some errors of the library have no text."""
    return str(error) or type(error).__name__
