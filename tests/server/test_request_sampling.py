"""Sampling defaults from generation_config.json, and what `--generation-config` chooses between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deltaserve.core.errors import ConfigError
from deltaserve.server.sampling import Limits, OutputBudget, load_defaults

LIMITS = Limits(max_model_len=100, vocab_size=50)


def write(directory: Path, config: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "generation_config.json").write_text(json.dumps(config), "utf-8")
    return directory


def test_sources(tmp_path: Path) -> None:
    own = write(tmp_path / "own", {"temperature": 0.6, "top_k": 20, "eos_token_id": 5, "max_new_tokens": 30})
    other = write(tmp_path / "other", {"top_p": 0.5, "min_p": None, "repetition_penalty": 1.1})
    assert load_defaults("auto", own) == {"temperature": 0.6, "top_k": 20, "max_tokens": 30}
    assert load_defaults("vllm", own) == {}
    assert load_defaults(str(other), own) == {"top_p": 0.5, "repetition_penalty": 1.1}
    assert load_defaults("auto", tmp_path) == {}


def test_wrong_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_defaults(str(tmp_path / "absent"), tmp_path)
    for config in ({"temperature": 3}, {"top_k": "many"}, {"top_p": True}, [1]):
        with pytest.raises(ConfigError, match=r"generation_config\.json"):
            load_defaults("auto", write(tmp_path / "wrong", config))
    (tmp_path / "wrong" / "generation_config.json").write_text("{", "utf-8")
    with pytest.raises(ConfigError, match="not JSON"):
        load_defaults("auto", tmp_path / "wrong")


@pytest.mark.parametrize(
    ("asked", "fallback", "cap", "expected"),
    [
        (None, None, None, 90),
        (None, 16, None, 16),
        (None, 200, None, 90),
        (None, None, 30, 30),
        (40, None, 30, 30),
        (20, None, 30, 20),
        (90, None, None, 90),
    ],
)
def test_output_budget(asked: int | None, fallback: int | None, cap: int | None, expected: int) -> None:
    defaults = {} if cap is None else {"max_tokens": cap}
    assert OutputBudget(asked, "max_tokens", "prompt", fallback).resolve(10, LIMITS, defaults) == expected
