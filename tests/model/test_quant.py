"""Formats are recognised by their tensors, and nothing else passes for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltaserve.core.errors import CheckpointError
from deltaserve.model import quant
from deltaserve.model.checkpoint import TensorInfo
from deltaserve.model.names import skip_reason
from deltaserve.model.quant import Declared, FormatError, declared, detect, split_name
from tests.model.quantize import ENCODERS

Stored = dict[str, tuple[str, tuple[int, ...]]]

NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}


def infos(stored: Stored) -> dict[str, TensorInfo]:
    file = Path("model.safetensors")
    return {suffix: TensorInfo(f"m.{suffix}", dtype, shape, file, 0, 0) for suffix, (dtype, shape) in stored.items()}


def read_suffixes(tensors: dict[str, Tensor]) -> Stored:
    """What the loader sees of encoded tensors: activation scales are on the skip list."""
    return {
        suffix: (NAMES[tensor.dtype], tuple(tensor.shape))
        for suffix, tensor in tensors.items()
        if skip_reason(f"model.layers.0.mlp.up_proj.{suffix}") is None
    }


@pytest.mark.parametrize("shape", [(300, 160), (1, 16), (128, 128), (64, 2048)])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoded_weights_are_recognised_and_decoded(name: str, shape: tuple[int, int]) -> None:
    tensors, values = ENCODERS[name](torch.randn(shape))
    stored = infos(read_suffixes(tensors))
    format = detect("m", stored)
    # A scale of shape [1, 1] or [1] on one row is at once a scale per row and per tensor; they mean the same.
    assert format.name == name or shape[0] == 1
    assert format.weight_shape(stored[format.suffixes[0]].shape) == shape
    assert format.dequantize is not None
    assert torch.equal(format.dequantize(tensors), values)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_are_close_to_what_they_encode(name: str) -> None:
    weight = torch.randn(96, 160)
    _, values = ENCODERS[name](weight)
    error = (values - weight).norm() / weight.norm()
    assert 0 < error < (0.15 if name.startswith("nvfp4") else 0.04)


@pytest.mark.parametrize(("dtype", "name"), [("BF16", "bf16"), ("F16", "fp16"), ("F32", "fp32")])
@pytest.mark.parametrize("shape", [(), (5,), (5, 6), (2, 3, 4)])
def test_plain_weights_have_any_shape(dtype: str, name: str, shape: tuple[int, ...]) -> None:
    stored = infos({"weight": (dtype, shape)})
    format = detect("m", stored)
    assert (format.name, format.dequantize, format.weight_shape(shape)) == (name, None, shape)


def test_block_scales_may_be_named_without_inv() -> None:
    format = detect("m", infos({"weight": ("F8_E4M3", (256, 300)), "weight_scale": ("F32", (2, 3))}))
    assert format.name == "fp8-block"
    weight, scale = torch.randn(256, 300).to(torch.float8_e4m3fn), torch.rand(2, 3)
    assert format.dequantize is not None
    values = format.dequantize({"weight": weight, "weight_scale": scale})
    assert torch.equal(values[200:, 256:], weight[200:, 256:].float() * scale[1, 2])


def test_one_fp8_scale_may_serve_a_convolution() -> None:
    stored = infos({"weight": ("F8_E4M3", (64, 1, 4)), "weight_scale": ("F32", ())})
    assert detect("m", stored).name == "fp8-tensor"


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"weight": ("F8_E4M3", (256, 300)), "weight_scale_inv": ("BF16", (3, 2))}, ["[3, 2]", "expected", "[2, 3]"]),
        ({"weight": ("F8_E4M3", (256, 300)), "weight_scale": ("F32", (300, 1))}, ["[300, 1]", "[256, 1]", "[2, 3]"]),
        (
            {"weight": ("U8", (8, 8)), "weight_scale": ("F8_E4M3", (8, 2)), "weight_scale_2": ("F32", ())},
            ["U8 [8, 8]", "weight_scale [8, 1]"],
        ),
        (
            {"weight": ("U8", (8, 4)), "weight_scale": ("F8_E4M3", (8, 1)), "weight_scale_2": ("F32", ())},
            ["U8 [8, 4]", "whole groups"],
        ),
        (
            {"weight": ("U8", (8, 8)), "weight_scale": ("F8_E4M3", (8, 1)), "weight_scale_2": ("F32", (8,))},
            ["F32 [8]", "weight_scale_2 [] or [1]"],
        ),
        ({"weight": ("F8_E4M3", (4, 4))}, ["no known format", "F8_E4M3 [4, 4]"]),
        ({"weight": ("BF16", (4, 4)), "weight_scale_inv": ("BF16", (1, 1))}, ["no known format", "weight_scale_inv"]),
        ({"weight_scale": ("F32", ())}, ["no known format"]),
        ({"weight": ("F64", (4, 4))}, ["no known format", "F64"]),
    ],
)
def test_tensors_that_do_not_fit_are_named_with_what_would(stored: Stored, words: list[str]) -> None:
    with pytest.raises(FormatError) as caught:
        detect("model.layers.0.mlp.up_proj", infos(stored))
    assert caught.value.refused is None
    for word in ["model.layers.0.mlp.up_proj", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        (
            {"weight_packed": ("I32", (8, 2)), "weight_scale": ("BF16", (8, 1)), "weight_shape": ("I64", (2,))},
            "INT4 pack-quantized",
        ),
        ({"qweight": ("I32", (2, 8)), "qzeros": ("I32", (1, 1)), "scales": ("F16", (1, 8))}, "GPTQ or AWQ"),
        ({"weight": ("I8", (8, 8)), "weight_scale": ("BF16", (8, 1))}, "INT8"),
        ({"weight": ("U8", (8, 16)), "weight_scale": ("U8", (8, 1))}, "MXFP4"),
        ({"weight": ("F8_E4M3", (8, 32)), "weight_scale": ("F8_E8M0", (8, 1))}, "MXFP8"),
        ({"weight": ("F8_E5M2", (8, 32)), "weight_scale": ("F32", ())}, "E5M2"),
    ],
)
def test_known_formats_that_are_not_served_are_refused_by_name(stored: Stored, name: str) -> None:
    with pytest.raises(FormatError, match="is not served") as caught:
        detect("m", infos(stored))
    assert caught.value.refused is not None
    assert name in caught.value.refused


def test_names_split_at_known_suffixes_only() -> None:
    assert split_name("a.b.weight_scale_inv") == ("a.b", "weight_scale_inv")
    assert split_name("a.b.weight") == ("a.b", "weight")
    assert split_name("a.A_log") == ("a.A_log", "")
    assert split_name("a.experts.gate_up_proj") == ("a.experts.gate_up_proj", "")
    assert split_name("a.bias") == ("a.bias", "")


def write(directory: Path, name: str, content: object) -> Path:
    (directory / name).write_text(json.dumps(content))
    return directory


def test_declared_reads_each_place_that_says_something(tmp_path: Path) -> None:
    assert declared(tmp_path) == Declared()
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write(tmp_path, "config.json", {"quantization_config": fp8})
    assert declared(tmp_path) == Declared("fp8", "[128, 128]")
    write(tmp_path, "config.json", {"text_config": {"quantization_config": fp8}})
    assert declared(tmp_path) == Declared("fp8", "[128, 128]")
    scheme = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float", "num_bits": 8}}
    write(tmp_path, "config.json", {"quantization_config": scheme})
    assert declared(tmp_path) == Declared("compressed-tensors", kv_cache="float8")
    write(tmp_path, "config.json", {})
    write(tmp_path, "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}})
    assert declared(tmp_path) == Declared("modelopt NVFP4", kv_cache="FP8")


def test_broken_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json"):
        declared(tmp_path)


def test_the_config_is_only_compared_with_what_was_found() -> None:
    assert Declared("fp8").notes({"bf16", "fp8-block"}) == []
    assert Declared().notes({"bf16", "fp32"}) == []
    assert "no tensor is quantised" in Declared("fp8").notes({"bf16"})[0]
    assert "fp8-tensor, nvfp4-ct" in Declared().notes({"nvfp4-ct", "bf16", "fp8-tensor"})[0]
    assert "--kv-cache-dtype" in Declared("modelopt", kv_cache="FP8").notes({"nvfp4-modelopt"})[0]


def test_only_blocks_of_128_are_served() -> None:
    assert Declared("fp8", "[128, 128]").refusal({"fp8-block"}) is None
    assert Declared("fp8", "[64, 128]").refusal({"fp8-tensor"}) is None
    refusal = Declared("fp8", "[64, 128]").refusal({"fp8-block"})
    assert refusal is not None
    assert "weight_block_size [64, 128]" in refusal


def test_every_format_has_its_own_name_or_its_own_tensors() -> None:
    kinds = [(format.name, format.suffixes) for format in quant.FORMATS]
    assert len(set(kinds)) == len(kinds)
