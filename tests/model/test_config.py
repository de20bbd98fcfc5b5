"""Reading config.json: defaults per type, old and new spellings, wrappers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from deltaserve.core.errors import CheckpointError, ConfigError
from deltaserve.model.config import ATTENTION, GDN, ModelConfig, Yarn
from deltaserve.model.config_file import TEXT_DEFAULTS

TYPES = {
    "qwen3_next": transformers.Qwen3NextConfig,
    "qwen3_5_text": transformers.Qwen3_5TextConfig,
    "qwen3_5_moe_text": transformers.Qwen3_5MoeTextConfig,
}


def config(model_type: str = "qwen3_5_moe_text", **fields: Any) -> ModelConfig:
    return ModelConfig.from_dict({"model_type": model_type, **fields})


@pytest.mark.parametrize("model_type", TYPES)
def test_a_missing_key_gets_its_types_default(model_type: str) -> None:
    """As `transformers` fills it, for every key that it knows."""
    theirs = TYPES[model_type]()
    for name, default in TEXT_DEFAULTS[model_type].items():
        known = getattr(theirs, name, None)
        assert known is None or known == default, name
    ours = config(model_type)
    assert ours.layer_types == tuple(theirs.layer_types)
    assert ours.hidden_size == theirs.hidden_size
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.intermediate_size == getattr(theirs, "intermediate_size", 0)


@pytest.mark.parametrize("model_type", TYPES)
def test_null_means_missing(model_type: str) -> None:
    assert config(model_type, **dict.fromkeys(TEXT_DEFAULTS[model_type])) == config(model_type)


def test_what_other_tools_save_reads_the_same(tmp_path: Path) -> None:
    """An old flat file, and the same after `transformers` rewrote it."""
    old = {"rope_theta": 5e6, "partial_rotary_factor": 0.5, "rope_scaling": None, "num_hidden_layers": 8}
    transformers.Qwen3NextConfig(**old).save_pretrained(tmp_path)
    ours = config("qwen3_next", **old)
    assert ModelConfig.from_directory(tmp_path) == ours
    assert (ours.rope_theta, ours.rotary_dim, ours.num_layers) == (5e6, 128, 8)


def test_layer_types_are_built_or_given() -> None:
    assert config(num_hidden_layers=4).layer_types == (GDN, GDN, GDN, ATTENTION)
    assert config(num_hidden_layers=3, full_attention_interval=2).layer_types == (GDN, ATTENTION, GDN)
    given = config(num_hidden_layers=3, layer_types=[ATTENTION, GDN, GDN])
    assert (given.layer_types, given.num_attention_layers, given.num_gdn_layers) == ((ATTENTION, GDN, GDN), 1, 2)


def test_next_may_leave_layers_dense() -> None:
    ours = config("qwen3_next", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert ours.moe_layers == (False, True, False, False, False, True)
    assert all(config("qwen3_next").moe_layers)
    assert not any(config("qwen3_5_text").moe_layers)


def test_only_next_may_turn_renormalisation_off() -> None:
    assert not config("qwen3_next", norm_topk_prob=False).norm_topk_prob
    assert config("qwen3_5_moe_text", norm_topk_prob=False).norm_topk_prob


@pytest.mark.parametrize("outer", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("names_inner", [True, False])
def test_wrappers_nest_the_text_model(outer: str, names_inner: bool) -> None:
    inner = {"num_hidden_layers": 8, "eos_token_id": 7} | ({"model_type": f"{outer}_text"} if names_inner else {})
    ours = ModelConfig.from_dict({"model_type": outer, "text_config": inner, "vision_config": {"depth": 2}})
    assert (ours.model_type, ours.num_layers, ours.eos_token_id) == (f"{outer}_text", 8, (7,))
    assert (ours.weight_prefix, ours.is_multimodal) == ("model.language_model.", True)
    assert config().weight_prefix == "model."


@pytest.mark.parametrize(
    ("top", "nested", "expected"),
    [(True, False, True), (False, True, False), (None, True, True), (None, None, False)],
)
def test_the_outer_tie_is_the_authority(top: bool | None, nested: bool | None, expected: bool) -> None:
    text = {} if nested is None else {"tie_word_embeddings": nested}
    cfg: dict[str, Any] = {"model_type": "qwen3_5", "text_config": text}
    cfg |= {} if top is None else {"tie_word_embeddings": top}
    assert ModelConfig.from_dict(cfg).tie_word_embeddings is expected


def test_dtype_and_end_ids_may_be_spelled_several_ways() -> None:
    assert config(torch_dtype="float16").dtype == "float16"
    assert config(dtype="torch.float32").dtype == "float32"
    assert config().dtype == "bfloat16"
    assert [config(eos_token_id=ids).eos_token_id for ids in (None, 3, [3, 5])] == [(), (3,), (3, 5)]


def test_yarn() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144, "rope_theta": 1e7}
    ours = config(rope_parameters=rope)
    assert ours.yarn == Yarn(4.0, 262144, pytest.approx(1.1386294), 32.0, 1.0, truncate=True)
    assert (ours.rotary_dim, ours.rope_theta) == (64, 1e7)
    old = config(rope_scaling={"type": "yarn", "factor": 4.0, "attention_factor": 1.5}, max_position_embeddings=4096)
    assert old.yarn is not None
    assert (old.yarn.attention_factor, old.yarn.original_length) == (1.5, 4096)


REFUSED = [
    ({"model_type": "qwen4_exp", "architectures": ["Qwen4ExpForCausalLM"]}, "qwen4_exp .*Qwen3.8-Flash-Next"),
    ({"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen4_exp_text"}}, "qwen4_exp_text"),
    ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, r"llama \(LlamaForCausalLM\).*qwen3_next"),
    ({"model_type": "qwen3_moe"}, "no Gated DeltaNet"),
    ({"model_type": ["qwen3_next"]}, "not served"),
    ({}, "model_type None"),
    ({"model_type": "qwen3_5"}, "text_config"),
    ({"model_type": "qwen3_5", "text_config": "none"}, "text_config"),
    ({"attention_bias": True}, "attention_bias True"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid'"),
    ({"attn_output_gate": False}, "attn_output_gate"),
    ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
    ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers 2"),
    ({"mtp_num_hidden_layers": -1}, "mtp_num_hidden_layers"),
    ({"linear_num_value_heads": 24}, "linear_num_value_heads 24 .* linear_num_key_heads 16"),
    ({"num_key_value_heads": 3}, "num_attention_heads 16 .* num_key_value_heads 3"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"num_hidden_layers": "40"}, "num_hidden_layers .*'40'"),
    ({"hidden_size": True}, "hidden_size"),
    ({"hidden_size": 10**13}, "hidden_size .* to 16777216, not 10000000000000"),
    ({"head_dim": 10**400}, "head_dim"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ({"partial_rotary_factor": 1e308}, "partial_rotary_factor"),
    ({"layer_types": ["linear_attention"]}, "layer_types .* 40"),
    ({"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, "sliding_attention"),
    ({"num_hidden_layers": 1, "layer_types": [["x"]]}, "layer_types"),
    ({"mlp_only_layers": [0]}, r"mlp_only_layers \[0\]"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
    ({"model_type": "qwen3_next", "mlp_only_layers": [48]}, "mlp_only_layers"),
    ({"num_experts_per_tok": 257}, "num_experts_per_tok 257"),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
    ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type 'llama3'"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type 'linear'"),
    ({"rope_parameters": [1]}, "rope_parameters"),
    ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta"),
    ({"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
    ({"partial_rotary_factor": 0.01, "head_dim": 300}, "partial_rotary_factor"),
    ({"eos_token_id": "x"}, "eos_token_id"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    cfg = fields if "model_type" in fields or not fields else {"model_type": "qwen3_5_moe_text", **fields}
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(cfg)


def write(directory: Path, cfg: dict[str, Any], names: list[str] | None = None) -> Path:
    (directory / "config.json").write_text(json.dumps(cfg))
    if names is not None:
        save_file({name: torch.zeros(1) for name in names}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("stated", [0, 1, None])
@pytest.mark.parametrize("names", [["model.norm.weight"], ["mtp.fc.weight", "model.norm.weight"], None])
def test_tensors_decide_on_the_draft_head(
    model_type: str, stated: int | None, names: list[str] | None, tmp_path: Path
) -> None:
    cfg = {"model_type": model_type} | ({} if stated is None else {"mtp_num_hidden_layers": stated})
    ours = ModelConfig.from_directory(write(tmp_path, cfg, names))
    by_file = TEXT_DEFAULTS[model_type]["mtp_num_hidden_layers"] if stated is None else stated
    assert ours.num_mtp_layers == (by_file if names is None else int("mtp.fc.weight" in names))


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000])
def test_a_broken_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config.json.*JSON.*download it again"):
        ModelConfig.from_directory(tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        ModelConfig.from_directory(tmp_path / "nowhere")


def test_cache_spec_counts_this_ranks_heads() -> None:
    whole = config(mtp_num_hidden_layers=1).cache_spec(compute_dtype="bfloat16", num_drafts=3)
    assert (whole.num_attention_layers, whole.num_draft_layers, whole.num_gdn_layers) == (10, 1, 30)
    assert (whole.num_kv_heads, whole.num_key_heads, whole.num_value_heads) == (2, 16, 32)
    assert (whole.kv_dtype, whole.state_dtype, whole.num_drafts) == ("bfloat16", "float32", 3)
    half, eighth = config().cache_spec(tp_rank=1, tp_size=2), config().cache_spec(tp_rank=7, tp_size=8)
    assert (half.num_kv_heads, half.num_key_heads, half.num_value_heads) == (1, 8, 16)
    assert (eighth.num_kv_heads, eighth.num_key_heads, eighth.num_value_heads) == (1, 2, 4)


@pytest.mark.parametrize(
    ("fields", "size", "message"),
    [
        ({}, 3, "num_attention_heads 16"),
        ({"num_attention_heads": 48}, 3, "linear_num_key_heads 16"),
        ({"moe_intermediate_size": 255}, 2, "moe_intermediate_size 255"),
        ({"shared_expert_intermediate_size": 255}, 2, "shared_expert_intermediate_size 255"),
        ({"vocab_size": 1001}, 2, "vocab_size 1001"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "num_key_value_heads 6"),
        ({"model_type": "qwen3_5_text", "intermediate_size": 255}, 2, "intermediate_size 255"),
    ],
)
def test_an_uneven_split_is_refused_by_name(fields: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size {size} .*{message}"):
        config(**({"model_type": "qwen3_5_moe_text"} | fields)).cache_spec(tp_size=size)


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="int8"):
        config().cache_spec(kv_dtype="int8")
