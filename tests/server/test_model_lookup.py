"""Which checkpoint is served: a directory, a Hub id, or what there is when none is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from deltaserve.core.errors import ConfigError
from deltaserve.server import checkpoint
from deltaserve.server.checkpoint import find_checkpoint


def test_a_directory_is_served_under_the_name_it_was_given(sample_checkpoint: Path) -> None:
    found = find_checkpoint(str(sample_checkpoint))
    assert (found.directory, found.name, found.note) == (sample_checkpoint, str(sample_checkpoint), "")


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", "utf-8")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        find_checkpoint(str(tmp_path))
    for model in (str(tmp_path / "file"), str(tmp_path / "absent"), "word", "a/b/c"):
        with pytest.raises(ConfigError, match="neither a directory nor a Hub id"):
            find_checkpoint(model)


def test_a_hub_id_goes_through_the_hubs_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def download(model: str, **arguments: Any) -> str:
        asked.append((model, arguments["revision"], arguments["cache_dir"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    found = find_checkpoint("someone/model", "main", "/cache")
    assert (found.directory, found.name) == (tmp_path, "someone/model")
    assert asked == [("someone/model", "main", "/cache")]


def test_offline_without_a_copy_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is 1") as caught:
        find_checkpoint("someone/model", download_dir=str(tmp_path))
    assert isinstance(caught.value.__cause__, LocalEntryNotFoundError)


def test_no_model_makes_a_sample_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checkpoint, "SHIPPED", Path("absent"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = find_checkpoint(None)
    assert found.name == "sample"
    assert "random" in found.note
    weights = found.directory / "model.safetensors"
    written_ns = weights.stat().st_mtime_ns
    assert find_checkpoint(None) == found
    assert weights.stat().st_mtime_ns == written_ns
    assert [path.name for path in (tmp_path / "deltaserve").iterdir()] == [found.directory.name]


WRITE_UNTIL_STOPPED = """
import signal
from deltaserve.server import checkpoint
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
checkpoint.WRITE_SAMPLE = "import sys, time, pathlib; (pathlib.Path(sys.argv[1]) / 'begun').touch(); time.sleep(60)"
try:
    checkpoint._sample()
except KeyboardInterrupt:
    print("stopped")
"""


def test_ctrl_c_while_the_sample_is_made_says_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    """A terminal sends it to the whole group of processes."""
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", WRITE_UNTIL_STOPPED]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        deadline_s = time.monotonic() + 30
        while not list(tmp_path.glob("deltaserve/.sample-*/begun")) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=30) == ("stopped\n", "")
    assert not list((tmp_path / "deltaserve").iterdir())


def test_the_model_that_ships_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shipped = tmp_path / checkpoint.SHIPPED
    shipped.mkdir(parents=True)
    (shipped / "config.json").write_text("{}", "utf-8")
    monkeypatch.setattr(checkpoint, "PACKAGE", tmp_path / "deltaserve")
    assert find_checkpoint(None) == checkpoint.Checkpoint(shipped, "tiny")
