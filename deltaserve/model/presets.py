"""The published shapes as data, for planning and for dummy weights without a checkpoint.

Every one has heads of 256 (GDN: 128), 16 GDN key heads, a convolution of 4, a draft head and a trained context of
262,144 tokens; every fourth layer is full attention. Only what differs is in the table.
"""

from __future__ import annotations

from typing import Any

from deltaserve.core.errors import ConfigError
from deltaserve.model.config import ModelConfig

_COMMON: dict[str, Any] = {
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "mtp_num_hidden_layers": 1,
    "dtype": "bfloat16",
}


def _dense(
    layers: int, hidden: int, heads: int, kv_heads: int, value_heads: int, ffn: int, tied: bool
) -> dict[str, Any]:
    text = _trunk(layers, hidden, heads, kv_heads, value_heads) | {
        "model_type": "qwen3_5_text",
        "intermediate_size": ffn,
        "eos_token_id": 248044,
    }
    return {"model_type": "qwen3_5", "tie_word_embeddings": tied, "text_config": text}


def _moe(layers: int, hidden: int, heads: int, value_heads: int, experts: int, top_k: int, ffn: int) -> dict[str, Any]:
    text = _trunk(layers, hidden, heads, 2, value_heads) | {
        "model_type": "qwen3_5_moe_text",
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": ffn,
        "shared_expert_intermediate_size": ffn,
        "eos_token_id": 248044,
    }
    return {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "text_config": text}


def _trunk(layers: int, hidden: int, heads: int, kv_heads: int, value_heads: int) -> dict[str, Any]:
    return _COMMON | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "linear_num_value_heads": value_heads,
    }


_NEXT = _COMMON | {"model_type": "qwen3_next", "intermediate_size": 5120, "eos_token_id": 151645}
_35B = _moe(40, 2048, 16, 32, 256, 8, 512)
_27B = _dense(64, 5120, 24, 4, 48, 17408, tied=False)
_FLAGSHIP = _moe(92, 8192, 64, 128, 512, 10, 2048)["text_config"] | {"num_key_value_heads": 4}

PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-next-80b-a3b": _NEXT,
    "qwen3-coder-next": _NEXT | {"rope_parameters": _COMMON["rope_parameters"] | {"rope_theta": 5e6}},
    "qwen3.5-0.8b": _dense(24, 1024, 8, 2, 16, 3584, tied=True),
    "qwen3.5-2b": _dense(24, 2048, 8, 2, 16, 6144, tied=True),
    "qwen3.5-4b": _dense(32, 2560, 16, 4, 32, 9216, tied=True),
    "qwen3.5-9b": _dense(32, 4096, 16, 4, 32, 12288, tied=False),
    "qwen3.5-27b": _27B,
    "qwen3.6-27b": _27B,
    "qwen3.8-27b": _27B,
    "qwen3.5-35b-a3b": _35B,
    "qwen3.6-35b-a3b": _35B,
    "qwen3.5-122b-a10b": _moe(48, 3072, 32, 64, 256, 8, 1024),
    "qwen3.5-397b-a17b": _moe(60, 4096, 32, 64, 512, 10, 1024),
    "qwen3.8-2.4t-a95b": _FLAGSHIP,
}


def preset(name: str) -> ModelConfig:
    """The shape published under `name` (any case). ConfigError lists the known names."""
    if name.lower() not in PRESETS:
        raise ConfigError(f"no preset {name!r}; known are {', '.join(PRESETS)}")
    return ModelConfig.from_dict(PRESETS[name.lower()])
