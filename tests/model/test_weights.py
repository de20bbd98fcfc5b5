"""What loading puts where: layouts, formats, tensor-parallel parts, dummy weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from deltaserve.model.checkpoint import has_mtp, read_checkpoint
from deltaserve.model.load_plan import NO_DRAFT_HEAD, LoadPlan
from deltaserve.model.qwen3_5 import Qwen3_5
from deltaserve.model.weights import fill_dummy, load_weights, parameters_by_name, ungroup
from deltaserve.parallel.mesh import Mesh
from tests.conftest import MakeCheckpoint
from tests.model import tiny
from tests.model.files import Tensors, build, changed, load, sharded
from tests.model.quantize import ENCODERS, Encoder, quantize_checkpoint

# Edges that are no multiple of 128, several blocks both ways, four ranks' worth of heads but two KV heads.
SIZES = {
    "layers": 4,
    "hidden": 192,
    "heads": 4,
    "key_heads": 4,
    "value_heads": 8,
    "key_dim": 16,
    "value_dim": 32,
    "dense_width": 272,
    "experts": 4,
    "expert_width": 144,
    "shared_width": 80,
    "vocab": 512,
}
KINDS = ("dense", "moe", "next")


def assert_same(one: Qwen3_5, other: Qwen3_5) -> None:
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_what_transformers_saves_loads_with_every_tensor_accounted_for(kind: str, tmp_path: Path) -> None:
    oracle = tiny.hf_model(kind)
    tiny.save(oracle, tmp_path)
    model = build(tmp_path)
    plan = load_weights(model, model.config, tmp_path)
    num_vision = 12 + 9 if kind == "vl" else 0
    assert len(plan.skipped) == num_vision
    assert sum(len(job.tensors) for job in plan.jobs) + num_vision == len(read_checkpoint(tmp_path).tensors)
    assert not any(parameter.is_meta for parameter in model.parameters())
    text_size = sum(p.numel() for name, p in oracle.named_parameters() if ".visual." not in name)
    assert sum(p.numel() for p in model.parameters()) == text_size


def test_values_land_as_the_family_defines_them(make_checkpoint: MakeCheckpoint) -> None:
    directory = make_checkpoint(kind="moe", **SIZES)
    stored = {name: tensor.float() for name, tensor in load_file(directory / "model.safetensors").items()}
    ours = load(directory).state_dict()
    gdn, attention = "model.layers.0.linear_attn.", "model.layers.3.self_attn."
    flat = [stored[f"{gdn}in_proj_{part}.weight"] for part in ("qkv", "z")]
    assert torch.equal(ours["layers.0.mixer.in_proj_qkvz.weight"], torch.cat(flat))
    gates = [stored[f"{gdn}in_proj_{part}.weight"] for part in ("b", "a")]
    assert torch.equal(ours["layers.0.mixer.in_proj_ba.weight"], torch.cat(gates))
    assert torch.equal(ours["layers.0.mixer.conv.weight"], stored[gdn + "conv1d.weight"][:, 0])
    assert torch.equal(ours["layers.0.mixer.norm.scale"], stored[gdn + "norm.weight"])
    qkv = [stored[f"{attention}{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(ours["layers.3.mixer.qkv_proj.weight"], torch.cat(qkv))
    for norm, file_name in (
        ("norm.scale", "model.norm.weight"),
        ("layers.3.mixer.k_norm.scale", attention + "k_norm.weight"),
        ("layers.1.post_norm.scale", "model.layers.1.post_attention_layernorm.weight"),
        ("mtp.norm_hidden.scale", "mtp.pre_fc_norm_hidden.weight"),
    ):
        assert torch.equal(ours[norm], stored[file_name] + 1), norm
    expert = "model.layers.2.mlp.experts.3."
    gate_up = [stored[expert + "gate_proj.weight"], stored[expert + "up_proj.weight"]]
    assert torch.equal(ours["layers.2.mlp.experts.gate_up"][3], torch.cat(gate_up))
    assert torch.equal(ours["layers.2.mlp.experts.down"][3], stored[expert + "down_proj.weight"])


def test_grouped_projections_are_made_flat(make_checkpoint: MakeCheckpoint) -> None:
    directory = make_checkpoint(kind="next", **SIZES)
    stored = load_file(directory / "model.safetensors")
    model = load(directory)
    c, ours = model.config, model.state_dict()
    fused = stored["model.layers.0.linear_attn.in_proj_qkvz.weight"].float()
    per_key = c.num_value_heads // c.num_key_heads
    width = 2 * c.key_head_dim + 2 * per_key * c.value_head_dim
    sections: dict[str, list[Tensor]] = {"q": [], "k": [], "v": [], "z": []}
    for j in range(c.num_key_heads):
        at = j * width
        for section, size in (("q", 1), ("k", 1), ("v", per_key), ("z", per_key)):
            size *= c.key_head_dim if section in "qk" else c.value_head_dim
            sections[section].append(fused[at : at + size])
            at += size
    assert torch.equal(ours["layers.0.mixer.in_proj_qkvz.weight"], torch.cat([*map(torch.cat, sections.values())]))


def test_ungroup_puts_section_after_section() -> None:
    rows = torch.tensor([10, 20, 21, 11, 22, 23])  # groups of one row of section 1 and two of section 2
    assert ungroup(rows, (2, 4), num_groups=2).tolist() == [10, 11, 20, 21, 22, 23]


def repacked_mtp(packed: Tensors, single: Tensors) -> Tensors:
    main = {name: tensor for name, tensor in packed.items() if not name.startswith("mtp.")}
    return main | {name: tensor for name, tensor in single.items() if name.startswith("mtp.")}


def test_packed_experts_equal_single_ones_and_a_file_may_mix_them(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    single = make_checkpoint(kind="moe", packed_experts=False, **SIZES)
    packed = make_checkpoint(kind="moe", packed_experts=True, **SIZES)
    singles = load_file(single / "model.safetensors")
    mixed = changed(packed, tmp_path / "mixed", lambda tensors: repacked_mtp(tensors, singles))
    model = load(single)
    assert_same(model, load(packed))
    assert_same(model, load(mixed))


def test_the_prefix_of_a_wrapper_makes_no_difference(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    plain = make_checkpoint(kind="dense", **SIZES)

    def renamed(tensors: Tensors) -> Tensors:
        return {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}

    assert_same(load(plain), load(changed(plain, tmp_path / "wrapped", renamed)))


@pytest.mark.parametrize("index", [False, True])
def test_shards_load_like_one_file(make_checkpoint: MakeCheckpoint, tmp_path: Path, index: bool) -> None:
    whole = make_checkpoint(kind="moe", **SIZES)
    quantize_checkpoint(whole, tmp_path, lambda stem: ENCODERS["nvfp4-ct"] if ".mlp." in stem else None)
    shards = sharded(tmp_path / "quantized", tmp_path / "shards", 7, index=index)
    assert_same(load(tmp_path / "twin"), load(shards))


def mixed_formats(stem: str) -> Encoder | None:
    """As the mixed exports do: attention and GDN in FP8, expert and MLP matrices and the head in NVFP4."""
    if stem.endswith(("in_proj_a", "in_proj_b", "in_proj_ba", "mlp.gate", "shared_expert_gate", "embed_tokens", "fc")):
        return None
    if "linear_attn" in stem:
        return ENCODERS["fp8-block"]
    if "self_attn" in stem:
        return ENCODERS["fp8-tensor"]
    return ENCODERS["fp8-channel"] if "down_proj" in stem else ENCODERS["nvfp4-modelopt"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ENCODERS)
def test_quantised_files_equal_their_twins(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, kind: str, name: str
) -> None:
    quantize_checkpoint(make_checkpoint(kind=kind, **SIZES), tmp_path, lambda stem: ENCODERS[name])
    assert_same(load(tmp_path / "quantized"), load(tmp_path / "twin"))


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_several_formats_equal_their_twins(make_checkpoint: MakeCheckpoint, tmp_path: Path, kind: str) -> None:
    quantize_checkpoint(make_checkpoint(kind=kind, **SIZES), tmp_path, mixed_formats)
    model = build(tmp_path / "quantized")
    plan = load_weights(model, model.config, tmp_path / "quantized")
    expected = {"bf16", "fp8-block", "fp8-tensor", "fp8-channel", "nvfp4-modelopt"}
    assert {job.format.name for job in plan.jobs} - {"fp32"} == expected
    assert plan.skipped
    assert all("activation" in reason for reason in plan.skipped.values())
    assert_same(model, load(tmp_path / "twin"))


def test_values_are_cast_once_to_the_compute_dtype(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    quantize_checkpoint(make_checkpoint(kind="dense", **SIZES), tmp_path, lambda stem: ENCODERS["fp8-block"])
    wide, narrow = load(tmp_path / "quantized"), load(tmp_path / "quantized", dtype=torch.bfloat16)
    for name, parameter in narrow.named_parameters():
        stays_wide = name.endswith((".scale", ".A_log", ".dt_bias")) or name == "norm.scale"
        assert parameter.dtype == (torch.float32 if stays_wide else torch.bfloat16), name
        assert torch.equal(parameter, wide.get_parameter(name).to(parameter.dtype)), name


def by_hand(section: Tensor, dim: int, units: int, rank: int, world: int) -> Tensor:
    """A rank's part of a section: whole units, or one unit shared by several ranks."""
    if units >= world:
        return section.chunk(world, dim)[rank]
    return section.chunk(units, dim)[rank * units // world]


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_all_ranks_make_the_whole(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, kind: str, world: int, quantised: bool
) -> None:
    directory = make_checkpoint(kind=kind, packed_experts=world == 2, **SIZES)
    if quantised:
        quantize_checkpoint(directory, tmp_path, lambda stem: ENCODERS["fp8-block"])
        directory = tmp_path / "quantized"
    whole = parameters_by_name(load(directory))
    for rank in range(world):
        for name, part in parameters_by_name(load(directory, Mesh(rank, world))).items():
            if part.placement is None:
                assert torch.equal(part, whole[name]), name
                continue
            dim = part.placement.dim
            sections = torch.split(whole[name].data, [section.size for section in part.placement.sections], dim)
            expected = [
                by_hand(tensor, dim, section.units, rank, world)
                for tensor, section in zip(sections, part.placement.sections, strict=True)
            ]
            assert torch.equal(part, torch.cat(expected, dim)), name


def test_a_tied_head_stays_the_embedding(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    tied = make_checkpoint(kind="dense", tied=True, **SIZES)
    model = load(tied)
    assert model.lm_head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, load_file(tied / "model.safetensors")["model.embed_tokens.weight"].float())
    with_copy = changed(tied, tmp_path / "copy", lambda t: t | {"lm_head.weight": t["model.embed_tokens.weight"]})
    assert_same(model, load(with_copy))
    assert_same(load(tied, Mesh(1, 2)), load(with_copy, Mesh(1, 2)))


def test_the_draft_head_is_skipped_where_the_model_has_none(make_checkpoint: MakeCheckpoint) -> None:
    directory = make_checkpoint(kind="moe", **SIZES)
    model = build(directory, mtp=False)
    plan = load_weights(model, model.config, directory)
    assert has_mtp(directory)
    assert plan.skipped
    assert all(name.startswith("mtp.") and why == NO_DRAFT_HEAD for name, why in plan.skipped.items())


def test_a_checkpoint_without_draft_head_says_so(make_checkpoint: MakeCheckpoint) -> None:
    directory = make_checkpoint(kind="dense", mtp=False, **SIZES)
    assert not has_mtp(directory)
    assert load(directory).mtp is None


def test_progress_counts_every_byte(make_checkpoint: MakeCheckpoint) -> None:
    directory = make_checkpoint(kind="moe", **SIZES)
    model, seen = build(directory), []
    load_weights(model, model.config, directory, progress=lambda done, total: seen.append((done, total)))
    total = read_checkpoint(directory).num_bytes
    assert {of for _, of in seen} == {total}
    counts = [done for done, _ in seen]
    assert counts == sorted(set(counts))
    assert counts[-1] == total


@pytest.mark.parametrize("kind", KINDS)
def test_dummy_weights_are_repeatable_and_sane(make_checkpoint: MakeCheckpoint, kind: str) -> None:
    directory = make_checkpoint(kind=kind, **SIZES)
    models = [build(directory) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        fill_dummy(model, seed)
    assert_same(models[0], models[1])
    for name, parameter in models[0].named_parameters():
        assert parameter.isfinite().all(), name
        assert not torch.equal(parameter, models[2].get_parameter(name)), name
        if name.endswith("scale"):
            assert (parameter - 1).abs().max() < 0.5, name
        elif name.endswith("A_log"):
            assert ((parameter.exp() >= 1 - 1e-5) & (parameter.exp() <= 16 + 1e-4)).all(), name
        elif name.endswith("dt_bias"):
            steps = torch.nn.functional.softplus(parameter)
            assert ((steps > 0.9e-3) & (steps < 0.11)).all(), name


def test_dummy_parts_that_every_rank_holds_are_the_same(make_checkpoint: MakeCheckpoint) -> None:
    directory = make_checkpoint(kind="moe", **SIZES)
    ranks = [build(directory, Mesh(rank, 2)) for rank in range(2)]
    for model in ranks:
        fill_dummy(model, 0)
    for name, parameter in parameters_by_name(ranks[0]).items():
        if parameter.placement is None:
            assert torch.equal(parameter, ranks[1].get_parameter(name)), name


def test_dummy_routing_is_near_uniform(make_checkpoint: MakeCheckpoint) -> None:
    model = build(make_checkpoint(kind="moe", **SIZES | {"experts": 16, "top_k": 4}))
    fill_dummy(model, 0)
    hidden = model.layers[0].post_norm(model.embed.weight.data)
    chosen = (hidden @ model.layers[0].mlp.router.weight.T).topk(4, dim=-1).indices
    share = chosen.flatten().bincount(minlength=16) / chosen.numel()
    assert (share * 16 - 1).abs().max() < 0.5


def test_the_summary_groups_what_is_not_read_by_reason() -> None:
    skipped = {"model.visual.a": "vision", "model.visual.b": "vision", "x.k_scale": "KV scales"}
    plan = LoadPlan(Path("somewhere"), (), skipped, problems=(), notes=("a note",))
    assert plan.summary() == (
        "not read: 2 tensors, such as model.visual.a (vision)",
        "not read: 1 tensors, such as x.k_scale (KV scales)",
        "a note",
    )
