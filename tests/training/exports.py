"""FP8 and NVFP4 exports of the shipped model, written when a test asks for them."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.quantize import ENCODERS, Encoder, quantize_checkpoint

# What stays as it is, as in released files: small, or read by a router.
KEPT = ("embed_tokens", "in_proj_a", "in_proj_b", "mlp.gate", "shared_expert_gate", "mtp.fc")


def quantized_export(source: Path, target: Path, encoder: str) -> Path:
    """A checkpoint in `target` whose projections are in this format; the directory of it."""
    whole = target / "per-expert"
    shutil.copytree(source, whole, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(per_expert(load_file(source / "model.safetensors")), whole / "model.safetensors")

    def choose(stem: str) -> Encoder | None:
        return None if stem.endswith(KEPT) else ENCODERS[encoder]

    quantize_checkpoint(whole, target, choose)
    return target / "quantized"


def per_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """One tensor for each expert and projection, as quantised files have them."""
    unpacked: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj") or not stem.endswith("experts"):
            unpacked[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True) if "gate" in kind else [(kind, matrix)]
            for part, weight in parts:
                unpacked[f"{stem}.{expert}.{part}.weight"] = weight.contiguous().to(torch.bfloat16)
    return unpacked
