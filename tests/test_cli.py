"""The command line: what each command does with its arguments, and that it starts without torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import deltaserve
from deltaserve import cli
from deltaserve.core.errors import ConfigError
from deltaserve.server.settings import Settings

Run = Any


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command; returns the Settings that `serve` was called with."""
    seen: list[Settings] = []

    def serve(settings: Settings, _: object) -> int:
        seen.append(settings)
        return 0

    def call(*arguments: str) -> Settings:
        seen.clear()
        result = CliRunner().invoke(cli.app, ["serve", *arguments])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return seen[0]

    monkeypatch.setattr(cli, "serve", serve)
    return call


def test_serve_without_arguments_takes_every_default(run: Run) -> None:
    assert run() == Settings()


def test_flags_of_every_kind(run: Run) -> None:
    settings = run(
        "some/model", "--port", "9", "--max-model-len", "32k", "--served-model-name", "a,b", "--served-model-name", "c",
        "--debug-checks", "--memory-utilization", "0.5", "--kv-cache-memory-bytes", "4G", "--num-threads", "2",
        "--no-enable-prefix-caching", "--no-eviction", "--speculative-config", '{"method": "mtp"}',
    )  # fmt: skip
    assert settings == Settings(
        model="some/model",
        port=9,
        max_model_len="32k",
        served_model_name=("a", "b", "c"),
        debug_checks=True,
        memory_utilization=0.5,
        kv_cache_memory_bytes="4G",
        num_threads=2,
        enable_prefix_caching=False,
        no_eviction=True,
        speculative_config='{"method": "mtp"}',
    )
    assert run("--enable-prefix-caching", "--eviction") == Settings()


def test_config_file_and_command_line(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: from/file\nport: 1\ndebug-checks: true\nmax-num-seqs: 7\n", "utf-8")
    settings = run("--config", str(file), "--port", "2", "--no-debug-checks")
    assert settings == Settings(model="from/file", port=2, debug_checks=False, max_num_seqs=7)
    assert run("from/line", "--config", str(file)).model == "from/line"
    file.write_text("maxnumseqs: 7\n", "utf-8")
    with pytest.raises(ConfigError, match="max_num_seqs"):
        run("--config", str(file))


def test_unknown_flags_name_the_nearest_one() -> None:
    result = CliRunner().invoke(cli.app, ["serve", "--max-num-seq", "4"])
    assert result.exit_code == 2
    assert "--max-num-seqs" in result.output


def test_refusals_are_one_line_without_a_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["deltaserve", "serve", "no/such/model"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("deltaserve: no/such/model is neither")


def test_version() -> None:
    assert CliRunner().invoke(cli.app, ["--version"]).output.strip() == deltaserve.__version__


def test_inspect_prints_the_report(sample_checkpoint: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["inspect", str(sample_checkpoint)])
    assert result.exit_code == 0
    assert "can be served" in result.output
    result = CliRunner().invoke(cli.app, ["inspect", str(tmp_path)])
    assert result.exit_code == 1
    assert "cannot be served" in result.output


def test_inspect_refuses_a_checkpoint_without_tokenizer(sample_checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(sample_checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    result = CliRunner().invoke(cli.app, ["inspect", str(tmp_path)])
    assert result.exit_code == 1
    assert "cannot be served" in result.output
    assert "tokenizer.json is missing" in result.output


def test_bench_passes_its_arguments_on() -> None:
    result = CliRunner().invoke(cli.app, ["bench", "--help"])
    assert result.exit_code == 0
    assert "cpu" in result.output


def test_the_server_process_never_imports_torch() -> None:
    script = (
        "import sys, deltaserve.cli, deltaserve.server.build;"
        "sys.exit(','.join(n for n in ('torch', 'transformers', 'safetensors') if n in sys.modules) or None)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
