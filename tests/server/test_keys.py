"""API keys: what they guard, how they come, and what stays open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.server.app import create_app
from deltaserve.server.build import Edge
from deltaserve.server.checkpoint import Checkpoint
from deltaserve.server.served import Served
from deltaserve.server.settings import Settings, make_settings
from tests.server.fakes import FakeClient, Http

GUARDED = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("GET", "/stats"),
    ("POST", "/reset_prefix_cache"),
    ("GET", "/debug/requests"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/no/such/path"),
]
OPEN = [("GET", "/health"), ("HEAD", "/health"), ("GET", "/metrics"), ("GET", "/version"), ("GET", "/")]
RIGHT = [
    {"authorization": "Bearer one"},
    {"authorization": "bearer two"},
    {"x-api-key": "two"},
    {"x-api-key": "one", "authorization": "Bearer wrong"},
]
WRONG = [
    {},
    {"authorization": "Bearer"},
    {"authorization": "Bearer three"},
    {"authorization": "one"},
    {"authorization": "Basic one"},
    {"x-api-key": "on"},
    {"x-api-key": ""},
    {"x-api-key": "éé"},
]


@pytest.fixture
def locked(served: Served) -> Http:
    return Http(create_app(replace(served, api_keys=("one", "two"))))


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_guarded_paths(locked: Http, engine: FakeClient, method: str, path: str) -> None:
    response = locked.request(method, path)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert "x-api-key" in error["message"]
    is_anthropic = path.startswith("/v1/messages")
    assert error["type"] == ("authentication_error" if is_anthropic else "invalid_request_error")
    assert engine.num_resets == 0
    assert locked.request(method, path, headers=RIGHT[0]).status_code != 401


@pytest.mark.parametrize(("method", "path"), OPEN)
def test_open_paths(locked: Http, method: str, path: str) -> None:
    assert locked.request(method, path).status_code == 200


def test_every_route_is_listed(locked: Http) -> None:
    paths = set(locked.request("GET", "/openapi.json", headers=RIGHT[0]).json()["paths"])
    known = {path for _, path in GUARDED + OPEN} | {"/v1/models/{name}"}
    assert paths <= known, "decide whether a new path is open, and say so here"


@pytest.mark.parametrize("headers", RIGHT, ids=str)
def test_keys_that_open(locked: Http, headers: dict[str, str]) -> None:
    assert locked.request("GET", "/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("headers", WRONG, ids=str)
def test_keys_that_do_not(locked: Http, headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    assert locked.request("GET", "/v1/models", headers=raw).status_code == 401


def test_without_keys_nothing_is_asked_for(http: Http) -> None:
    assert http.get("/v1/models").status_code == 200
    assert http.request("GET", "/v1/models", headers={"authorization": "Bearer any"}).status_code == 200


def test_keys_come_from_the_flags_and_the_file(sample_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("api-key: from-file\n", "utf-8")
    assert make_settings({}, tmp_path / "serve.yaml").api_key == ("from-file",)
    settings = make_settings({"api_key": ["a", "b"]}, tmp_path / "serve.yaml")
    assert settings.api_key == ("a", "b")
    edge = Edge.read(settings, Checkpoint(sample_checkpoint, "given"))
    assert edge.api_keys == ("a", "b")
    assert "from-file" not in repr(make_settings({}, tmp_path / "serve.yaml"))


@pytest.mark.parametrize("key", ["", " a", "a\n", "ключ"])
def test_keys_that_no_client_could_send(key: Any) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        Settings(api_key=(key,))
