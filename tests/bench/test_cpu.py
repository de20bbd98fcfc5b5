"""`bench cpu` from the command line to the result file, on a model of toy size."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deltaserve.bench.main import app
from deltaserve.bench.work import Measured, Shape, random_prompts
from deltaserve.core.errors import ConfigError
from deltaserve.ops import native

SMALL = ["--rounds", "2", "--streams", "1,3", "--prompt-tokens", "70", "--output-tokens", "3", "--threads", "1"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["cpu", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_engines_are_measured_on_the_same_work(sample_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    engines = ["--engines", "deltaserve,transformers-float32"]
    output = run(str(sample_checkpoint), *SMALL, *engines, "--output", str(path))
    rows = json.loads(path.read_text())
    shapes = {row["shape"] for row in rows}
    assert {row["name"].split(":")[0] for row in rows} == {"deltaserve in process", "transformers generate, float32"}
    assert len(shapes) == 2
    assert all(row["value"] > 0 and row["hardware"] and row["commit"] and row["command"] for row in rows)
    assert output.count("round 2") == 4
    assert str(tmp_path) not in path.read_text()


def test_our_server_is_measured_over_http(sample_checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    output = run(str(sample_checkpoint), *SMALL, "--rounds", "1", "--engines", "http", "--output", str(path))
    assert "ready after" in output
    assert {row["name"] for row in json.loads(path.read_text())} == {
        "deltaserve over HTTP: output",
        "deltaserve over HTTP: first token",
    }


def test_step_times_name_the_parts_of_a_step(sample_checkpoint: Path) -> None:
    output = run(str(sample_checkpoint), *SMALL, "--streams", "2", "--step-times")
    halves = ("ops.gdn.mix", "ops.moe.feed_forward") if native.is_ready() else ("ops.gdn.extend", "ops.moe.experts")
    for part in ("schedule", "build tensors", *halves, "sample", "update", "aten::index "):
        assert output.count(part) == 1, part


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--streams", "1,x"], "--streams must be positive numbers"),
        (["--streams", "0"], "--streams must be positive numbers"),
        (["--engines", "other"], "--engines knows deltaserve, http"),
        (["--url", "http://127.0.0.1:1", "--engines", ""], "no server answers"),
    ],
)
def test_wrong_options_are_sentences(arguments: list[str], reason: str, sample_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        run(str(sample_checkpoint), *arguments)


def test_a_directory_without_a_model_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        run(str(tmp_path), "--engines", "")


def test_prompts_differ_between_rounds_and_not_between_engines() -> None:
    shape = Shape(8, 20, 5)
    prompts = random_prompts(shape, 1000, seed=1)
    assert prompts == random_prompts(shape, 1000, seed=1) != random_prompts(shape, 1000, seed=2)
    assert len(prompts) == 24
    assert {len(prompt) for prompt in prompts} == {20}
    assert min(map(min, prompts)) >= 62 and max(map(max, prompts)) < 938


def test_figures_of_a_run() -> None:
    measured = Measured(num_output_tokens=100, wall_s=4.0, cpu_s=8.0, first_token_s=(1.0, 5.0, 2.0))
    assert measured.tokens_per_s == 25
    assert measured.tokens_per_cpu_s == 12.5
    assert measured.median_first_token_s == statistics.median([1.0, 2.0, 5.0])
    assert Measured(1, 1.0).tokens_per_cpu_s is None
