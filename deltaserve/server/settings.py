"""Everything `deltaserve serve` can be told, in one table: each field is a flag and a key of the `--config` file.

Names are vLLM's where the meaning is the same. The command line wins over the file; a key that does not exist is
refused, and the nearest one that does is named. Sizes may be written as people do: 32k is 32,000 and 32K is 32,768.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import yaml

from deltaserve.core.config import CacheConfig, EngineConfig, SchedulerConfig
from deltaserve.core.errors import ConfigError
from deltaserve.engine.speculative import speculative_config
from deltaserve.server.parsers.formats import check_parsers

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")

SERVER, MODEL, MEMORY, CACHE = "Server", "Model", "Memory", "Prefix cache"
SCHEDULING, MACHINE = "Scheduling", "Machine"

DRAFTS_HELP = 'Drafts, as JSON: {"method": "mtp", "num_speculative_tokens": 3}.'

API_KEY_HELP = "A key that clients must send, as a bearer token or as x-api-key; repeat it for several."


def _flag(default: Any, panel: str, text: str) -> Any:
    return field(default=default, metadata={"panel": panel, "help": text})


@dataclass(frozen=True, slots=True)
class Settings:
    """Values as given; `engine_config` checks and converts those that concern the engine."""

    model: str | None = None

    host: str = _flag("127.0.0.1", SERVER, "Address to listen on; 0.0.0.0 for all.")
    port: int = _flag(8000, SERVER, "Port to listen on; 0 takes a free one.")
    served_model_name: tuple[str, ...] = _flag((), SERVER, "Names for clients; repeat it for aliases.")
    api_key: tuple[str, ...] = field(default=(), repr=False, metadata={"panel": SERVER, "help": API_KEY_HELP})
    chat_template: str | None = _flag(None, SERVER, "A jinja file in place of the checkpoint's template.")
    tool_call_parser: str = _flag(
        "auto", SERVER, "Format of tool calls: auto (by the template), qwen3_coder, hermes, none."
    )
    reasoning_parser: str = _flag("auto", SERVER, "Format of thinking: auto (by the template), qwen3, none.")
    enable_auto_tool_choice: bool = _flag(True, SERVER, "Accepted for vLLM's command lines; calls are always read.")
    generation_config: str = _flag("auto", SERVER, "Sampling defaults: auto (the checkpoint's), vllm, or a directory.")
    max_logprobs: int = _flag(20, SERVER, "Most alternatives per token that a request may ask for.")
    shutdown_timeout: float = _flag(30.0, SERVER, "Seconds that running requests get after SIGTERM.")
    uvicorn_log_level: str = _flag("warning", SERVER, f"One of {', '.join(LOG_LEVELS)}; info logs every request.")

    max_model_len: int | str = _flag("auto", MODEL, "Context length in tokens: auto, 32768, 32k or 32K.")
    device: str = _flag("auto", MODEL, "Where to compute: auto (a GPU where there is one), cpu or cuda.")
    dtype: str = _flag("auto", MODEL, "Type to compute in: auto, float32 or bfloat16.")
    load_format: str = _flag("auto", MODEL, "auto, or dummy for random weights of the right shape.")
    revision: str | None = _flag(None, MODEL, "Branch, tag or commit of a model on the Hub.")
    download_dir: str | None = _flag(None, MODEL, "Where models from the Hub are kept.")
    seed: int = _flag(0, MODEL, "Seed for dummy weights and for requests that bring none.")

    kv_cache_dtype: str = _flag("auto", MEMORY, "Type of the KV pages: auto, bfloat16, fp8 or fp8_e4m3.")
    mamba_ssm_cache_dtype: str = _flag("auto", MEMORY, "Type of the recurrent state: auto, float32, float16, bfloat16.")
    kv_cache_memory_bytes: int | str | None = _flag(None, MEMORY, "Bytes for all pools together, such as 4G.")
    num_pages: int | None = _flag(None, MEMORY, "Number of pages of 64 tokens.")
    mean_sequence_tokens: int | None = _flag(None, MEMORY, "Size the pools for sequences of this mean length.")
    memory_utilization: float = _flag(0.4, MEMORY, "Share of the free memory for the pools.")

    enable_prefix_caching: bool = _flag(True, CACHE, "Reuse what earlier requests computed.")
    num_snapshots: int | None = _flag(None, CACHE, "States kept for reuse; left out: by their share of the memory.")
    snapshot_memory_share: float = _flag(0.25, CACHE, "Share of the cache's memory for states; pages get the rest.")
    retained_turns: int = _flag(3, CACHE, "Latest turns of a conversation that keep their states.")
    snapshot_interval: int | str = _flag(0, CACHE, "Tokens between states kept for no other reason; 0: none are.")
    host_cache_bytes: int | str = _flag(0, CACHE, "Host memory for what leaves the device, such as 4G; 0: none.")

    max_num_seqs: int = _flag(32, SCHEDULING, "Most requests that run at once.")
    max_num_batched_tokens: int = _flag(2048, SCHEDULING, "Most tokens that one step computes.")
    max_queued_requests: int | None = _flag(None, SCHEDULING, "Most requests that wait; one more is answered with 429.")
    long_prefill_share: float = _flag(0.3, SCHEDULING, "Most time that long prompts take while others are served.")
    long_prefill_min_tokens: int | str = _flag(4096, SCHEDULING, "Tokens to compute from which a prompt is long.")
    no_eviction: bool = _flag(False, SCHEDULING, "Admit only what can run to its end; nothing is ever preempted.")
    speculative_config: str | Mapping[str, Any] | None = _flag(None, SCHEDULING, DRAFTS_HELP)

    tensor_parallel_size: int = _flag(1, MACHINE, "Ranks that share each layer.")
    num_threads: int | None = _flag(None, MACHINE, "CPU threads of all ranks together.")
    debug_checks: bool = _flag(False, MACHINE, "Check every owner's books after each step; slow.")

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"--port must be in [0, 65535], not {self.port}")
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ConfigError(f"--shutdown-timeout must be a number of seconds, not {self.shutdown_timeout}")
        if self.max_logprobs < 0:
            raise ConfigError(f"--max-logprobs must be at least 0, not {self.max_logprobs}")
        if self.uvicorn_log_level not in LOG_LEVELS:
            raise ConfigError(
                f"--uvicorn-log-level must be one of {', '.join(LOG_LEVELS)}, not {self.uvicorn_log_level!r}"
            )
        if not all(key.isascii() and key.isprintable() and key.strip() == key != "" for key in self.api_key):
            raise ConfigError("--api-key must be printable ASCII text without spaces around it")
        if not self.enable_auto_tool_choice:
            raise ConfigError(
                "--no-enable-auto-tool-choice is not offered; --tool-call-parser none leaves calls as text"
            )
        check_parsers(self.tool_call_parser, self.reasoning_parser)

    def engine_config(self, directory: Path) -> EngineConfig:
        """For a checkpoint in `directory`. Raises ConfigError naming the flag."""
        is_auto = self.max_model_len == "auto"
        return EngineConfig(
            model=directory,
            max_model_len=None if is_auto else parse_size(self.max_model_len, "max_model_len"),
            device=self.device,
            dtype=self.dtype,
            load_format=self.load_format,
            seed=self.seed,
            tensor_parallel_size=self.tensor_parallel_size,
            num_threads=self.num_threads,
            debug_checks=self.debug_checks,
            cache=self._cache_config(),
            scheduler=self._scheduler_config(),
            speculative=speculative_config(self.speculative_config),
        )

    def _cache_config(self) -> CacheConfig:
        size = self.kv_cache_memory_bytes
        return CacheConfig(
            kv_cache_dtype="fp8_e4m3" if self.kv_cache_dtype == "fp8" else self.kv_cache_dtype,
            state_dtype="float32" if self.mamba_ssm_cache_dtype == "auto" else self.mamba_ssm_cache_dtype,
            num_pages=self.num_pages,
            kv_cache_memory_bytes=None if size is None else parse_size(size, "kv_cache_memory_bytes"),
            mean_sequence_tokens=self.mean_sequence_tokens,
            memory_utilization=self.memory_utilization,
            enable_prefix_caching=self.enable_prefix_caching,
            num_snapshots=self.num_snapshots,
            snapshot_memory_share=self.snapshot_memory_share,
            retained_turns=self.retained_turns,
            snapshot_interval=parse_size(self.snapshot_interval, "snapshot_interval"),
            host_cache_bytes=parse_size(self.host_cache_bytes, "host_cache_bytes"),
        )

    def _scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_share=self.long_prefill_share,
            long_prefill_min_tokens=parse_size(self.long_prefill_min_tokens, "long_prefill_min_tokens"),
            no_eviction=self.no_eviction,
            max_queued=self.max_queued_requests,
        )


def make_settings(given: Mapping[str, Any], config: Path | None = None) -> Settings:
    """From the flags that were given and the `--config` file, if any."""
    values = {**(read_config(config) if config else {}), **given}
    try:
        return msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(f"{config or 'command line'}: {_type_sentence(str(error))}") from None


def _type_sentence(sentence: str) -> str:
    """From msgspec's sentence ("Expected `int`, got `str` - at `$.port`") to ours."""
    match = re.fullmatch(r"Expected `(.+)`, got `(.+)` - at `\$\.(\w+).*`", sentence)
    if match is None:
        return sentence
    kinds = match[1].replace(" | ", " or ").replace("array", "list")
    return f"{match[3].replace('_', '-')} must be {kinds}, not {match[2].replace('array', 'list')}"


def read_config(path: Path) -> dict[str, Any]:
    """Keys of a YAML file, written with dashes or underscores."""
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config: {path} must hold keys and values")
    values = {_known_key(key, path): _listed(value) for key, value in content.items()}
    for name in ("served_model_name", "api_key"):
        if isinstance(values.get(name), str):
            values[name] = (values[name],)
    return values


def parse_size(value: int | str, name: str) -> int:
    """32768, "32768", "32k" (thousand) or "32K" (1024)."""
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)", value.strip())
    if match is None:
        flag = "--" + name.replace("_", "-")
        raise ConfigError(f"{flag} must be a number such as 32768, 32k or 32K, not {value!r}")
    return int(float(match[1]) * UNITS[match[2]]) if "." in match[1] else int(match[1]) * UNITS[match[2]]


def _known_key(key: object, path: Path) -> str:
    known = [item.name for item in dataclasses.fields(Settings)]
    name = str(key).replace("-", "_")
    if name in known:
        return name
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    raise ConfigError(f"--config: {path} has an unknown key {key!r}; the nearest known one is {nearest!r}")


def _listed(value: Any) -> Any:
    """YAML lists as tuples."""
    return tuple(value) if isinstance(value, list) else value
