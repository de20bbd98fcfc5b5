"""The command prints a table and writes every figure with what is needed to repeat it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaserve.bench import cache
from deltaserve.bench.main import app
from deltaserve.bench.traces import TraceRow, write_trace
from deltaserve.core.errors import ConfigError


@pytest.fixture(autouse=True)
def _wide_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.console, "width", 200)


SMALL = ["--model", "qwen3.5-0.8b", "--rows", "4"]


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["cache", *SMALL, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def _shares(path: Path) -> dict[str, float]:
    return {row["name"]: row["value"] for row in json.loads(path.read_text()) if row["unit"] == "share"}


def test_generated_traces_give_a_table_and_a_row_per_figure(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    shape = ["--requests", "80", "--prompt-tokens", "2048", "--output-tokens", "40", "--seeds", "3"]
    output = _run("--generators", "forks", *shape, "--memory-gib", "0.2,100", "--output", str(path))
    assert "forks seed 3, 80 requests" in output and "unlimited" in output
    shares = _shares(path)
    assert len(shares) == 2 * (2 * 3 + 1)
    for policy in ("lru", "value", "oracle"):
        assert shares[f"{policy}, 100 GiB: hit tokens"] == shares["unlimited: hit tokens"]
        assert shares[f"{policy}, 0.2 GiB: hit tokens"] < shares["unlimited: hit tokens"]


def test_a_trace_file_is_replayed(tmp_path: Path) -> None:
    trace, path = tmp_path / "trace.jsonl", tmp_path / "result.json"
    write_trace(trace, [TraceRow(1100, 9, (0, 1, 2)), TraceRow(1100, 9, (0, 1, 3)), TraceRow(1100, 9, (0, 1, 4))])
    _run(str(trace), "--memory-gib", "100", "--output", str(path))
    third_hits_the_branch_that_the_second_left = 1024 / 3300
    assert _shares(path)["value, 100 GiB: hit tokens"] == pytest.approx(
        third_hits_the_branch_that_the_second_left, 1e-3
    )


def test_host_memory_takes_what_the_device_has_no_room_for(tmp_path: Path) -> None:
    trace, shares = tmp_path / "trace.jsonl", []
    write_trace(trace, [TraceRow(1000, 9, (2 * at % 14, 2 * at % 14 + 1)) for at in range(40)])
    for host in ("0", "1"):
        path = tmp_path / f"{host}.json"
        _run(str(trace), "--memory-gib", "0.05", "--host-gib", host, "--policies", "value", "--output", str(path))
        shares.append(next(value for name, value in _shares(path).items() if name.startswith("value")))
    assert shares[1] > shares[0] + 0.3


def test_the_cost_of_the_books_is_told(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert "130 a request" in _run("--blocks", "2600", "--output", str(path))
    assert [row["unit"] for row in json.loads(path.read_text())] == ["ms"] * 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--generators", "talk"], "--generators knows chat, tools, forks, not 'talk'"),
        (["--policies", "lru,fifo"], "--policies knows lru, value, oracle, not 'fifo'"),
        (["--seeds", "1,x"], "--seeds must be whole numbers"),
        (["--generators", "chat", "--memory-gib", "much"], "--memory-gib must be numbers"),
    ],
)
def test_what_is_not_known_is_refused(arguments: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _run(*arguments, "--requests", "200", "--output-tokens", "60")
    assert sentence in str(caught.value)
