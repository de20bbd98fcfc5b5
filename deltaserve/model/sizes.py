"""How many parameters a model has and what a sequence costs, from its shape alone. No torch.

Bytes of pages, slots and rows as the pools hold them are `ModelConfig.cache_spec`'s; the figures here are those
people compare models by: counts of the whole model, and bytes of one sequence in the types they are published with.
"""

from __future__ import annotations

from dataclasses import dataclass

from deltaserve.core.config import DTYPE_BYTES
from deltaserve.model.config import GDN, ModelConfig


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """`base` is the model without the draft head, `mtp` the draft head, and `active` what one token of `base`
    multiplies with: its experts only, one row of the embedding, the output head in full."""

    base: int
    mtp: int
    active: int

    @property
    def total(self) -> int:
        return self.base + self.mtp


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Counts every number a checkpoint of this shape holds, vision apart."""
    hidden, vocab = config.hidden_size, config.vocab_size
    mixers = sum(_gdn(config) if kind == GDN else _attention(config) for kind in config.layer_types)
    trunk = mixers + 2 * hidden * config.num_layers + hidden
    every_expert, some_experts = _moe(config, config.num_experts), _moe(config, config.num_experts_per_token)
    num_moe = sum(config.moe_layers)
    dense = (config.num_layers - num_moe) * _swiglu(config, config.intermediate_size)
    return ParameterCounts(
        base=trunk + dense + num_moe * every_expert + vocab * hidden * (1 if config.tie_word_embeddings else 2),
        mtp=config.num_mtp_layers * _mtp(config),
        active=trunk + dense + num_moe * some_experts + vocab * hidden + hidden,
    )


def kv_elements_per_token(config: ModelConfig) -> int:
    """Numbers one token leaves in the KV cache of the main model; the draft head adds `2 * kv heads * head_dim`."""
    return 2 * config.num_kv_heads * config.head_dim * config.num_attention_layers


def state_bytes(config: ModelConfig, dtype: str = "float32") -> int:
    """One sequence's recurrent state over all GDN layers."""
    return config.num_gdn_layers * config.value_size * config.key_head_dim * DTYPE_BYTES[dtype]


def conv_state_bytes(config: ModelConfig, dtype: str = "bfloat16") -> int:
    """One sequence's convolution window over all GDN layers."""
    return config.num_gdn_layers * config.conv_channels * (config.conv_width - 1) * DTYPE_BYTES[dtype]


def _gdn(config: ModelConfig) -> int:
    projections = config.conv_channels + 2 * config.value_size + 2 * config.num_value_heads  # qkv; z and out; b, a
    small = config.conv_width * config.conv_channels + 2 * config.num_value_heads + config.value_head_dim
    return config.hidden_size * projections + small


def _attention(config: ModelConfig) -> int:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.hidden_size * (3 * queries + 2 * keys) + 2 * config.head_dim  # q with its gate; output


def _swiglu(config: ModelConfig, width: int) -> int:
    return 3 * config.hidden_size * width


def _moe(config: ModelConfig, num_experts: int) -> int:
    """One expert layer of which `num_experts` count; the router and the shared expert with its gate count in full."""
    router = config.num_experts * config.hidden_size
    shared = _swiglu(config, config.shared_intermediate_size) + config.hidden_size
    return num_experts * _swiglu(config, config.moe_intermediate_size) + router + shared


def _mtp(config: ModelConfig) -> int:
    ffn = _moe(config, config.num_experts) if config.is_moe else _swiglu(config, config.intermediate_size)
    hidden = config.hidden_size
    return 2 * hidden * hidden + 3 * hidden + _attention(config) + 2 * hidden + ffn
