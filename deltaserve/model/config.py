"""The shape of one text model as a frozen value: what `model`, planning and `inspect` agree on. No torch.

`ModelConfig.from_directory` and `from_dict` read a `config.json` of the family (Qwen3-Next, Qwen3.5, 3.6, 3.8; dense,
mixture of experts, or the text part of a multimodal wrapper); `config_file` knows the file's names and defaults.
A ModelConfig that exists is consistent and can be built: everything else raises a ConfigError naming the field as
the file writes it.

Whether a draft (MTP) head exists is decided by the tensors, where the directory has any: Qwen3-Next files carry the
head without a field for it, and files saved by other tools keep the field without the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deltaserve.core.config import DTYPE_BYTES, CacheSpec
from deltaserve.core.errors import ConfigError
from deltaserve.model.checkpoint import has_mtp
from deltaserve.model.config_file import ATTENTION, GDN, Yarn, read_fields, read_json

__all__ = ["ATTENTION", "GDN", "ModelConfig", "Yarn"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the whole model, before any split over ranks.

    `layer_types[i]` is GDN or ATTENTION; `moe_layers[i]` says whether layer i has experts. The expert sizes are 0 in
    a dense model; `intermediate_size` may be 0 where every layer has experts. `rotary_dim` counts the leading dims
    of a head that are rotated. `norm_topk_prob`: the weights of a token's experts are made to sum to 1. `dtype` is
    what the file says its weights are. `weight_prefix` is where the file's decoder tensors begin.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    moe_layers: tuple[bool, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rotary_dim: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_width: int
    intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    norm_topk_prob: bool
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    num_mtp_layers: int
    weight_prefix: str = "model."
    is_multimodal: bool = False
    dtype: str = "bfloat16"
    yarn: Yarn | None = None
    eos_token_id: tuple[int, ...] = ()

    @classmethod
    def from_directory(cls, directory: Path | str) -> ModelConfig:
        """Reads `config.json`, and of the weight files (if there are any) only whether a draft head is in them."""
        directory = Path(directory)
        config = cls.from_dict(read_json(directory / "config.json"))
        if not any(directory.glob("*.safetensors")):
            return config
        return replace(config, num_mtp_layers=int(has_mtp(directory)))

    @classmethod
    def from_dict(cls, cfg: Mapping[str, Any]) -> ModelConfig:
        """From a parsed `config.json`, trusting its word on the draft head."""
        return cls(**read_fields(cfg))

    def __post_init__(self) -> None:
        _check_multiple("num_attention_heads", self.num_heads, "num_key_value_heads", self.num_kv_heads)
        _check_multiple("linear_num_value_heads", self.num_value_heads, "linear_num_key_heads", self.num_key_heads)
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ConfigError(
                f"partial_rotary_factor must give an even number of dims within head_dim {self.head_dim}, "
                f"not {self.rotary_dim}"
            )
        if self.conv_width < 2:
            raise ConfigError(f"linear_conv_kernel_dim must be at least 2, not {self.conv_width}")
        if self.num_experts_per_token > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok {self.num_experts_per_token} must not exceed num_experts {self.num_experts}"
            )
        if not all(self.moe_layers) and not self.intermediate_size:
            raise ConfigError("intermediate_size is missing, but some layers have no experts; add it to config.json")
        if self.num_mtp_layers > 1:
            raise ConfigError(f"mtp_num_hidden_layers {self.num_mtp_layers} is not served; it must be 0 or 1")

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def num_attention_layers(self) -> int:
        """Of the main model; the draft head's one comes after them."""
        return self.layer_types.count(ATTENTION)

    @property
    def num_gdn_layers(self) -> int:
        return self.layer_types.count(GDN)

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def is_next(self) -> bool:
        """Qwen3-Next stores its GDN projections grouped by key head."""
        return self.model_type == "qwen3_next"

    @property
    def key_size(self) -> int:
        """Width of a token's GDN keys, all heads together; its queries are as wide."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Width of a token's GDN values, all heads together."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_size + self.value_size

    def check_tensor_parallel(self, size: int) -> None:
        """Raises ConfigError if the model does not split over `size` ranks, naming what does not divide."""
        units = {
            "num_attention_heads": self.num_heads,
            "linear_num_key_heads": self.num_key_heads,
            "intermediate_size": 0 if all(self.moe_layers) else self.intermediate_size,
            "moe_intermediate_size": self.moe_intermediate_size,
            "shared_expert_intermediate_size": self.shared_intermediate_size,
            "vocab_size": self.vocab_size,
        }
        for name, count in units.items():
            if count % size:
                raise ConfigError(f"--tensor-parallel-size {size} does not divide {name} {count}; choose a divisor")
        if self.num_kv_heads % size and size % self.num_kv_heads:
            raise ConfigError(
                f"--tensor-parallel-size {size} neither divides num_key_value_heads {self.num_kv_heads} nor is a "
                f"multiple of it; choose one that does"
            )

    def cache_spec(
        self,
        kv_dtype: str = "auto",
        state_dtype: str = "float32",
        compute_dtype: str = "float32",
        tp_rank: int = 0,
        tp_size: int = 1,
        num_drafts: int = 0,
    ) -> CacheSpec:
        """What pages, slots and rows hold on rank `tp_rank` (the same on each). kv_dtype "auto" is compute_dtype."""
        assert 0 <= tp_rank < tp_size, (tp_rank, tp_size)
        self.check_tensor_parallel(tp_size)
        kv_dtype = compute_dtype if kv_dtype == "auto" else kv_dtype
        for dtype in (kv_dtype, state_dtype, compute_dtype):
            if dtype not in DTYPE_BYTES:
                raise ConfigError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, not {dtype!r}")
        return CacheSpec(
            num_attention_layers=self.num_attention_layers,
            num_draft_layers=self.num_mtp_layers,
            num_kv_heads=max(self.num_kv_heads // tp_size, 1),
            head_dim=self.head_dim,
            num_gdn_layers=self.num_gdn_layers,
            num_key_heads=self.num_key_heads // tp_size,
            num_value_heads=self.num_value_heads // tp_size,
            key_head_dim=self.key_head_dim,
            value_head_dim=self.value_head_dim,
            conv_width=self.conv_width,
            hidden_size=self.hidden_size,
            kv_dtype=kv_dtype,
            state_dtype=state_dtype,
            compute_dtype=compute_dtype,
            num_drafts=num_drafts,
        )


def _check_multiple(name: str, value: int, of_name: str, of: int) -> None:
    if value % of:
        raise ConfigError(f"{name} {value} must be a multiple of {of_name} {of}")
