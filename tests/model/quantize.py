"""Encoders of the quantised formats, and of whole checkpoints with their dequantised twins.

Each encoder returns the tensors of one module by suffix, and the float32 values they stand for, which it works out
from its own codes and scales; it shares nothing with the code under test.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Encoded = tuple[dict[str, Tensor], Tensor]
Encoder = Callable[[Tensor], Encoded]

FP8_MAX = 448.0
TINY = 1e-6  # rows of a head that no token uses are all zero
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GROUP = 16


def fp8_block(weight: Tensor, size: int = 128) -> Encoded:
    """Scales in bfloat16, one for each block of 128 x 128; edge blocks are smaller."""
    scale = torch.empty(-(-weight.shape[0] // size), -(-weight.shape[1] // size), dtype=torch.bfloat16)
    codes, values = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            scale[i, j] = weight[block].abs().max().clamp(min=TINY) / FP8_MAX
            codes[block] = (weight[block] / scale[i, j].float()).clamp(-FP8_MAX, FP8_MAX).to(codes.dtype)
            values[block] = codes[block].float() * scale[i, j].float()
    return {"weight": codes, "weight_scale_inv": scale}, values


def fp8_tensor(weight: Tensor) -> Encoded:
    scale = weight.abs().max().float() / FP8_MAX
    codes = (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, codes.float() * scale


def fp8_channel(weight: Tensor) -> Encoded:
    scale = (weight.abs().amax(dim=1, keepdim=True).clamp(min=TINY) / FP8_MAX).bfloat16()
    codes = (weight / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    values = [row.float() * row_scale.float() for row, row_scale in zip(codes, scale, strict=True)]
    return {"weight": codes, "weight_scale": scale}, torch.stack(values)


def nvfp4_modelopt(weight: Tensor) -> Encoded:
    factor = weight.abs().max().float() / (6 * FP8_MAX)
    packed, scale, steps = _nvfp4(weight, factor)
    tensors = {"weight": packed, "weight_scale": scale, "weight_scale_2": factor, "input_scale": torch.tensor(0.5)}
    return tensors, steps * factor


def nvfp4_ct(weight: Tensor) -> Encoded:
    divisor = (6 * FP8_MAX / weight.abs().max().float()).reshape(1)
    packed, scale, steps = _nvfp4(weight, 1 / divisor)
    tensors = {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": divisor}
    return tensors | {"input_global_scale": torch.ones(1)}, steps / divisor


ENCODERS: dict[str, Encoder] = {
    "fp8-block": fp8_block,
    "fp8-tensor": fp8_tensor,
    "fp8-channel": fp8_channel,
    "nvfp4-modelopt": nvfp4_modelopt,
    "nvfp4-ct": nvfp4_ct,
}


def quantize_checkpoint(source: Path, target: Path, choose: Callable[[str], Encoder | None]) -> None:
    """Writes `target`/quantized and `target`/twin from the one safetensors file of `source`.

    `choose` gives the encoder of a module by its stem, or None to keep it. The twin holds the same values in float32.
    """
    quantized: dict[str, Tensor] = {}
    twin: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        encoder = choose(stem) if stem != name and tensor.dim() == 2 else None
        if encoder is None:
            quantized[name] = twin[name] = tensor
            continue
        encoded, twin[name] = encoder(tensor.float())
        quantized |= {f"{stem}.{suffix}": part for suffix, part in encoded.items()}
    for directory, tensors in ((target / "quantized", quantized), (target / "twin", twin)):
        shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def _nvfp4(weight: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes, scales by group, and each element's level times its group's scale."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(dim=-1) / (6 * factor)).clamp(2**-9, FP8_MAX).to(torch.float8_e4m3fn)
    wide = scale.float().unsqueeze(-1)
    codes = (groups.abs() / (wide * factor)).unsqueeze(-1).sub(LEVELS).abs().argmin(dim=-1)
    signs = torch.where(groups < 0, -1.0, 1.0)
    nibbles = (codes + torch.where(groups < 0, 8, 0)).flatten(1)
    packed = nibbles[:, ::2] + 16 * nibbles[:, 1::2]
    return packed.to(torch.uint8), scale, (LEVELS[codes] * signs * wide).flatten(1)
