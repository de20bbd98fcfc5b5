"""Settings as frozen values, one class per area, and the sizes that cache, scheduler and runner share.

Names follow vLLM's flags where the meaning is the same. Nothing here touches a device, a file or torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from deltaserve.core.errors import ConfigError
from deltaserve.core.types import BLOCK

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1}


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Everything that decides how many bytes a page, a slot and a running row take, on one rank.

    Heads are this rank's heads. `num_attention_layers` counts the main model's; `num_draft_layers` the MTP layers,
    whose KV sits in the same pages after the main ones. `conv_channels` is the width of the convolution's input:
    2 * num_key_heads * key_head_dim + num_value_heads * value_head_dim. `num_drafts` is the most drafts a verify
    row carries. dtypes are keys of DTYPE_BYTES; the ring and the conv window are kept in `compute_dtype`.
    """

    num_attention_layers: int
    num_draft_layers: int
    num_kv_heads: int
    head_dim: int
    num_gdn_layers: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    hidden_size: int
    kv_dtype: str
    state_dtype: str
    compute_dtype: str
    num_drafts: int = 0

    @property
    def conv_channels(self) -> int:
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * self.value_head_dim

    @property
    def conv_ring_width(self) -> int:
        """Inputs a running row keeps per GDN layer: the window, the token, its drafts."""
        return self.conv_width + self.num_drafts

    @property
    def kv_bytes_per_token(self) -> int:
        layers = self.num_attention_layers + self.num_draft_layers
        return 2 * layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.kv_dtype]

    @property
    def page_bytes(self) -> int:
        return BLOCK * self.kv_bytes_per_token

    @property
    def slot_bytes(self) -> int:
        """One snapshot: states, conv windows, last hidden vector."""
        state = self.num_value_heads * self.key_head_dim * self.value_head_dim * DTYPE_BYTES[self.state_dtype]
        window = (self.conv_width - 1) * self.conv_channels * DTYPE_BYTES[self.compute_dtype]
        return self.num_gdn_layers * (state + window) + self.hidden_size * DTYPE_BYTES[self.compute_dtype]

    @property
    def ring_bytes(self) -> int:
        """A running row's (k, u, g) of the tokens since its boundary; the same however many drafts there are."""
        keys = self.num_key_heads * self.key_head_dim * DTYPE_BYTES[self.compute_dtype]
        updates = self.num_value_heads * self.value_head_dim * DTYPE_BYTES["float32"]
        decays = self.num_value_heads * DTYPE_BYTES["float32"]
        return self.num_gdn_layers * BLOCK * (keys + updates + decays)

    @property
    def row_bytes(self) -> int:
        """What a running row owns beside pages and slots: its ring, its conv ring, with drafts its last hidden."""
        conv = self.num_gdn_layers * self.conv_ring_width * self.conv_channels * DTYPE_BYTES[self.compute_dtype]
        last_hidden = bool(self.num_drafts) * self.hidden_size * DTYPE_BYTES[self.compute_dtype]
        return self.ring_bytes + conv + last_hidden


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How large the pools are and in what type. At most one of the three sizes is given; none: from free memory."""

    kv_cache_dtype: str = "auto"  # auto | bfloat16 | fp8_e4m3
    state_dtype: str = "float32"  # float32 | float16 | bfloat16
    num_pages: int | None = None
    kv_cache_memory_bytes: int | None = None
    mean_sequence_tokens: int | None = None
    memory_utilization: float = 0.4
    enable_prefix_caching: bool = True
    num_snapshots: int | None = None  # slots beyond those of running rows; None: by share
    snapshot_memory_share: float = 0.25  # of the memory for cached content, device and host alike; pages get the rest
    retained_turns: int = 3  # turn ends of a conversation that keep their snapshots
    snapshot_interval: int = 0  # tokens between periodic snapshots (a multiple of 64); 0: none
    host_cache_bytes: int = 0  # second tier; 0: none

    def __post_init__(self) -> None:
        sizes = (self.num_pages, self.kv_cache_memory_bytes, self.mean_sequence_tokens)
        if sum(size is not None for size in sizes) > 1:
            raise ConfigError(
                "give one of --num-pages, --kv-cache-memory-bytes and --mean-sequence-tokens, not several"
            )
        _check_choice("--kv-cache-dtype", self.kv_cache_dtype, ("auto", "bfloat16", "fp8_e4m3"))
        _check_choice("--mamba-ssm-cache-dtype", self.state_dtype, ("float32", "float16", "bfloat16"))
        if not 0 < self.memory_utilization <= 1:
            raise ConfigError(f"--memory-utilization must be in (0, 1], not {self.memory_utilization}")
        for flag, size in zip(("--num-pages", "--kv-cache-memory-bytes", "--mean-sequence-tokens"), sizes, strict=True):
            if size is not None and size < 1:
                raise ConfigError(f"{flag} must be at least 1, not {size}")
        self._check_prefix_cache()

    def _check_prefix_cache(self) -> None:
        if not 0 <= self.snapshot_memory_share < 1:
            raise ConfigError(f"--snapshot-memory-share must be in [0, 1), not {self.snapshot_memory_share}")
        if self.snapshot_interval % BLOCK:
            raise ConfigError(f"--snapshot-interval must be a multiple of {BLOCK}, not {self.snapshot_interval}")
        counts = {
            "--num-snapshots": self.num_snapshots or 0,
            "--retained-turns": self.retained_turns,
            "--snapshot-interval": self.snapshot_interval,
            "--host-cache-bytes": self.host_cache_bytes,
        }
        for flag, count in counts.items():
            if count < 0:
                raise ConfigError(f"{flag} must be at least 0, not {count}")
        if self.host_cache_bytes and not self.enable_prefix_caching:
            raise ConfigError("--host-cache-bytes needs the prefix cache; drop --no-enable-prefix-caching")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_num_batched_tokens` is the most tokens one step computes, over all its rows.

    A prompt with at least `long_prefill_min_tokens` left to compute is long: while others decode or wait with short
    prompts, long ones together get at most `long_prefill_share` of the wall time. `no_eviction` admits a request only
    when all that it may come to need is free. `max_queued` waiting requests are the most; one more is refused (429).
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    long_prefill_share: float = 0.3
    long_prefill_min_tokens: int = 4096
    no_eviction: bool = False
    max_queued: int | None = None

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError(f"--max-num-seqs must be at least 1, not {self.max_num_seqs}")
        if self.max_num_batched_tokens < BLOCK:
            raise ConfigError(
                f"--max-num-batched-tokens must be at least {BLOCK}, not {self.max_num_batched_tokens}: prefill chunks "
                f"end on multiples of {BLOCK} tokens"
            )
        if not 0 < self.long_prefill_share <= 1:
            raise ConfigError(f"--long-prefill-share must be in (0, 1], not {self.long_prefill_share}")
        if self.long_prefill_min_tokens < 1:
            raise ConfigError(f"--long-prefill-min-tokens must be at least 1, not {self.long_prefill_min_tokens}")
        if self.max_queued is not None and self.max_queued < 0:
            raise ConfigError(f"--max-queued-requests must be at least 0, not {self.max_queued}")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Drafts from the model's own MTP head. `num_drafts` 0: none (the head is then not loaded).

    `synthetic_acceptance` (accepted tokens a step, the sampled one included) replaces the comparison of drafts by a
    fixed schedule: for benchmarks, its text means nothing. `is_adaptive` lets each request's draft count follow what
    of its drafts was accepted.
    """

    num_drafts: int = 0
    synthetic_acceptance: float | None = None
    is_adaptive: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.num_drafts <= 7:
            raise ConfigError(
                f"num_speculative_tokens (--speculative-config) must be between 0 and 7, not {self.num_drafts}"
            )
        if self.synthetic_acceptance is not None and not 1 <= self.synthetic_acceptance <= 1 + self.num_drafts:
            raise ConfigError(
                f"an acceptance of {self.synthetic_acceptance} tokens a step cannot come from {self.num_drafts} "
                f"drafts; it is between 1 and {1 + self.num_drafts}, the sampled token included"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine process needs to start. `model` is a directory in the Hub's layout."""

    model: Path
    max_model_len: int | None = None  # None: what the checkpoint says, or less if the pools hold less ("auto")
    device: str = "auto"  # auto (a GPU where there is one) | cpu | cuda
    dtype: str = "auto"  # auto (float32 on the CPU, else bfloat16) | float32 | bfloat16
    load_format: str = "auto"  # auto | dummy
    seed: int = 0
    tensor_parallel_size: int = 1
    num_threads: int | None = None
    debug_checks: bool = False  # run check() of every owner after each step, fill retired rows with NaN
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    def __post_init__(self) -> None:
        _check_choice("--device", self.device, ("auto", "cpu", "cuda"))
        _check_choice("--dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _check_choice("--load-format", self.load_format, ("auto", "dummy"))
        if self.tensor_parallel_size < 1:
            raise ConfigError(f"--tensor-parallel-size must be at least 1, not {self.tensor_parallel_size}")
        if self.max_model_len is not None and self.max_model_len < 1:
            raise ConfigError(f"--max-model-len must be at least 1, not {self.max_model_len}")
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"--num-threads must be at least 1, not {self.num_threads}")


def _check_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{flag} must be one of {', '.join(choices)}, not {value!r}")
