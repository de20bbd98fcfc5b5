"""A checkpoint that does not fit its config is refused, and the tensors are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deltaserve.core.errors import CheckpointError
from deltaserve.model import load_plan, weights
from deltaserve.model.checkpoint import read_checkpoint
from deltaserve.model.weights import load_weights, parameters_by_name
from tests.conftest import MakeCheckpoint
from tests.model.files import Tensors, build, changed
from tests.model.quantize import ENCODERS, quantize_checkpoint

SIZES = {"layers": 4, "hidden": 64}
QKV = "model.layers.3.self_attn."


def refusal(directory: Path) -> str:
    """The error of loading; the model must still be untouched."""
    model = build(directory)
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, model.config, directory)
    assert all(parameter.is_meta for parameter in model.parameters())
    return str(caught.value)


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def with_(name: str, make: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: make(tensors)}


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        QKV + "v_proj.weight",
        "model.layers.0.linear_attn.A_log",
        "model.layers.0.linear_attn.in_proj_b.weight",
        "model.layers.0.linear_attn.in_proj_qkv.weight",
        "model.layers.2.mlp.experts.5.up_proj.weight",
        "model.layers.2.mlp.shared_expert_gate.weight",
        "mtp.fc.weight",
        "mtp.layers.0.mlp.experts.0.down_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    error = refusal(changed(make_checkpoint(kind="moe", **SIZES), tmp_path / "x", without(name)))
    assert f"missing tensors (1): {name}" in error
    assert str(tmp_path) in error


def test_missing_parts_of_a_grouped_projection_are_one_tensor(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    error = refusal(changed(make_checkpoint(kind="next", **SIZES), tmp_path / "x", without(name)))
    assert error.endswith(f"missing tensors (1): {name}")


def test_all_experts_of_a_layer_missing_are_one_tensor(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj"
    packed = make_checkpoint(kind="moe", packed_experts=True, **SIZES)
    assert refusal(changed(packed, tmp_path / "x", without(name))).endswith(f"missing tensors (1): {name}")


def test_ten_names_and_a_count(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    def no_experts(tensors: Tensors) -> Tensors:
        return {name: tensor for name, tensor in tensors.items() if ".experts.0." not in name}

    error = refusal(changed(make_checkpoint(kind="moe", **SIZES), tmp_path / "x", no_experts))
    assert "missing tensors (15)" in error  # three matrices in four layers and in the draft head
    assert error.count(".experts.0.") == 10
    assert error.endswith("and 5 more")


@pytest.mark.parametrize(
    "name",
    [
        QKV + "q_proj.bias",
        "model.layers.0.self_attn.q_proj.weight",  # that layer has no attention
        "model.layers.4.input_layernorm.weight",
        "model.layers.0.mlp.experts.8.up_proj.weight",
        "model.layers.0.linear_attn.A_log.weight",
        "model.layers.0.mlp.experts.gate_up_proj.weight",
        QKV + "q_proj",
        "score.weight",
        "mtp.layers.1.input_layernorm.weight",
    ],
)
def test_a_tensor_without_place_is_named(make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str) -> None:
    source = make_checkpoint(kind="moe", **SIZES)
    error = refusal(changed(source, tmp_path / "x", with_(name, lambda tensors: torch.zeros(2))))
    assert error.endswith(f"tensors with no place in this model (1): {name}")


def test_packed_and_single_experts_of_one_layer_are_twice(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    stacked = with_(name, lambda t: torch.stack([t[name.replace("down", f"{e}.down") + ".weight"] for e in range(8)]))
    error = refusal(changed(make_checkpoint(kind="moe", **SIZES), tmp_path / "x", stacked))
    assert "stored twice (8)" in error
    assert f"model.layers.0.mlp.experts.3.down_proj and {name}" in error


def test_one_weight_under_both_prefixes_is_twice(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    again = with_("model.language_model.norm.weight", lambda tensors: tensors["model.norm.weight"])
    error = refusal(changed(make_checkpoint(kind="dense", **SIZES), tmp_path / "x", again))
    assert "stored twice (1): " in error
    assert "model.language_model.norm" in error
    assert "model.norm" in error


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (QKV + "k_proj.weight", [64, 64]),
        ("model.layers.0.linear_attn.conv1d.weight", [160, 1, 4]),
        ("model.layers.0.linear_attn.in_proj_qkv.weight", [160, 64]),
        ("model.layers.0.mlp.experts.2.down_proj.weight", [64, 32]),
        ("model.layers.0.linear_attn.dt_bias", [4]),
        ("lm_head.weight", [1024, 64]),
    ],
)
def test_a_wrong_shape_is_named_with_the_right_one(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, name: str, expected: list[int]
) -> None:
    longer = with_(name, lambda tensors: torch.cat([tensors[name], tensors[name][:1]]))
    error = refusal(changed(make_checkpoint(kind="moe", **SIZES), tmp_path / "x", longer))
    found = [expected[0] + 1, *expected[1:]]
    assert error.endswith(f"tensors of the wrong shape (1): {name} is {found}, expected {expected}")


def test_a_wrong_packed_shape_is_told_unpacked(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.2.down_proj"
    source = make_checkpoint(kind="moe", **SIZES)

    def halved(tensors: Tensors) -> Tensors:
        encoded, _ = ENCODERS["nvfp4-modelopt"](tensors[f"{name}.weight"][:, :16].float())
        return without(f"{name}.weight")(tensors) | {f"{name}.{suffix}": part for suffix, part in encoded.items()}

    error = refusal(changed(source, tmp_path / "x", halved))
    assert f"{name}.weight is [64, 8], which is [64, 16] unpacked, expected [64, 32]" in error
    assert "missing" not in error


def test_everything_wrong_is_told_at_once(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    def spoilt(tensors: Tensors) -> Tensors:
        tensors = without("model.norm.weight")(tensors) | {"score.weight": torch.zeros(2)}
        return tensors | {"lm_head.weight": tensors["lm_head.weight"][1:]}

    error = refusal(changed(make_checkpoint(kind="dense", **SIZES), tmp_path / "x", spoilt))
    for words in (
        "missing tensors (1): model.norm.weight",
        "no place in this model (1): score.weight",
        "lm_head.weight is [1023, 64]",
    ):
        assert words in error


def test_int4_is_refused_by_name_with_its_modules(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    def packed(tensors: Tensors) -> Tensors:
        stems = [name.removesuffix(".weight") for name in tensors if ".mlp.up_proj" in name]
        parts = {"weight_packed": torch.int32, "weight_scale": torch.bfloat16, "weight_shape": torch.int64}
        int4 = {f"{stem}.{suffix}": torch.zeros(2, 2, dtype=dtype) for stem in stems for suffix, dtype in parts.items()}
        return without(*(f"{stem}.weight" for stem in stems))(tensors) | int4

    error = refusal(changed(make_checkpoint(kind="dense", **SIZES), tmp_path / "x", packed))
    assert "modules in INT4 pack-quantized (compressed-tensors), which is not served (5): " in error
    assert "model.layers.2.mlp.up_proj" in error
    assert "missing" not in error


def test_a_missing_scale_is_told_by_what_is_there(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj"
    source = make_checkpoint(kind="dense", **SIZES)
    quantize_checkpoint(source, tmp_path, lambda stem: ENCODERS["fp8-block"] if stem == name else None)
    bare = changed(tmp_path / "quantized", tmp_path / "x", without(f"{name}.weight_scale_inv"))
    assert f"{name} has tensors that together are no known format: weight F8_E4M3 [64, 128]" in refusal(bare)


def test_blocks_of_another_size_are_refused(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint(kind="dense", **SIZES)
    quantize_checkpoint(source, tmp_path, lambda stem: ENCODERS["fp8-block"] if "mlp" in stem else None)
    path = tmp_path / "quantized" / "config.json"
    quantization = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    assert "weight_block_size [64, 64] is not served" in refusal(tmp_path / "quantized")


def test_a_head_that_differs_from_tied_embeddings_is_refused(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    tied = make_checkpoint(kind="dense", tied=True, **SIZES)
    other = changed(tied, tmp_path / "x", with_("lm_head.weight", lambda t: t["model.embed_tokens.weight"] * 2))
    model = build(other)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from the embeddings.*tie_word_embeddings"):
        load_weights(model, model.config, other)


def test_a_file_that_changes_under_the_loader_is_an_error(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = changed(make_checkpoint(kind="dense", **SIZES), tmp_path / "x", lambda tensors: tensors)
    model = build(directory)

    def plan_and_spoil(*arguments: object) -> load_plan.LoadPlan:
        plan = load_plan.plan_load(model.config, parameters_by_name(model), read_checkpoint(directory))
        (directory / "model.safetensors").write_bytes(b"gone")
        return plan

    monkeypatch.setattr(weights, "plan_load", plan_and_spoil)
    with pytest.raises(CheckpointError, match=r"cannot be read from .*model\.safetensors"):
        load_weights(model, model.config, directory)
