"""Settings reach what they are for: the checkpoint, the edge, the HTTP server, the socket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from rich.console import Console

from deltaserve.core.errors import ConfigError
from deltaserve.server import serve as process
from deltaserve.server.build import Edge
from deltaserve.server.checkpoint import Checkpoint
from deltaserve.server.serve import bind, serve, uvicorn_config
from deltaserve.server.settings import Settings


def test_edge_reads_what_the_settings_name(sample_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(sample_checkpoint, "given")
    plain = Edge.read(Settings(), checkpoint)
    assert (plain.names, plain.max_logprobs) == (("given",), 20)
    assert plain.defaults == {"temperature": 1.0, "top_k": 20, "top_p": 0.95}
    (tmp_path / "t.jinja").write_text("own template", "utf-8")
    (tmp_path / "generation_config.json").write_text(json.dumps({"min_p": 0.5}), "utf-8")
    settings = Settings(
        served_model_name=("a", "b"),
        chat_template=str(tmp_path / "t.jinja"),
        generation_config=str(tmp_path),
        max_logprobs=3,
    )
    edge = Edge.read(settings, checkpoint)
    assert (edge.names, edge.max_logprobs, edge.defaults) == (("a", "b"), 3, {"min_p": 0.5})
    assert edge.template is not None
    assert edge.template.render([{"role": "user", "content": "x"}]) == "own template"


def test_model_revision_and_directory_choose_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def find(*arguments: Any) -> Checkpoint:
        asked.append(arguments)
        raise ConfigError("enough")

    monkeypatch.setattr(process, "find_checkpoint", find)
    with pytest.raises(ConfigError, match="enough"):
        serve(Settings(model="a/b", revision="main", download_dir="/models"), Console())
    assert asked == [("a/b", "main", "/models")]


def test_log_level_and_drain_reach_the_http_server() -> None:
    quiet = uvicorn_config(FastAPI(), Settings())
    assert (quiet.log_level, quiet.access_log) == ("warning", False)
    loud = uvicorn_config(FastAPI(), Settings(uvicorn_log_level="info", shutdown_timeout=100))
    assert (loud.log_level, loud.access_log) == ("info", True)
    assert loud.timeout_graceful_shutdown is not None
    assert loud.timeout_graceful_shutdown > 100


def test_an_address_that_cannot_be_taken_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="choose another --host"):
        bind("192.0.2.1", 0)  # set aside for documentation: no machine has it
    with pytest.raises(ConfigError, match="--host 999"):
        bind("999.0.0.1", 0)
