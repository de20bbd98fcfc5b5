"""A report tells from headers alone what a directory holds and why it would be refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from deltaserve.model.config import ModelConfig
from deltaserve.model.config_file import read_json
from deltaserve.model.inspect import Report, inspect_checkpoint
from deltaserve.model.load_plan import stored_shape
from deltaserve.model.names import Kind, file_names, resolve, skip_reason
from deltaserve.model.presets import PRESETS, preset
from deltaserve.model.quant import FP8_BLOCK_FORMAT, split_name
from deltaserve.model.qwen3_5 import Qwen3_5
from deltaserve.model.weights import parameters_by_name
from deltaserve.parallel.mesh import SINGLE
from tests.conftest import MakeCheckpoint
from tests.model.files import changed, write_header
from tests.model.quantize import ENCODERS, quantize_checkpoint

FP8 = FP8_BLOCK_FORMAT.suffixes
FP8_KINDS = (Kind.GDN, Kind.ATTENTION, Kind.SHARED, Kind.EXPERTS)


def write_preset(directory: Path, name: str, *, fp8: tuple[Kind, ...] = (), packed: bool) -> None:
    """A published checkpoint without its data: the names of our table, shapes from the model, vision of nothing."""
    config = preset(name)
    with torch.device("meta"):
        parameters = parameters_by_name(Qwen3_5(config, SINGLE, torch.float32))
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for stored in file_names(config, packed=packed, suffixes=dict.fromkeys(fp8, FP8), num_vision_blocks=27):
        stem, suffix = split_name(stored)
        target = resolve(stem)
        if skip_reason(stored) is not None or target is None:
            tensors[stored] = ("BF16", (0,))
            continue
        shape = stored_shape(parameters[target.parameter], target)
        if suffix == "weight_scale_inv":
            tensors[stored] = ("BF16", tuple(-(-size // 128) for size in shape))
        else:
            tensors[stored] = ("F8_E4M3" if target.kind in fp8 else "BF16", shape)
    write_header(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps(PRESETS[name]))


def test_a_published_bf16_shape(tmp_path: Path) -> None:
    write_preset(tmp_path, "qwen3.8-27b", packed=True)
    report = inspect_checkpoint(tmp_path)
    assert report.refusals == ()
    assert report.num_tensors == 1199
    # Published: 26.896 and 0.425 billion parameters of two bytes each; 144 MiB of state.
    assert report.num_bytes / 2 / 1e9 == pytest.approx(26.896 + 0.425, abs=1e-3)
    assert report.parameters is not None
    assert report.num_bytes == 2 * report.parameters.total
    assert report.sequence is not None
    assert report.sequence.state["float32"] == 144 << 20
    assert report.sequence.kv_per_token["bfloat16"] == 2 * (32768 + 2 * 4 * 256)
    assert report.formats[Kind.ATTENTION] == {"bf16": 17 * 4}
    assert [(skipped.num_tensors, skipped.reason.split(":")[0]) for skipped in report.skipped] == [
        (333, "vision tower")
    ]


def test_a_published_fp8_shape_counts_modules_by_kind_and_format(tmp_path: Path) -> None:
    write_preset(tmp_path, "qwen3.6-35b-a3b", fp8=FP8_KINDS, packed=False)
    report = inspect_checkpoint(tmp_path)
    assert report.refusals == ()
    assert report.has_mtp
    assert report.num_tensors == 64_196
    assert report.formats[Kind.EXPERTS] == {"fp8-block": 30_720 + 768}
    assert sum(report.formats[kind]["fp8-block"] for kind in FP8_KINDS[:3]) == 250 + 4 + 3
    assert report.formats[Kind.GDN_GATES] == {"bf16": 60}
    assert any("declares no quantisation" in note for note in report.notes)


def test_the_report_in_lines_says_what_a_reader_looks_for(tmp_path: Path) -> None:
    write_preset(tmp_path, "qwen3.8-27b", packed=True)
    text = "\n".join(inspect_checkpoint(tmp_path).lines())
    for words in (
        "Qwen3.5, 3.6, 3.8 (dense), qwen3_5_text, the text part of a multimodal checkpoint",
        "64: 48 GDN, 16 attention; with a draft head (MTP)",
        "26.896 B, 25.6",
        "1199 tensors, 50.8",
        "attention projections       bf16 x 68",
        "vision tower: only text is served",
        "144 MiB in float32",
        "can be served",
    ):
        assert words in text, words
    assert "cannot" not in text


@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
def test_a_sample_can_be_served_and_so_says_its_report(make_checkpoint: MakeCheckpoint, kind: str) -> None:
    directory = make_checkpoint(kind=kind)
    report = inspect_checkpoint(directory)
    assert report.refusals == ()
    assert report.config == ModelConfig.from_directory(directory)
    assert report.lines()[-1] == "can be served"
    modules = sum(sum(counts.values()) for counts in report.formats.values())
    assert modules == report.num_tensors


def test_mixed_formats_and_skipped_scales_are_listed(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    choose = {"self_attn": ENCODERS["fp8-tensor"], "experts": ENCODERS["nvfp4-modelopt"]}
    quantize_checkpoint(
        make_checkpoint(kind="moe"), tmp_path, lambda stem: next((e for k, e in choose.items() if k in stem), None)
    )
    key_scale = "model.layers.3.self_attn.k_proj.k_scale"
    directory = changed(tmp_path / "quantized", tmp_path / "x", lambda t: t | {key_scale: torch.tensor(0.7)})
    quantization = {"quantization": {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8"}}
    (directory / "hf_quant_config.json").write_text(json.dumps(quantization))
    report = inspect_checkpoint(directory)
    assert report.refusals == ()
    assert report.formats[Kind.ATTENTION].keys() == {"fp8-tensor"}
    assert report.formats[Kind.EXPERTS].keys() == {"nvfp4-modelopt"}
    assert report.formats[Kind.ROUTER].keys() == {"bf16"}
    skipped = {part.reason.split(":")[0]: part for part in report.skipped}
    assert skipped["KV scales"].num_tensors == 1
    assert skipped["KV scales"].example == key_scale
    num_quantised = sum(report.formats[Kind.ATTENTION].values()) + sum(report.formats[Kind.EXPERTS].values())
    assert skipped["activation scales"].num_tensors == num_quantised
    assert any("FP8 for the KV cache" in note for note in report.notes)


def refused(directory: Path, words: str) -> Report:
    report = inspect_checkpoint(directory)
    assert any(words in refusal for refusal in report.refusals), report.refusals
    assert "cannot be served:" in report.lines()
    assert any(words in line for line in report.lines())
    return report


def test_nothing_there(tmp_path: Path) -> None:
    report = refused(tmp_path / "nowhere", "no .safetensors files")
    assert len(report.refusals) == 2
    assert "config.json does not exist" in report.refusals[1]


def test_an_unknown_architecture_still_lists_its_tensors(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    directory = changed(make_checkpoint(kind="dense"), tmp_path / "x", lambda tensors: tensors)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen4_exp"}))
    report = refused(directory, "qwen4_exp")
    assert (report.config, report.parameters, report.sequence) == (None, None, None)
    assert report.num_tensors > 0
    assert report.formats[Kind.ATTENTION].keys() == {"bf16"}


def test_broken_weights_still_show_the_shape(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    directory = changed(make_checkpoint(kind="dense"), tmp_path / "x", lambda tensors: tensors)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    report = refused(directory, "bytes of data")
    assert report.config is not None
    assert any("layers" in line for line in report.lines())


def test_what_loading_would_refuse_is_refused_here(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source, gone = make_checkpoint(kind="dense"), "model.layers.0.mlp.up_proj.weight"

    def spoilt(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        packed = {"model.layers.1.mlp.up_proj.weight_packed": torch.zeros(2, 2, dtype=torch.int32)}
        drop = (gone, "model.layers.1.mlp.up_proj.weight")
        return {name: tensor for name, tensor in tensors.items() if name not in drop} | packed

    report = refused(changed(source, tmp_path / "x", spoilt), f"missing tensors (1): {gone}")
    assert any("INT4 pack-quantized" in refusal for refusal in report.refusals)
    assert report.formats[Kind.MLP]["INT4 pack-quantized (compressed-tensors)"] == 1


def test_files_that_the_index_leaves_out_are_noted(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    directory = changed(make_checkpoint(kind="dense"), tmp_path / "x", lambda tensors: tensors)
    names = dict.fromkeys(file_names(ModelConfig.from_directory(directory), packed=False), "model.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (directory / "extra.safetensors").write_bytes(b"anything")
    report = inspect_checkpoint(directory)
    assert report.refusals == ()
    assert any("extra.safetensors" in note for note in report.notes)


def test_a_draft_head_that_the_config_promises_may_be_absent(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    def headless(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}

    directory = changed(make_checkpoint(kind="dense"), tmp_path / "x", headless)
    assert read_json(directory / "config.json")["mtp_num_hidden_layers"] == 1
    report = inspect_checkpoint(directory)
    assert (report.refusals, report.has_mtp) == ((), False)
    assert "no draft head (MTP)" in "\n".join(report.lines())
