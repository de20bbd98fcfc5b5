"""From a `config.json` to the fields of a ModelConfig.

Three text types share one block design: `qwen3_next`, `qwen3_5_text` (dense) and `qwen3_5_moe_text`. The multimodal
wrappers `qwen3_5` and `qwen3_5_moe` nest one of them under `text_config`; only that text part is read. A key that is
missing (or null) gets the default of its own type; they differ. What no layer computes as written is refused by a
sentence that names the field and its value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltaserve.core.errors import CheckpointError, ConfigError

GDN = "linear_attention"
ATTENTION = "full_attention"
WRAPPERS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
_NO_GDN = "it has no Gated DeltaNet layers"
_FLASH_NEXT = "it is the architecture of Qwen3.8-Flash-Next, which shares the name but not the block design"
_WHY_NOT = {"qwen4_exp": _FLASH_NEXT, "qwen4_exp_text": _FLASH_NEXT, "qwen3": _NO_GDN, "qwen3_moe": _NO_GDN}

_SHARED: dict[str, Any] = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000.0,
    "attn_output_gate": True,
    "output_gate_type": "silu",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 0,
    "mtp_use_dedicated_embeddings": False,
}
_DENSE = _SHARED | {
    "vocab_size": 248320,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 12288,
}
_MOE = _SHARED | {
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_NEXT = _MOE | {
    "vocab_size": 151936,
    "num_hidden_layers": 48,
    "intermediate_size": 5632,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "mtp_num_hidden_layers": 1,
}
TEXT_DEFAULTS = {"qwen3_next": _NEXT, "qwen3_5_text": _DENSE, "qwen3_5_moe_text": _MOE}

# Fields whose only served values these are.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "output_gate_type": ("silu", "swish"),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "mtp_use_dedicated_embeddings": (False,),
}
_COUNTS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "linear_num_key_heads": "num_key_heads",
    "linear_num_value_heads": "num_value_heads",
    "linear_key_head_dim": "key_head_dim",
    "linear_value_head_dim": "value_head_dim",
    "linear_conv_kernel_dim": "conv_width",
    "max_position_embeddings": "max_position_embeddings",
}
_EXPERT_COUNTS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "moe_intermediate_size": "moe_intermediate_size",
    "shared_expert_intermediate_size": "shared_intermediate_size",
}
# No model of the family comes near; what is larger is a mistake that would overflow somewhere else.
_MOST = 1 << 24
_LARGEST = 1e15


@dataclass(frozen=True, slots=True)
class Yarn:
    """Context extension by YaRN (arXiv 2309.00071, section 3). `attention_factor` multiplies cos and sin."""

    factor: float
    original_length: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


def read_fields(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ModelConfig. Raises ConfigError for a type or a value that is not served."""
    text_type, given = _text_part(cfg)
    text = TEXT_DEFAULTS[text_type] | {name: value for name, value in given.items() if value is not None}
    for name, served in _ONLY.items():
        if text[name] not in served:
            raise ConfigError(f"{name} {text[name]!r} is not served; it must be {' or '.join(map(repr, served))}")
    layer_types = _layer_types(text)
    return {
        "model_type": text_type,
        "layer_types": layer_types,
        "weight_prefix": "model.language_model." if "text_config" in cfg else "model.",
        "is_multimodal": "text_config" in cfg,
        "rms_norm_eps": _number(text, "rms_norm_eps"),
        "tie_word_embeddings": bool(cfg.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        "num_mtp_layers": _count(text, "mtp_num_hidden_layers", least=0),
        "dtype": str(_first("dtype", "torch_dtype", among=(text, cfg)) or "bfloat16").removeprefix("torch."),
        "eos_token_id": token_ids("eos_token_id", _first("eos_token_id", among=(text, cfg))),
        **{ours: _count(text, theirs) for theirs, ours in _COUNTS.items()},
        **_ffn_fields(text_type, text, len(layer_types)),
        **_rope_fields(text),
    }


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint; CheckpointError if it is missing or is something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; give a model directory in the Hub's layout") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(content).__name__}; download it again")
    return content


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids given as one, as a list or not at all; ConfigError, with the field's name, for anything else."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise ConfigError(f"{name} must be a token id or a list of them, not {value!r}")
    return tuple(ids)


def _text_part(cfg: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The type and the fields of the text model, out of a flat file or a wrapper's."""
    outer = str(cfg.get("model_type"))
    if outer not in TEXT_DEFAULTS and outer not in WRAPPERS:
        raise ConfigError(_not_served(outer, cfg))
    if "text_config" not in cfg and outer in TEXT_DEFAULTS:
        return outer, cfg
    text = cfg.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"model_type {outer!r} needs an object text_config in config.json, not {text!r}")
    inner = str(text.get("model_type") or outer)
    inner = WRAPPERS.get(inner, inner)
    if inner not in TEXT_DEFAULTS:
        raise ConfigError(_not_served(inner, cfg))
    return inner, text


def _not_served(model_type: str, cfg: Mapping[str, Any]) -> str:
    architectures = cfg.get("architectures")
    name = f" ({', '.join(map(str, architectures))})" if isinstance(architectures, list) and architectures else ""
    reason = f", because {_WHY_NOT[model_type]}" if model_type in _WHY_NOT else ""
    return f"model_type {model_type}{name} is not served{reason}; served are {', '.join((*TEXT_DEFAULTS, *WRAPPERS))}"


def _layer_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    num_layers = _count(text, "num_hidden_layers")
    given = text.get("layer_types")
    if given is None:
        interval = _count(text, "full_attention_interval")
        return tuple(GDN if (i + 1) % interval else ATTENTION for i in range(num_layers))
    if not isinstance(given, list) or len(given) != num_layers:
        raise ConfigError(f"layer_types must list num_hidden_layers = {num_layers} types, not {given!r}")
    for layer_type in given:
        if layer_type not in (GDN, ATTENTION):
            raise ConfigError(f"layer_types may hold {GDN!r} and {ATTENTION!r}, not {layer_type!r}")
    return tuple(given)


def _ffn_fields(text_type: str, text: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Widths of dense and expert layers, and which layer has experts (Qwen3-Next may leave some dense)."""
    if "num_experts" not in TEXT_DEFAULTS[text_type]:
        sizes = dict.fromkeys(_EXPERT_COUNTS.values(), 0)
        return sizes | {
            "intermediate_size": _count(text, "intermediate_size"),
            "moe_layers": (False,) * num_layers,
            "norm_topk_prob": True,
        }
    dense = text["mlp_only_layers"]
    if not isinstance(dense, list) or any(i not in range(num_layers) for i in dense):
        raise ConfigError(f"mlp_only_layers must list layers from 0 to {num_layers - 1}, not {dense!r}")
    step = _count(text, "decoder_sparse_step")
    if text_type != "qwen3_next" and (dense or step != 1):
        field = f"mlp_only_layers {dense}" if dense else f"decoder_sparse_step {step}"
        raise ConfigError(f"{field} is not served with {text_type}, whose every layer has experts; remove it")
    return {ours: _count(text, theirs) for theirs, ours in _EXPERT_COUNTS.items()} | {
        "intermediate_size": _count(text, "intermediate_size") if "intermediate_size" in text else 0,
        "moe_layers": tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        "norm_topk_prob": bool(text["norm_topk_prob"]) or text_type != "qwen3_next",
    }


def _rope_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    """Older files keep the parameters flat, with a `rope_scaling` object; newer ones in `rope_parameters`."""
    given = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"rope_parameters must be an object, not {given!r}")
    rope = {name: text[name] for name in ("rope_theta", "partial_rotary_factor")}
    rope |= {name: value for name, value in given.items() if value is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ConfigError(f"rope_type {kind!r} is not served; it must be 'default' or 'yarn'")
    return {
        "rope_theta": _number(rope, "rope_theta"),
        "rotary_dim": int(_count(text, "head_dim") * _number(rope, "partial_rotary_factor")),
        "yarn": _yarn(rope, _count(text, "max_position_embeddings")) if kind == "yarn" else None,
    }


def _yarn(rope: Mapping[str, Any], max_length: int) -> Yarn:
    original = _count({"original_max_position_embeddings": max_length} | dict(rope), "original_max_position_embeddings")
    factor = _number(rope, "factor") if "factor" in rope else max_length / original
    return Yarn(
        factor=factor,
        original_length=original,
        attention_factor=_attention_factor(rope, factor),
        beta_fast=_number({"beta_fast": 32.0} | dict(rope), "beta_fast"),
        beta_slow=_number({"beta_slow": 1.0} | dict(rope), "beta_slow"),
        truncate=bool(rope.get("truncate", True)),
    )


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """1 + 0.1 ln(factor) by the paper, unless the file states it or the two `mscale`s it comes from."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if "attention_factor" in rope:
        return _number(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(_number(rope, "mscale")) / scale(_number(rope, "mscale_all_dim"))
    return scale(1.0)


def _first(*names: str, among: tuple[Mapping[str, Any], ...]) -> Any:
    found = (part[name] for part in among for name in names if part.get(name) is not None)
    return next(found, None)


def _count(fields: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST:
        raise ConfigError(f"{name} must be a whole number from {least} to {_MOST}, not {value!r}")
    return value


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _LARGEST:
        raise ConfigError(f"{name} must be a positive number up to {_LARGEST:g}, not {value!r}")
    return float(value)
