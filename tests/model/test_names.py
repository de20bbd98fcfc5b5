"""The name table against names that others write, and against the published counts (model facts, section 5.5)."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from deltaserve.model import names
from deltaserve.model.config import ModelConfig
from deltaserve.model.names import Kind, file_names, resolve, skip_reason, sources, vision_names
from deltaserve.model.presets import PRESETS, preset
from deltaserve.model.quant import FP8_BLOCK_FORMAT
from tests.conftest import MakeCheckpoint
from tests.model import tiny

FP8 = FP8_BLOCK_FORMAT.suffixes
FP8_35B = dict.fromkeys((Kind.GDN, Kind.ATTENTION, Kind.SHARED, Kind.EXPERTS), FP8)


def stored_names(directory: Path) -> list[str]:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return list(file.keys())


def test_counts_of_the_published_checkpoints() -> None:
    bf16_27b = file_names(preset("qwen3.8-27b"), packed=True, num_vision_blocks=27)
    fp8_35b = file_names(preset("qwen3.6-35b-a3b"), packed=False, suffixes=FP8_35B, num_vision_blocks=27)
    bf16_flagship = file_names(preset("qwen3.8-2.4t-a95b"), packed=True)
    fp8_flagship = file_names(preset("qwen3.8-2.4t-a95b"), packed=False, suffixes={Kind.EXPERTS: FP8})
    assert [len(found) for found in (bf16_27b, fp8_35b, bf16_flagship, fp8_flagship)] == [1199, 64196, 1609, 287119]
    for found in (bf16_27b, fp8_35b, bf16_flagship, fp8_flagship):
        assert len(set(found)) == len(found)


def test_parts_of_the_published_counts() -> None:
    fp8_35b = file_names(preset("qwen3.6-35b-a3b"), packed=False, suffixes=FP8_35B, num_vision_blocks=27)
    main = [name for name in fp8_35b if name.startswith("model.language_model.")]
    scales = [name for name in main if name.endswith(".weight_scale_inv")]
    assert sum(".mlp.experts." in name for name in scales) == 30_720
    assert sum(".mlp.experts." not in name for name in scales) == 250
    assert sum(name.startswith("mtp.") for name in fp8_35b) == 1560
    fp8_flagship = file_names(preset("qwen3.8-2.4t-a95b"), packed=False, suffixes={Kind.EXPERTS: FP8})
    assert sum(name.endswith(".weight_scale_inv") for name in fp8_flagship) == 142_848
    assert [len(vision_names(depth)) for depth in (27, 24, 12)] == [333, 297, 153]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["moe", "dense", "next"])
def test_names_equal_those_of_the_sample(make_checkpoint: MakeCheckpoint, kind: str, packed: bool) -> None:
    directory = make_checkpoint(kind=kind, packed_experts=packed)
    assert sorted(file_names(ModelConfig.from_directory(directory), packed=packed)) == sorted(stored_names(directory))


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_names_equal_those_that_transformers_saves(kind: str, tmp_path: Path) -> None:
    tiny.save(tiny.hf_model(kind), tmp_path)
    config = ModelConfig.from_directory(tmp_path)
    expected = file_names(config, packed=False, num_vision_blocks=1 if kind == "vl" else None)
    assert sorted(expected) == sorted(stored_names(tmp_path))


@pytest.mark.parametrize("name", PRESETS)
def test_every_name_of_every_preset_is_read_or_skipped(name: str) -> None:
    """Both directions of the table agree, on the layers' first and last of each kind."""
    for stored in file_names(preset(name), packed=True, num_vision_blocks=2):
        target = resolve(stored) or resolve(stored.removesuffix(".weight"))
        assert (target is None) == (skip_reason(stored) is not None), stored


def test_a_missing_part_is_named_as_its_file_would() -> None:
    moe, grouped = preset("qwen3.5-35b-a3b"), preset("qwen3-next-80b-a3b")
    assert sources(moe, "embed.weight", 0, None, packed=False) == "model.language_model.embed_tokens"
    assert sources(moe, "lm_head.weight", 0, None, packed=False) == "lm_head"
    qkvz = "layers.0.mixer.in_proj_qkvz.weight"
    assert sources(moe, qkvz, 3, None, packed=False) == "model.language_model.layers.0.linear_attn.in_proj_z"
    assert sources(grouped, qkvz, 3, None, packed=False) == "model.layers.0.linear_attn.in_proj_qkvz"
    gate_up = "mtp.layer.mlp.experts.gate_up"
    assert sources(moe, gate_up, 1, 7, packed=False) == "mtp.layers.0.mlp.experts.7.up_proj"
    assert sources(moe, gate_up, 1, 7, packed=True) == "mtp.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    "stem",
    [
        "layers.0.self_attn.q_proj",
        "model.lm_head",
        "model.mtp.fc",
        "model.layers.00.self_attn.q_proj",
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.mlp.experts.{expert}.gate_proj",
        "model.layers.0.mlp.experts.-1.gate_proj",
        "model.layers.x.input_layernorm",
        "mtp.layers.1.self_attn.q_proj",
        "model.language_model.model.norm",
    ],
)
def test_no_other_name_has_a_place(stem: str) -> None:
    assert resolve(stem) is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.visual.blocks.0.attn.qkv.weight", "vision"),
        ("model.visual.blocks.0.attn.qkv.weight_scale_inv", "vision"),
        ("model.layers.3.self_attn.rotary_emb.inv_freq", "rotary"),
        ("model.layers.3.self_attn.k_proj.k_scale", "KV scales"),
        ("model.language_model.layers.3.self_attn.v_scale", "KV scales"),
        ("model.layers.0.mlp.experts.5.up_proj.input_scale", "activation"),
        ("lm_head.input_global_scale", "activation"),
    ],
)
def test_the_skip_list_says_why(name: str, reason: str) -> None:
    found = skip_reason(name)
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.k_scale", "model.norm.weight", "visual", "model.layers.0.visual.x"]
)
def test_the_skip_list_swallows_nothing_else(name: str) -> None:
    assert skip_reason(name) is None


def test_kinds_cover_the_table() -> None:
    rows = (*names.LAYER_ROWS, *names.STACK_ROWS, *names.BARE_ROWS)
    assert {row.kind for row in rows} == set(Kind)
    assert len({row.file for row in rows}) == len(rows)
