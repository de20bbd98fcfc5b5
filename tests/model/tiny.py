"""Tiny random models of each kind as `transformers` defines them: the oracle, and the checkpoints to load from it.

A freshly made model is degenerate (norms and dt_bias constant, router zero): a wrong norm or head order would go
unnoticed. So matrices are scaled up and every vector is moved. Embeddings get unit size, as trained ones have beside
what layers add: with tiny ones each layer's rounding is the next one's input, and two float32 programs differ by
3e-4 where either is as far from float64. Key and value heads of GDN have unequal sizes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

KINDS = ("dense", "moe", "next", "vl")
VOCAB = 512
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
_MROPE = _ROPE | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "in_channels": 3,
}
_MEDIA_IDS = {"image_token_id": 500, "video_token_id": 501, "vision_start_token_id": 502, "vision_end_token_id": 503}


def hf_model(kind: str, *, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """A float32 model of `kind`; `overrides` are fields of its text config."""
    torch.manual_seed(seed)
    model = _fresh(kind, overrides).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            _perturb(parameter)
        if not overrides.get("tie_word_embeddings"):
            model.get_input_embeddings().weight.mul_(8)
    return model


def _perturb(parameter: Tensor) -> None:
    if parameter.ndim >= 2:
        parameter.mul_(6)
    else:
        parameter.add_(0.3 * torch.randn_like(parameter))


def save(model: transformers.PreTrainedModel, directory: Path, *, mtp: bool = False) -> None:
    """In the Hub's layout. `mtp` adds a draft head: the last layer with noise, and a random input projection."""
    model.save_pretrained(directory)
    if not mtp:
        return
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    text["mtp_num_hidden_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    tensors |= _mtp_tensors(tensors, text["num_hidden_layers"] - 1, text["hidden_size"])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _mtp_tensors(tensors: dict[str, Tensor], layer: int, hidden: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = {"mtp.fc.weight": 0.1 * torch.randn(hidden, 2 * hidden, generator=generator)}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        found[f"mtp.{name}.weight"] = 0.3 * torch.randn(hidden, generator=generator)
    for name, tensor in tensors.items():
        _, is_there, rest = name.partition(f"layers.{layer}.")
        if is_there:
            found[f"mtp.layers.0.{rest}"] = tensor + 0.05 * torch.randn(tensor.shape, generator=generator)
    return found


@torch.no_grad()
def hf_draft_hidden(directory: Path, ids: list[int]) -> Tensor:
    """[T - 1, hidden]: the draft head's output at positions 1, 2, ... of a text-only checkpoint."""
    config = transformers.AutoConfig.from_pretrained(directory)
    config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    head = MtpModel.from_pretrained(model)
    hidden = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
    positions = torch.arange(1, len(ids))[None]
    cache = MtpCache(config=config.get_mtp_config())
    return head.forward_layer(0, hidden[:, :-1], positions, cache, input_ids=torch.tensor([ids[1:]]))[0]


@torch.no_grad()
def hf_logits(model: nn.Module, ids: list[int]) -> Tensor:
    """[T, vocabulary] float32."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def random_ids(count: int, seed: int = 0) -> list[int]:
    """Below the ids that mean images."""
    return torch.randint(0, 490, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _fresh(kind: str, overrides: dict[str, Any]) -> transformers.PreTrainedModel:
    if kind == "dense":
        text = _COMMON | {"intermediate_size": 128, "rope_parameters": _MROPE} | overrides
        return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**text))
    if kind == "moe":
        text = _COMMON | _EXPERTS | {"rope_parameters": _MROPE} | overrides
        return transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**text))
    if kind == "next":
        text = _COMMON | _EXPERTS | {"intermediate_size": 128, "rope_parameters": _ROPE} | overrides
        return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**text))
    assert kind == "vl", kind
    text = _COMMON | _EXPERTS | {"rope_parameters": _MROPE} | overrides
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=_VISION, **_MEDIA_IDS)
    return transformers.Qwen3_5MoeForConditionalGeneration(config)
