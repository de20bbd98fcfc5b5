"""Flat settings, and configs as JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaserve.core.config import CacheConfig, EngineConfig, SchedulerConfig
from deltaserve.core.errors import ConfigError
from deltaserve.engine.launch import RankJob
from deltaserve.engine.settings import engine_config, from_json, to_json
from tests.fakes import make_sizes

CONFIG = EngineConfig(
    Path("some dir/ü"),
    max_model_len=77,
    tensor_parallel_size=2,
    debug_checks=True,
    cache=CacheConfig(num_pages=9, state_dtype="float16"),
    scheduler=SchedulerConfig(max_num_seqs=3),
)


def test_flat_settings_go_where_they_belong() -> None:
    made = engine_config(
        "some dir/ü",
        {
            "max_model_len": 77,
            "tensor_parallel_size": 2,
            "debug_checks": True,
            "num_pages": 9,
            "state_dtype": "float16",
            "max_num_seqs": 3,
        },
    )
    assert made == CONFIG


@pytest.mark.parametrize(
    ("name", "hint"),
    [("max_num_seq", "did you mean max_num_seqs?"), ("zzz", "known are"), ("cache", "unknown setting")],
)
def test_an_unknown_setting_is_named(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        engine_config("x", {name: 1})


def test_a_wrong_value_is_the_configs_own_error() -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs must be at least 1, not 0"):
        engine_config("x", {"max_num_seqs": 0})


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("max_num_seqs", "4", "int, not '4'"),
        ("max_model_len", "4k", "int or None"),
        ("tensor_parallel_size", 2.0, "int"),
        ("seed", None, "int"),
        ("num_threads", True, "int or None"),
        ("memory_utilization", "0.5", "float"),
    ],
)
def test_a_wrong_type_names_the_setting(name: str, value: object, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be {kind}"):
        engine_config("x", {name: value})


def test_json_gives_the_same_config_back() -> None:
    assert from_json(EngineConfig, to_json(CONFIG)) == CONFIG
    job = RankJob(CONFIG, Path("/tmp/x"), make_sizes(4, 2), rank=1)
    assert from_json(RankJob, to_json(job)) == job


def test_the_digest_knows_everything_but_the_rank() -> None:
    digests = [
        RankJob(config, Path("/tmp/x"), make_sizes(pages, 2), rank).digest()
        for config, pages, rank in ((CONFIG, 4, 0), (CONFIG, 4, 1), (CONFIG, 5, 0), (EngineConfig(Path("y")), 4, 0))
    ]
    assert digests[0] == digests[1] and len(set(digests)) == 3
    assert all(0 <= digest < 1 << 63 for digest in digests)
