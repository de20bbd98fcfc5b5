"""Flags and the --config file: one table, types checked, unknown keys refused, every flag has an effect."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from deltaserve.core.config import SpeculativeConfig
from deltaserve.core.errors import ConfigError
from deltaserve.server.settings import Settings, make_settings, parse_size, read_config

DIRECTORY = Path("checkpoint")


@pytest.mark.parametrize(
    ("text", "size"),
    [("32768", 32768), ("32k", 32000), ("32K", 32768), ("1.5k", 1500), ("2m", 2_000_000), ("1G", 1 << 30), (7, 7)],
)
def test_sizes_as_people_write_them(text: int | str, size: int) -> None:
    assert parse_size(text, "max_model_len") == size


@pytest.mark.parametrize("text", ["", "k", "32kk", "-1", "1e3", "32 x", "auto "])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-model-len"):
        parse_size(text, "max_model_len")


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 9000\nmax-num-seqs: 4\nserved_model_name: [a, b]\nmax-model-len: 4K\n", "utf-8")
    settings = make_settings({"port": 9001}, file)
    assert (settings.port, settings.max_num_seqs, settings.served_model_name) == (9001, 4, ("a", "b"))
    assert settings.engine_config(DIRECTORY).max_model_len == 4096


def test_a_single_name_in_the_file_needs_no_list(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("served-model-name: one\n", "utf-8")
    assert make_settings({}, tmp_path / "serve.yaml").served_model_name == ("one",)


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n", "utf-8")
    assert make_settings({}, tmp_path / "empty.yaml") == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "'port'"),
        ("max_num_sequences: 4", "'max_num_seqs'"),
        ("port: many", "port"),
        ("port: 70000", "--port"),
        ("debug-checks: 3", "debug-checks must be bool, not int"),
        ("max_model_len: [1]", "max-model-len must be int or str, not list"),
        ("served-model-name: 5", "served-model-name must be list, not int"),
        ("- port", "keys and values"),
        ("port: [", "not YAML"),
        ("5: 6", "unknown key 5"),
    ],
)
def test_wrong_files_are_refused_naming_the_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        make_settings({}, file)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        read_config(tmp_path / "absent.yaml")


# Each engine flag with a value that is not its default, and where it arrives.
ARRIVALS: list[tuple[str, Any, str, Any]] = [
    ("max_model_len", "2k", "max_model_len", 2000),
    ("dtype", "float32", "dtype", "float32"),
    ("device", "cpu", "device", "cpu"),
    ("load_format", "dummy", "load_format", "dummy"),
    ("seed", 5, "seed", 5),
    ("tensor_parallel_size", 2, "tensor_parallel_size", 2),
    ("num_threads", 3, "num_threads", 3),
    ("debug_checks", True, "debug_checks", True),
    ("kv_cache_dtype", "fp8", "cache.kv_cache_dtype", "fp8_e4m3"),
    ("kv_cache_dtype", "bfloat16", "cache.kv_cache_dtype", "bfloat16"),
    ("mamba_ssm_cache_dtype", "float16", "cache.state_dtype", "float16"),
    ("kv_cache_memory_bytes", "4M", "cache.kv_cache_memory_bytes", 4 << 20),
    ("num_pages", 9, "cache.num_pages", 9),
    ("mean_sequence_tokens", 100, "cache.mean_sequence_tokens", 100),
    ("memory_utilization", 0.5, "cache.memory_utilization", 0.5),
    ("max_num_seqs", 3, "scheduler.max_num_seqs", 3),
    ("max_num_batched_tokens", 128, "scheduler.max_num_batched_tokens", 128),
    ("enable_prefix_caching", False, "cache.enable_prefix_caching", False),
    ("num_snapshots", 7, "cache.num_snapshots", 7),
    ("snapshot_memory_share", 0.5, "cache.snapshot_memory_share", 0.5),
    ("retained_turns", 1, "cache.retained_turns", 1),
    ("snapshot_interval", "1K", "cache.snapshot_interval", 1024),
    ("host_cache_bytes", "4G", "cache.host_cache_bytes", 4 << 30),
    ("max_queued_requests", 0, "scheduler.max_queued", 0),
    ("long_prefill_share", 0.25, "scheduler.long_prefill_share", 0.25),
    ("long_prefill_min_tokens", "8K", "scheduler.long_prefill_min_tokens", 8192),
    ("no_eviction", True, "scheduler.no_eviction", True),
    ("speculative_config", '{"method": "mtp", "num_speculative_tokens": 2}', "speculative.num_drafts", 2),
    ("speculative_config", {"method": "mtp", "num_speculative_tokens": 2}, "speculative", SpeculativeConfig(2)),
]


@pytest.mark.parametrize(("name", "value", "path", "expected"), ARRIVALS)
def test_flags_arrive_in_the_engine_config(name: str, value: Any, path: str, expected: Any) -> None:
    def arrived(settings: Settings) -> Any:
        found: Any = settings.engine_config(DIRECTORY)
        for part in path.split("."):
            found = getattr(found, part)
        return found

    assert arrived(make_settings({name: value})) == expected
    assert arrived(Settings()) != expected


def test_every_flag_is_the_engines_or_the_servers() -> None:
    engine = {name for name, *_ in ARRIVALS}
    server = {"api_key", "host", "port", "served_model_name", "chat_template", "generation_config", "max_logprobs"}
    parsers = {"tool_call_parser", "reasoning_parser", "enable_auto_tool_choice"}
    process = {"shutdown_timeout", "uvicorn_log_level"}
    lookup = {"model", "revision", "download_dir"}
    assert {field.name for field in dataclasses.fields(Settings)} == engine | server | parsers | process | lookup


@pytest.mark.parametrize(
    "fields",
    [
        {"shutdown_timeout": -1.0},
        {"shutdown_timeout": float("nan")},
        {"shutdown_timeout": float("inf")},
        {"max_logprobs": -1},
        {"uvicorn_log_level": "loud"},
        {"dtype": "int8"},
        {"kv_cache_dtype": "int4"},
        {"num_pages": 5, "mean_sequence_tokens": 5},
        {"max_num_batched_tokens": 63},
        {"max_model_len": 0},
        {"max_model_len": "long"},
        {"tensor_parallel_size": 0},
        {"num_snapshots": -1},
        {"snapshot_memory_share": 1.0},
        {"retained_turns": -1},
        {"snapshot_interval": 100},
        {"host_cache_bytes": "4X"},
        {"host_cache_bytes": 1, "enable_prefix_caching": False},
        {"max_queued_requests": -1},
        {"long_prefill_share": 0.0},
        {"long_prefill_min_tokens": 0},
        {"speculative_config": "mtp"},
    ],
    ids=str,
)
def test_wrong_values_name_the_flag(fields: dict[str, Any]) -> None:
    flag = "--" + next(iter(fields)).replace("_", "-")
    with pytest.raises(ConfigError, match=flag):
        make_settings(fields).engine_config(DIRECTORY)
