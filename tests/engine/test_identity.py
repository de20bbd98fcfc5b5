"""The name of a model follows what its files hold, and nothing else."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from deltaserve.core.config import CacheConfig, EngineConfig, SchedulerConfig
from deltaserve.engine.identity import model_identity


@pytest.fixture
def config(sample_checkpoint: Path, tmp_path: Path) -> EngineConfig:
    shutil.copytree(sample_checkpoint, tmp_path / "model")
    return EngineConfig(tmp_path / "model")


def test_it_survives_restarts_moves_and_settings_that_change_no_bytes(config: EngineConfig, tmp_path: Path) -> None:
    identity = model_identity(config)
    shutil.copytree(config.model, tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").iterdir():
        os.utime(path, (1, 1))
    assert model_identity(replace(config, model=tmp_path / "elsewhere")) == identity
    other = replace(config, seed=5, cache=CacheConfig(num_pages=7), scheduler=SchedulerConfig(3), num_threads=2)
    assert model_identity(other) == identity


def test_one_changed_byte_at_the_end_of_the_weights_is_another_model(config: EngineConfig) -> None:
    path = next(config.model.glob("*.safetensors"))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    changed = model_identity(config)
    path.write_bytes(data)
    assert model_identity(config) != changed


def test_a_finetune_of_a_large_model_is_another_model(tmp_path: Path) -> None:
    """Equal names, sizes and heads; all numbers differ a little."""
    identities = set()
    for value in (b"\0", b"\1"):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(bytes(1 << 17) + value * (1 << 20))
        identities.add(model_identity(EngineConfig(tmp_path)))
    assert len(identities) == 2


@pytest.mark.parametrize("change", ["config.json", "name", "dtype", "kv", "state", "dummy", "dummy seed"])
def test_what_else_makes_another_model(change: str, config: EngineConfig) -> None:
    before = model_identity(config)
    if change == "config.json":
        path = config.model / "config.json"
        path.write_text(path.read_text().replace("{", "{ ", 1))
    elif change == "name":
        path = next(config.model.glob("*.safetensors"))
        path.rename(path.with_name("other.safetensors"))
    others = {
        "dtype": replace(config, dtype="float32"),
        "kv": replace(config, cache=CacheConfig(kv_cache_dtype="fp8_e4m3")),
        "state": replace(config, cache=CacheConfig(state_dtype="float16")),
        "dummy": replace(config, load_format="dummy"),
        "dummy seed": replace(config, load_format="dummy", seed=1),
    }
    if change == "dummy seed":
        before = model_identity(others["dummy"])
    assert model_identity(others.get(change, config)) != before
