"""The name table: what each tensor of the family's checkpoints is called, and which part of which parameter it fills.

One table is read in both directions: `resolve` says where a stored name goes, `file_names` lists what a checkpoint of
a given shape and layout holds, and `sources` names what a missing weight should have come from. No torch.

A stored name is a *stem* and a suffix: `...self_attn.q_proj` + `weight`, and beside it, when quantised,
`weight_scale_inv` and the like (`quant` knows those). A few tensors have no suffix (`A_log`, packed experts).
Stems of the decoder stack begin with `model.language_model.` or `model.`; the head and the draft head (`mtp.`) do not.

| layouts of one thing            | stored as                                                                  |
| ------------------------------- | -------------------------------------------------------------------------- |
| GDN projections, Qwen3.5 and on | qkv, z, b and a, each flat: head after head                                |
| GDN projections, Qwen3-Next     | qkvz and ba, grouped: for each key head its q, k and its value heads' v, z |
| experts, packed                 | gate_up_proj [E, 2F, D] and down_proj [E, D, F]                            |
| experts, one by one             | gate_proj, up_proj [F, D], down_proj [D, F] of each; a file may mix both   |
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deltaserve.model.config import GDN, ModelConfig

STACK_PREFIXES = ("model.language_model.", "model.")
WEIGHT = ("weight",)


class Transform(enum.Enum):
    """What happens to the stored values on their way."""

    NONE = "as stored"
    ADD_ONE = "norms centred on zero: 1 + w, in float32"
    DROP_DIM_1 = "depthwise convolution: [C, 1, W] to [C, W]"
    UNGROUP = "rows grouped by key head, put section after section"


class Kind(enum.StrEnum):
    """What a tensor is for: modules of one kind share a format in the checkpoints we know."""

    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norms"
    ATTENTION = "attention projections"
    GDN = "GDN projections"
    GDN_GATES = "GDN gates (a, b)"
    GDN_CONV = "GDN convolution"
    GDN_DECAY = "GDN decay (A_log, dt_bias)"
    MLP = "MLP"
    ROUTER = "router"
    SHARED = "shared expert"
    EXPERTS = "experts"
    DRAFT = "draft head input"


@dataclass(frozen=True, slots=True)
class Row:
    """`file` (a stem) fills `sections` of `parameter`, both within their layer. `part` says which layers have it."""

    part: str
    kind: Kind
    file: str
    parameter: str
    sections: tuple[int, ...] = (0,)
    transform: Transform = Transform.NONE
    has_suffix: bool = True


@dataclass(frozen=True, slots=True)
class Target:
    """Where one stem goes. `expert` None: the parameter has no experts, or the tensor holds all of them."""

    parameter: str
    sections: tuple[int, ...]
    expert: int | None
    transform: Transform
    kind: Kind
    has_suffix: bool


_NORM = Transform.ADD_ONE
_QKVZ, _BA = "mixer.in_proj_qkvz.weight", "mixer.in_proj_ba.weight"
_QKV = "mixer.qkv_proj.weight"
_GATE_UP, _DOWN = "mlp.experts.gate_up", "mlp.experts.down"
_SHARED = "mlp.shared.gate_up_proj.weight"

LAYER_ROWS = (
    Row("norms", Kind.NORM, "input_layernorm", "input_norm.scale", transform=_NORM),
    Row("norms", Kind.NORM, "post_attention_layernorm", "post_norm.scale", transform=_NORM),
    Row("attention", Kind.ATTENTION, "self_attn.q_proj", _QKV, (0,)),
    Row("attention", Kind.ATTENTION, "self_attn.k_proj", _QKV, (1,)),
    Row("attention", Kind.ATTENTION, "self_attn.v_proj", _QKV, (2,)),
    Row("attention", Kind.ATTENTION, "self_attn.o_proj", "mixer.o_proj.weight"),
    Row("attention", Kind.NORM, "self_attn.q_norm", "mixer.q_norm.scale", transform=_NORM),
    Row("attention", Kind.NORM, "self_attn.k_norm", "mixer.k_norm.scale", transform=_NORM),
    Row("gdn_flat", Kind.GDN, "linear_attn.in_proj_qkv", _QKVZ, (0, 1, 2)),
    Row("gdn_flat", Kind.GDN, "linear_attn.in_proj_z", _QKVZ, (3,)),
    Row("gdn_flat", Kind.GDN_GATES, "linear_attn.in_proj_b", _BA, (0,)),
    Row("gdn_flat", Kind.GDN_GATES, "linear_attn.in_proj_a", _BA, (1,)),
    Row("gdn_grouped", Kind.GDN, "linear_attn.in_proj_qkvz", _QKVZ, (0, 1, 2, 3), Transform.UNGROUP),
    Row("gdn_grouped", Kind.GDN_GATES, "linear_attn.in_proj_ba", _BA, (0, 1), Transform.UNGROUP),
    Row("gdn", Kind.GDN, "linear_attn.out_proj", "mixer.out_proj.weight"),
    Row("gdn", Kind.GDN_CONV, "linear_attn.conv1d", "mixer.conv.weight", (0, 1, 2), Transform.DROP_DIM_1),
    Row("gdn", Kind.GDN_DECAY, "linear_attn.A_log", "mixer.A_log", has_suffix=False),
    Row("gdn", Kind.GDN_DECAY, "linear_attn.dt_bias", "mixer.dt_bias", has_suffix=False),
    Row("gdn", Kind.NORM, "linear_attn.norm", "mixer.norm.scale"),
    Row("dense", Kind.MLP, "mlp.gate_proj", "mlp.gate_up_proj.weight", (0,)),
    Row("dense", Kind.MLP, "mlp.up_proj", "mlp.gate_up_proj.weight", (1,)),
    Row("dense", Kind.MLP, "mlp.down_proj", "mlp.down_proj.weight"),
    Row("moe", Kind.ROUTER, "mlp.gate", "mlp.router.weight"),
    Row("moe", Kind.ROUTER, "mlp.shared_expert_gate", "mlp.shared_gate.weight"),
    Row("moe", Kind.SHARED, "mlp.shared_expert.gate_proj", _SHARED, (0,)),
    Row("moe", Kind.SHARED, "mlp.shared_expert.up_proj", _SHARED, (1,)),
    Row("moe", Kind.SHARED, "mlp.shared_expert.down_proj", "mlp.shared.down_proj.weight"),
    Row("packed", Kind.EXPERTS, "mlp.experts.gate_up_proj", _GATE_UP, (0, 1), has_suffix=False),
    Row("packed", Kind.EXPERTS, "mlp.experts.down_proj", _DOWN, has_suffix=False),
    Row("single", Kind.EXPERTS, "mlp.experts.{expert}.gate_proj", _GATE_UP, (0,)),
    Row("single", Kind.EXPERTS, "mlp.experts.{expert}.up_proj", _GATE_UP, (1,)),
    Row("single", Kind.EXPERTS, "mlp.experts.{expert}.down_proj", _DOWN),
)
STACK_ROWS = (
    Row("stack", Kind.EMBEDDING, "embed_tokens", "embed.weight"),
    Row("stack", Kind.NORM, "norm", "norm.scale", transform=_NORM),
)
BARE_ROWS = (
    Row("untied", Kind.HEAD, "lm_head", "lm_head.weight"),
    Row("mtp", Kind.DRAFT, "mtp.fc", "mtp.fc.weight"),
    Row("mtp", Kind.NORM, "mtp.pre_fc_norm_embedding", "mtp.norm_embedding.scale", transform=_NORM),
    Row("mtp", Kind.NORM, "mtp.pre_fc_norm_hidden", "mtp.norm_hidden.scale", transform=_NORM),
    Row("mtp", Kind.NORM, "mtp.norm", "mtp.norm.scale", transform=_NORM),
)
MTP_LAYER = ("mtp.layers.0.", "mtp.layer.")

# Stored names that are never read, by how they begin or end, and why.
SKIPPED_TOPS = (("model.visual.", "visual."), "vision tower: only text is served")
SKIPPED_ENDS = (
    ((".rotary_emb.inv_freq",), "rotary frequencies: computed from the config"),
    ((".input_scale", ".input_global_scale"), "activation scales: only weights are read as quantised"),
    (
        (
            *(f".self_attn.{name}_scale" for name in "qkv"),
            *(f".self_attn.{name}_proj.{scale}" for name in "kv" for scale in (f"{name}_scale", "output_scale")),
        ),
        "KV scales: the KV cache is kept unscaled",
    ),
)
_VISION_BLOCK = ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
_VISION_ENDS = ("patch_embed.proj", "merger.norm", "merger.linear_fc1", "merger.linear_fc2")

_BY_FILE = {row.file: row for row in LAYER_ROWS}
_STACK_BY_FILE = {row.file: row for row in STACK_ROWS}
_BARE_BY_FILE = {row.file: row for row in BARE_ROWS}
_LAYER = re.compile(r"layers\.(0|[1-9]\d*)\.(.+)")
_EXPERT = re.compile(r"(mlp\.experts\.)(0|[1-9]\d*)(\..+)")
_OUR_LAYER = re.compile(r"(layers\.\d+\.|mtp\.layer\.)(.+)")


def skip_reason(name: str) -> str | None:
    """Why a stored tensor is not read, or None if it must be."""
    tops, why = SKIPPED_TOPS
    if name.startswith(tops):
        return why
    return next((reason for ends, reason in SKIPPED_ENDS if name.endswith(ends)), None)


def resolve(stem: str) -> Target | None:
    """Where a stem goes, or None if no row has it. Layer and expert numbers are not checked against any config."""
    prefix = next((prefix for prefix in STACK_PREFIXES if stem.startswith(prefix)), None)
    if prefix is None:
        file_base, our_base = MTP_LAYER
        if stem.startswith(file_base):
            return _layer_target(our_base, stem.removeprefix(file_base))
        return _target("", _BARE_BY_FILE.get(stem), None)
    rest = stem.removeprefix(prefix)
    layer = _LAYER.fullmatch(rest)
    if layer is not None:
        return _layer_target(f"layers.{layer[1]}.", layer[2])
    return _target("", _STACK_BY_FILE.get(rest), None)


def sources(config: ModelConfig, parameter: str, section: int, expert: int | None, *, packed: bool) -> str:
    """The stem that fills a section of a parameter; used to say what is missing."""
    layer = _OUR_LAYER.fullmatch(parameter)
    wanted = parameter if layer is None else layer[2]
    avoid = ("gdn_flat" if config.is_next else "gdn_grouped", "single" if packed else "packed")
    rows = LAYER_ROWS if layer is not None else (*STACK_ROWS, *BARE_ROWS)
    found = (r for r in rows if r.parameter == wanted and section in r.sections and r.part not in avoid)
    row = next(found, None)
    assert row is not None, f"the name table has no source for {parameter}, section {section}"
    file = row.file.format(expert=expert)
    if layer is None:
        return config.weight_prefix + file if row in STACK_ROWS else file
    ours, (mtp_file, mtp_ours) = layer[1], MTP_LAYER
    return (mtp_file if ours == mtp_ours else config.weight_prefix + ours) + file


def file_names(
    config: ModelConfig,
    *,
    packed: bool,
    suffixes: Mapping[Kind, tuple[str, ...]] | None = None,
    num_vision_blocks: int | None = None,
) -> list[str]:
    """Every tensor name of a checkpoint of this shape.

    `packed`: experts are stored in two tensors a layer. `suffixes` gives, for kinds that are quantised, what each
    module stores (("weight", "weight_scale_inv")); all others store a weight. With a vision tower, its depth.
    """
    suffixes = suffixes or {}
    names = []
    for base, row in _stored_rows(config, packed):
        stems = [row.file] if row.part != "single" else [row.file.format(expert=e) for e in range(config.num_experts)]
        ends = [f".{suffix}" for suffix in suffixes.get(row.kind, WEIGHT)] if row.has_suffix else [""]
        names += [base + stem + end for stem in stems for end in ends]
    return names + (vision_names(num_vision_blocks) if num_vision_blocks is not None else [])


def vision_names(num_blocks: int) -> list[str]:
    """Names in a vision tower of that depth. We never read them."""
    modules = [*_VISION_ENDS, *(f"blocks.{i}.{module}" for i in range(num_blocks) for module in _VISION_BLOCK)]
    names = [f"{module}.{suffix}" for module in modules for suffix in ("weight", "bias")]
    return [f"model.visual.{name}" for name in ("pos_embed.weight", *names)]


def _target(base: str, row: Row | None, expert: int | None) -> Target | None:
    if row is None:
        return None
    return Target(base + row.parameter, row.sections, expert, row.transform, row.kind, row.has_suffix)


def _layer_target(our_base: str, rest: str) -> Target | None:
    expert = _EXPERT.fullmatch(rest)
    if expert is None:
        return _target(our_base, _BY_FILE.get(rest), None) if "{" not in rest else None
    return _target(our_base, _BY_FILE.get(expert[1] + "{expert}" + expert[3]), int(expert[2]))


def _stored_rows(config: ModelConfig, packed: bool) -> Iterator[tuple[str, Row]]:
    """Each row of the table as often as a checkpoint has it, with what its stem begins with."""
    yield from ((config.weight_prefix, row) for row in STACK_ROWS)
    tops = ("mtp",) * config.num_mtp_layers + ("untied",) * (not config.tie_word_embeddings)
    yield from (("", row) for row in BARE_ROWS if row.part in tops)
    for i, (layer_type, is_moe) in enumerate(zip(config.layer_types, config.moe_layers, strict=True)):
        parts = _parts(config, layer_type == GDN, is_moe, packed)
        yield from ((f"{config.weight_prefix}layers.{i}.", row) for row in LAYER_ROWS if row.part in parts)
    if config.num_mtp_layers:
        parts = _parts(config, False, config.is_moe, packed)
        yield from ((MTP_LAYER[0], row) for row in LAYER_ROWS if row.part in parts)


def _parts(config: ModelConfig, is_gdn: bool, is_moe: bool, packed: bool) -> tuple[str, ...]:
    mixer = ("gdn", "gdn_grouped" if config.is_next else "gdn_flat") if is_gdn else ("attention",)
    return ("norms", *mixer, *(("moe", "packed" if packed else "single") if is_moe else ("dense",)))
