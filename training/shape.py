"""The sizes of the small model, its config.json and its tensors' names, shapes and first values.

The shape is a small member of the family: three recurrent layers (GDN) to one of attention, every layer with routed
experts and a shared one, one draft layer (MTP), the head tied to the embedding. Widths are chosen so that mistakes
show: keys (32) and values (48) of GDN differ, widths of 256 and 384 fill blocks of 128, widths of 48 and 192 do not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LAYER_TYPES = ("linear_attention", "linear_attention", "linear_attention", "full_attention")


@dataclass(frozen=True, slots=True)
class Shape:
    """Every size of the model. The defaults are those of models/tiny."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    key_heads: int = 4
    value_heads: int = 8
    key_dim: int = 32
    value_dim: int = 48
    experts: int = 16
    top_k: int = 4
    expert_width: int = 48
    shared_width: int = 192
    conv_width: int = 4
    rotary_fraction: float = 0.25
    rope_theta: float = 10_000_000.0
    eps: float = 1e-6
    max_model_len: int = 16384

    @property
    def layer_types(self) -> tuple[str, ...]:
        return tuple(LAYER_TYPES[layer % 4] for layer in range(self.layers))

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_size + self.value_size

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_fraction)


_CONFIG_KEYS = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
    "shared_width": "shared_expert_intermediate_size",
    "conv_width": "linear_conv_kernel_dim",
    "eps": "rms_norm_eps",
    "max_model_len": "max_position_embeddings",
}


def config_dict(shape: Shape, end_of_text: int) -> dict[str, Any]:
    """The contents of config.json. `end_of_text` is <|endoftext|>; turns end by generation_config.json, as released."""
    pairs = shape.rotary_dim // 2
    third = pairs // 3
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": end_of_text,
        "full_attention_interval": len(LAYER_TYPES),
        "hidden_act": "silu",
        "layer_types": list(shape.layer_types),
        "mamba_ssm_dtype": "float32",
        "model_type": "qwen3_5_moe_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "pad_token_id": end_of_text,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [pairs - 2 * third, third, third],
            "partial_rotary_factor": shape.rotary_fraction,
            "rope_theta": shape.rope_theta,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        **{key: getattr(shape, name) for name, key in _CONFIG_KEYS.items()},
    }


def read_shape(directory: Path) -> Shape:
    """The shape that a config.json of ours describes."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    rope = config["rope_parameters"]
    values = {name: config[key] for name, key in _CONFIG_KEYS.items()}
    return Shape(**values, rotary_fraction=rope["partial_rotary_factor"], rope_theta=rope["rope_theta"])


def parse_shape(changes: str) -> Shape:
    """`hidden=64,layers=4`: the default shape with these sizes changed."""
    kinds = {field.name: type(getattr(Shape(), field.name)) for field in fields(Shape)}
    pairs = (change.split("=") for change in changes.split(",") if change)
    return Shape(**{name: kinds[name](value) for name, value in pairs})


def new_weights(shape: Shape, seed: int) -> dict[str, Tensor]:
    """Fresh float32 weights by their released names. The same arguments give the same values."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _first_value(name, size, shape, generator) for name, size in weight_sizes(shape).items()}


def weight_sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every tensor's name and size, in the order of the file."""
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for layer, kind in enumerate(shape.layer_types):
        sizes |= {f"model.layers.{layer}.{name}": size for name, size in _layer_sizes(shape, kind)}
    sizes["model.norm.weight"] = (shape.hidden,)
    sizes["mtp.fc.weight"] = (shape.hidden, 2 * shape.hidden)
    sizes |= {f"mtp.layers.0.{name}": size for name, size in _layer_sizes(shape, "full_attention")}
    sizes |= {f"mtp.{name}.weight": (shape.hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return sizes


def _layer_sizes(shape: Shape, kind: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "input_layernorm.weight", (shape.hidden,)
    yield "post_attention_layernorm.weight", (shape.hidden,)
    yield from _gdn_sizes(shape) if kind == "linear_attention" else _attention_sizes(shape)
    experts, hidden, width, shared = shape.experts, shape.hidden, shape.expert_width, shape.shared_width
    yield "mlp.gate.weight", (experts, hidden)
    yield "mlp.experts.gate_up_proj", (experts, 2 * width, hidden)
    yield "mlp.experts.down_proj", (experts, hidden, width)
    yield "mlp.shared_expert.gate_proj.weight", (shared, hidden)
    yield "mlp.shared_expert.up_proj.weight", (shared, hidden)
    yield "mlp.shared_expert.down_proj.weight", (hidden, shared)
    yield "mlp.shared_expert_gate.weight", (1, hidden)


def _gdn_sizes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads, hidden = shape.value_heads, shape.hidden
    yield "linear_attn.in_proj_qkv.weight", (shape.conv_channels, hidden)
    yield "linear_attn.in_proj_z.weight", (shape.value_size, hidden)
    yield "linear_attn.in_proj_b.weight", (heads, hidden)
    yield "linear_attn.in_proj_a.weight", (heads, hidden)
    yield "linear_attn.conv1d.weight", (shape.conv_channels, 1, shape.conv_width)
    yield "linear_attn.A_log", (heads,)
    yield "linear_attn.dt_bias", (heads,)
    yield "linear_attn.norm.weight", (shape.value_dim,)
    yield "linear_attn.out_proj.weight", (hidden, shape.value_size)


def _attention_sizes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "self_attn.q_proj.weight", (2 * queries, shape.hidden)
    yield "self_attn.k_proj.weight", (keys, shape.hidden)
    yield "self_attn.v_proj.weight", (keys, shape.hidden)
    yield "self_attn.o_proj.weight", (shape.hidden, queries)
    yield "self_attn.q_norm.weight", (shape.head_dim,)
    yield "self_attn.k_norm.weight", (shape.head_dim,)


def _first_value(name: str, size: tuple[int, ...], shape: Shape, generator: torch.Generator) -> Tensor:
    """Norms are neutral, outputs of blocks small, memories of GDN log-uniform from a few to about a thousand tokens."""
    if name.endswith("A_log"):
        return torch.empty(size).uniform_(1.0, 8.0, generator=generator).log()
    if name.endswith("dt_bias"):
        step = torch.empty(size).uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp()
        return step.expm1().log()
    if name.endswith("linear_attn.norm.weight"):
        return torch.ones(size)
    if len(size) == 1:
        return torch.zeros(size)
    if "embed_tokens" in name:
        return torch.randn(size, generator=generator) * 0.02
    std = 0.3 if "conv1d" in name else 0.5 / math.sqrt(size[-1])
    if any(part in name for part in ("out_proj", "o_proj", "down_proj")):
        std /= math.sqrt(2 * shape.layers)
    return torch.randn(size, generator=generator) * std
