"""Write a small random checkpoint in the Hub's format: what tests load and what `serve` serves without a model.

The weights are random but not degenerate, so that a mistake in loading or in the maths shows:
- embeddings are about N(0, 1) and block outputs small beside them; logits spread by about 3, so greedy decoding does
  not hang on the last bit of a sum, and a one-layer draft head often agrees with the model;
- norm weights lie around their neutral value, so a wrong "1 + w" shows;
- the recurrent state's memory is log-uniform between a few and a few thousand tokens, so a wrong state shows late;
- router weights are large enough that the choice of experts is no coin toss;
- key and value widths of the recurrent layers differ, so a transposed state shows.

Names, shapes and dtypes are those of the released files: BF16, but float32 for A_log and the gated norm in the
Qwen3.5 kinds. `config.eos_token_id` is the end of text, not of a turn, as released: chat stops by generation_config.
The same arguments give the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from deltaserve.model.sample_tokenizer import END_OF_TEXT, END_OF_TURN, train_tokenizer, write_tokenizer

Kind = Literal["moe", "dense", "next"]
Tensors = dict[str, Tensor]

MODEL_TYPES = {"moe": "qwen3_5_moe_text", "dense": "qwen3_5_text", "next": "qwen3_next"}
ARCHITECTURES = {"moe": "Qwen3_5MoeForCausalLM", "dense": "Qwen3_5ForCausalLM", "next": "Qwen3NextForCausalLM"}
CONV_WIDTH = 4
ATTENTION_EVERY = 4
ROTARY_FRACTION = 0.25
ROPE_THETA = 10_000_000.0
# Rows of the embedding that no token id uses; the released files have 243.
UNUSED_ROWS = 24


@dataclass(frozen=True, slots=True)
class SampleSizes:
    """Sizes of a sample. `vocab` counts rows of the embedding; rows past the tokenizer's ids are zero in the head."""

    hidden: int = 64
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 24
    experts: int = 8
    top_k: int = 2
    expert_width: int = 32
    shared_width: int = 48
    dense_width: int = 128
    vocab: int = 1024
    max_model_len: int = 8192


# About 22 M parameters with kind "moe": large enough that a step is mostly arithmetic on two CPU cores.
BENCH_SIZES = SampleSizes(
    hidden=256,
    heads=8,
    head_dim=64,
    key_heads=4,
    value_heads=8,
    key_dim=64,
    value_dim=64,
    experts=16,
    top_k=4,
    expert_width=128,
    shared_width=128,
    dense_width=512,
    vocab=4096,
    max_model_len=32768,
)


def write_sample_checkpoint(
    directory: Path | str,
    *,
    kind: Kind = "moe",
    seed: int = 0,
    packed_experts: bool = False,
    mtp: bool = True,
    tied: bool = False,
    block_scale: float = 0.2,
    sizes: SampleSizes = SampleSizes(),
    **changes: int,
) -> None:
    """Write config, weights, tokenizer and chat template into `directory`, which is made if missing.

    kind            moe (qwen3_5_moe_text), dense (qwen3_5_text) or next (qwen3_next)
    packed_experts  one 3-D tensor per layer for all experts, instead of one per expert; both occur in released files
    tied            the head is the embedding
    block_scale     size of block outputs beside the embedding: smaller, and drafts agree more; larger, and context
                    matters more
    sizes, changes  the sizes, and single fields of them to change
    """
    shape = replace(sizes, **changes)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(shape.vocab - UNUSED_ROWS)
    num_ids = tokenizer.get_vocab_size()
    end_of_text, end_of_turn = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END_OF_TURN)
    write_tokenizer(tokenizer, directory, shape.max_model_len)

    config = _config(kind, shape, mtp, tied) | {"eos_token_id": end_of_text, "pad_token_id": end_of_text}
    generation = {
        "bos_token_id": end_of_text,
        "do_sample": True,
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": end_of_text,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    }
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")

    weights = _Weights(kind, shape, seed, block_scale).draw(num_ids, packed_experts=packed_experts, mtp=mtp, tied=tied)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _config(kind: Kind, shape: SampleSizes, mtp: bool, tied: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[kind]],
        "attention_bias": False,
        "dtype": "bfloat16",
        "full_attention_interval": ATTENTION_EVERY,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "linear_conv_kernel_dim": CONV_WIDTH,
        "linear_key_head_dim": shape.key_dim,
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "linear_value_head_dim": shape.value_dim,
        "max_position_embeddings": shape.max_model_len,
        "model_type": MODEL_TYPES[kind],
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "vocab_size": shape.vocab,
    }
    if kind != "dense":
        config |= {
            "moe_intermediate_size": shape.expert_width,
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.top_k,
            "shared_expert_intermediate_size": shape.shared_width,
        }
    if kind != "moe":
        config["intermediate_size"] = shape.dense_width
    return config | (_next_fields() if kind == "next" else _qwen3_5_fields(shape, mtp))


def _qwen3_5_fields(shape: SampleSizes, mtp: bool) -> dict[str, Any]:
    pairs = int(shape.head_dim * ROTARY_FRACTION) // 2
    third = pairs // 3
    return {
        "attn_output_gate": True,
        "layer_types": [_layer_type(layer) for layer in range(shape.layers)],
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": int(mtp),
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [pairs - 2 * third, third, third],
            "partial_rotary_factor": ROTARY_FRACTION,
            "rope_theta": ROPE_THETA,
            "rope_type": "default",
        },
    }


def _next_fields() -> dict[str, Any]:
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "partial_rotary_factor": ROTARY_FRACTION,
        "rope_scaling": None,
        "rope_theta": ROPE_THETA,
    }


def _layer_type(layer: int) -> str:
    return "full_attention" if (layer + 1) % ATTENTION_EVERY == 0 else "linear_attention"


class _Weights:
    """Draws every tensor of one checkpoint from one seeded generator, in one fixed order."""

    def __init__(self, kind: Kind, shape: SampleSizes, seed: int, block_scale: float) -> None:
        self.kind = kind
        self.shape = shape
        self.block_scale = block_scale
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, num_ids: int, *, packed_experts: bool, mtp: bool, tied: bool) -> Tensors:
        shape = self.shape
        head_std = 3.0 / math.sqrt(shape.hidden)
        embedding = self.normal(shape.vocab, shape.hidden, std=head_std if tied else 1.0)
        final_norm = self.norm(shape.hidden)
        tensors: Tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": final_norm}
        if tied:
            embedding[num_ids:] = 0
        else:
            tensors["lm_head.weight"] = self.normal(shape.vocab, shape.hidden, std=head_std)
            tensors["lm_head.weight"][num_ids:] = 0
        for layer in range(shape.layers):
            tensors |= _prefixed(f"model.layers.{layer}.", self.layer(_layer_type(layer), packed_experts))
        if mtp:
            tensors |= _prefixed("mtp.", self.draft_head(final_norm, packed_experts))
        return {name: self.stored(name, tensor) for name, tensor in tensors.items()}

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        wide = self.kind != "next" and name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))
        return tensor.to(torch.float32 if wide else torch.bfloat16).contiguous()

    def layer(self, layer_type: str, packed_experts: bool) -> Tensors:
        mixer = self.gdn() if layer_type == "linear_attention" else self.attention()
        mlp = self.dense_mlp(self.shape.dense_width) if self.kind == "dense" else self.moe(packed_experts)
        norms = {
            "input_layernorm.weight": self.norm(self.shape.hidden),
            "post_attention_layernorm.weight": self.norm(self.shape.hidden),
        }
        return norms | mixer | _prefixed("mlp.", mlp)

    def gdn(self) -> Tensors:
        shape = self.shape
        keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
        memory_s = torch.exp(self.uniform(shape.value_heads, math.log(5e-4), math.log(0.3)))
        mixer = {
            "A_log": torch.log(self.uniform(shape.value_heads, 0.5, 2.0)),
            "dt_bias": torch.log(torch.expm1(memory_s)),
            "conv1d.weight": self.normal(2 * keys + values, 1, CONV_WIDTH, std=0.5),
            "norm.weight": 1 + self.norm(shape.value_dim),
            "out_proj.weight": self.matrix(shape.hidden, values, self.block_scale),
        }
        write, decay = self.matrix(shape.value_heads, shape.hidden), self.matrix(shape.value_heads, shape.hidden, 0.3)
        if self.kind == "next":
            groups = (shape.key_heads, shape.value_heads // shape.key_heads, shape.hidden)
            grouped = torch.cat([write.view(groups), decay.view(groups)], dim=1)
            mixer["in_proj_ba.weight"] = grouped.reshape(2 * shape.value_heads, shape.hidden)
            mixer["in_proj_qkvz.weight"] = self.matrix(2 * keys + 2 * values, shape.hidden)
        else:
            mixer["in_proj_b.weight"], mixer["in_proj_a.weight"] = write, decay
            mixer["in_proj_qkv.weight"] = self.matrix(2 * keys + values, shape.hidden)
            mixer["in_proj_z.weight"] = self.matrix(values, shape.hidden)
        return _prefixed("linear_attn.", mixer)

    def attention(self) -> Tensors:
        shape = self.shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        mixer = {
            "q_proj.weight": self.matrix(2 * queries, shape.hidden),
            "k_proj.weight": self.matrix(keys, shape.hidden),
            "v_proj.weight": self.matrix(keys, shape.hidden),
            "o_proj.weight": self.matrix(shape.hidden, queries, self.block_scale),
            "q_norm.weight": self.norm(shape.head_dim),
            "k_norm.weight": self.norm(shape.head_dim),
        }
        return _prefixed("self_attn.", mixer)

    def dense_mlp(self, width: int) -> Tensors:
        return {
            "gate_proj.weight": self.matrix(width, self.shape.hidden),
            "up_proj.weight": self.matrix(width, self.shape.hidden),
            "down_proj.weight": self.matrix(self.shape.hidden, width, self.block_scale),
        }

    def moe(self, packed: bool) -> Tensors:
        shape = self.shape
        experts = [self.dense_mlp(shape.expert_width) for _ in range(shape.experts)]
        return {
            "gate.weight": self.matrix(shape.experts, shape.hidden, 2.0),
            "shared_expert_gate.weight": self.matrix(1, shape.hidden),
            **_prefixed("shared_expert.", self.dense_mlp(shape.shared_width)),
            **_prefixed("experts.", _pack(experts) if packed else dict(_numbered(experts))),
        }

    def draft_head(self, final_norm: Tensor, packed_experts: bool) -> Tensors:
        """A draft head whose `fc` leans on the embedding of the last token, as the model itself does."""
        identity = torch.eye(self.shape.hidden)
        return {
            "fc.weight": torch.cat([identity, 0.15 * identity], dim=1),
            "pre_fc_norm_embedding.weight": self.norm(self.shape.hidden, 0.05),
            "pre_fc_norm_hidden.weight": self.norm(self.shape.hidden, 0.05),
            "norm.weight": final_norm + self.norm(self.shape.hidden, 0.02),
            **_prefixed("layers.0.", self.layer("full_attention", packed_experts)),
        }

    def normal(self, *size: int, std: float) -> Tensor:
        return torch.randn(size, generator=self.generator) * std

    def uniform(self, count: int, low: float, high: float) -> Tensor:
        return torch.empty(count).uniform_(low, high, generator=self.generator)

    def matrix(self, num_out: int, num_in: int, gain: float = 1.0) -> Tensor:
        """[out, in]: inputs of unit variance give outputs of standard deviation `gain`."""
        return self.normal(num_out, num_in, std=gain / math.sqrt(num_in))

    def norm(self, width: int, std: float = 0.1) -> Tensor:
        return self.normal(width, std=std)


def _prefixed(prefix: str, tensors: Tensors) -> Tensors:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _numbered(experts: list[Tensors]) -> Iterator[tuple[str, Tensor]]:
    for index, expert in enumerate(experts):
        for name, tensor in expert.items():
            yield f"{index}.{name}", tensor


def _pack(experts: list[Tensors]) -> Tensors:
    gate_up = [torch.cat([expert["gate_proj.weight"], expert["up_proj.weight"]]) for expert in experts]
    down = [expert["down_proj.weight"] for expert in experts]
    return {"gate_up_proj": torch.stack(gate_up), "down_proj": torch.stack(down)}
