"""What a runner is built from, and what is refused before anything is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deltaserve.cache.layout import plan_pools
from deltaserve.core.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculativeConfig
from deltaserve.core.errors import CheckpointError, ConfigError
from deltaserve.core.plan import Admission, Logits, Row, RowKind, StepPlan
from deltaserve.core.types import SamplingParams
from deltaserve.model.config import ModelConfig
from deltaserve.model.qwen3_5 import Qwen3_5
from deltaserve.runner.build import cache_spec, load_runner
from deltaserve.runner.device import compute_dtype, device_of, workspace_bytes
from deltaserve.runner.runner import ModelRunner


def build(config: EngineConfig, model: Path) -> ModelRunner:
    model_config = ModelConfig.from_directory(model)
    sizes = plan_pools(cache_spec(config, model_config), config.cache, config.scheduler, 128, 1 << 30)
    return load_runner(config, model_config, sizes)[0]


def config_of(model: Path) -> EngineConfig:
    return EngineConfig(model, cache=CacheConfig(num_pages=4), scheduler=SchedulerConfig(2, 64), num_threads=1)


def first_token(runner: ModelRunner) -> tuple[int, ...]:
    params = SamplingParams(temperature=0.0, seed=0)
    row = Row(1, 0, RowKind.PREFILL, 0, (7, 8, 9), 0, (1,), 0, 0, 0, (), Logits.LAST, True)
    return runner.execute(StepPlan(0, (row,), (Admission(1, 0, (7, 8, 9), (), params, ()),))).rows[0].token_ids


def test_bfloat16_is_refused_on_the_cpu_with_the_remedy(sample_checkpoint: Path) -> None:
    config = replace(config_of(sample_checkpoint), dtype="bfloat16")
    with pytest.raises(ConfigError, match="--dtype float32 or auto"):
        cache_spec(config, ModelConfig.from_directory(sample_checkpoint))


@pytest.mark.parametrize(("kv", "state"), [("auto", "float32"), ("bfloat16", "float16"), ("fp8_e4m3", "bfloat16")])
def test_the_spec_keeps_kv_and_state_types_apart(kv: str, state: str, sample_checkpoint: Path) -> None:
    config = replace(config_of(sample_checkpoint), cache=CacheConfig(kv_cache_dtype=kv, state_dtype=state))
    spec = cache_spec(config, ModelConfig.from_directory(sample_checkpoint))
    assert spec.kv_dtype == ("float32" if kv == "auto" else kv)
    assert (spec.state_dtype, spec.compute_dtype) == (state, "float32")


def test_dummy_weights_need_no_weight_files_and_follow_the_seed(sample_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((sample_checkpoint / "config.json").read_bytes())
    config = config_of(tmp_path)
    with pytest.raises(CheckpointError):
        build(config, tmp_path)
    tokens = [first_token(build(replace(config, load_format="dummy", seed=seed), tmp_path)) for seed in (1, 1, 2, 3, 4)]
    assert tokens[0] == tokens[1] and len(set(tokens)) > 1


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_draft_head_is_built_and_its_kv_kept_for_drafts_only(num_drafts: int, sample_checkpoint: Path) -> None:
    config = replace(config_of(sample_checkpoint), speculative=SpeculativeConfig(num_drafts))
    spec = cache_spec(config, ModelConfig.from_directory(sample_checkpoint))
    assert (spec.num_draft_layers, spec.num_drafts) == (bool(num_drafts), num_drafts)
    runner = build(config, sample_checkpoint)
    assert isinstance(runner._model, Qwen3_5)
    assert (runner._model.mtp is None, runner._pools.last_hiddens is None) == (num_drafts == 0,) * 2
    assert runner._pools.pages.shape[1] == spec.num_attention_layers + bool(num_drafts)


def test_drafts_without_a_head_are_refused_naming_what_is_missing(make_checkpoint: Callable[..., Path]) -> None:
    headless = make_checkpoint(kind="dense", mtp=False)
    model_config = ModelConfig.from_directory(headless)
    assert cache_spec(config_of(headless), model_config).num_draft_layers == 0
    with pytest.raises(
        CheckpointError, match=r"--speculative-config .* mtp\.fc\.weight, .* mtp\.layers\.0\.\* are missing"
    ):
        cache_spec(replace(config_of(headless), speculative=SpeculativeConfig(2)), model_config)


@pytest.mark.parametrize(("asked", "expected"), [(1, 1), (2, 2)])
def test_threads_are_those_asked_for(asked: int, expected: int, sample_checkpoint: Path) -> None:
    before = torch.get_num_threads()
    try:
        build(replace(config_of(sample_checkpoint), num_threads=asked), sample_checkpoint)
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)


def test_progress_ends_with_every_byte(sample_checkpoint: Path) -> None:
    config, model_config = config_of(sample_checkpoint), ModelConfig.from_directory(sample_checkpoint)
    sizes = plan_pools(cache_spec(config, model_config), config.cache, config.scheduler, 128, 1 << 30)
    told: list[tuple[int, int]] = []
    load_runner(config, model_config, sizes, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told) and told[-1][0] == told[-1][1] > 0


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_auto_takes_a_gpu_where_there_is_one_rank_and_computes_in_bfloat16(
    dtype: str, sample_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config_of(sample_checkpoint), dtype=dtype)
    assert device_of(config).type == "cpu" or torch.cuda.is_available()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert device_of(config).type == "cuda"
    assert compute_dtype(config) == ("bfloat16" if dtype == "auto" else dtype)
    assert device_of(replace(config, device="cpu")).type == "cpu"
    assert device_of(replace(config, tensor_parallel_size=2)).type == "cpu"


def test_a_gpu_that_cannot_be_used_is_refused_with_the_remedy(
    sample_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config_of(sample_checkpoint), device="cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="--device cpu"):
        device_of(config)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2"):
        device_of(replace(config, tensor_parallel_size=2))


def test_the_workspace_grows_with_the_tokens_and_the_logits_of_a_step(sample_checkpoint: Path) -> None:
    model = ModelConfig.from_directory(sample_checkpoint)
    base = workspace_bytes(model, SchedulerConfig(32, 2048), 0, 2)
    assert workspace_bytes(model, SchedulerConfig(32, 8192), 0, 2) > base
    assert workspace_bytes(model, SchedulerConfig(32, 2048), 3, 2) == base + 2 * 4 * 32 * 3 * model.vocab_size
