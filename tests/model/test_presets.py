"""The published shapes: sizes against the table of facts, and a built model against its own count."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from deltaserve.core.errors import ConfigError
from deltaserve.model.config import ModelConfig
from deltaserve.model.presets import PRESETS, preset
from deltaserve.model.qwen3_5 import Qwen3_5
from deltaserve.model.sizes import conv_state_bytes, kv_elements_per_token, parameter_counts, state_bytes
from deltaserve.parallel.mesh import SINGLE

# Derived sizes as published or computed elsewhere: parameters in billions (base, draft head, active per token), KV
# elements per token, recurrent state (float32) and convolution state (bfloat16) of a sequence in MiB, conv channels.
PUBLISHED = {
    "qwen3-next-80b-a3b": (79.674, 1.650, 3.56, 12288, 72, 1.69, 8192),
    "qwen3.5-0.8b": (0.752, 0.020, 0.75, 6144, 18, 0.63, 6144),
    "qwen3.5-2b": (1.882, 0.061, 1.88, 6144, 18, 0.63, 6144),
    "qwen3.5-4b": (4.206, 0.121, 4.21, 16384, 48, 1.12, 8192),
    "qwen3.5-9b": (8.954, 0.243, 7.94, 16384, 48, 1.12, 8192),
    "qwen3.5-27b": (26.896, 0.425, 25.62, 32768, 144, 2.81, 10240),
    "qwen3.5-35b-a3b": (34.661, 0.845, 2.95, 10240, 60, 1.41, 8192),
    "qwen3.5-122b-a10b": (122.112, 2.524, 9.01, 12288, 144, 2.53, 12288),
    "qwen3.5-397b-a17b": (396.346, 6.596, 16.33, 15360, 180, 3.16, 12288),
    "qwen3.8-2.4t-a95b": (2419.805, 26.378, 93.25, 47104, 552, 8.09, 20480),
}
MIB = 1 << 20


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    base, mtp, active, kv, state, conv, channels = PUBLISHED[name]
    shape = preset(name)
    counts = parameter_counts(shape)
    assert counts.base / 1e9 == pytest.approx(base, abs=5.1e-4)
    assert counts.mtp / 1e9 == pytest.approx(mtp, abs=5.1e-4)
    assert counts.active / 1e9 == pytest.approx(active, abs=5.1e-3)
    assert (kv_elements_per_token(shape), shape.conv_channels) == (kv, channels)
    assert state_bytes(shape) == state * MIB
    assert conv_state_bytes(shape) / MIB == pytest.approx(conv, abs=5.1e-3)


def test_the_flagship_has_exactly_its_published_parameters() -> None:
    assert parameter_counts(preset("qwen3.8-2.4t-a95b")).total == 2_446_182_725_504


@pytest.mark.parametrize("name", PRESETS)
def test_pools_agree_with_the_sizes(name: str) -> None:
    shape = preset(name)
    spec = replace(shape, num_mtp_layers=0).cache_spec(compute_dtype="bfloat16")
    assert spec.kv_bytes_per_token == 2 * kv_elements_per_token(shape)
    assert spec.slot_bytes == state_bytes(shape) + conv_state_bytes(shape) + 2 * shape.hidden_size
    assert (shape.max_position_embeddings, shape.rotary_dim, shape.num_mtp_layers) == (262144, 64, 1)


@pytest.mark.parametrize("name", PRESETS)
def test_a_built_model_has_that_many_parameters(name: str) -> None:
    shape = preset(name)
    with torch.device("meta"):
        model = Qwen3_5(shape, SINGLE, torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_counts(shape).total


def test_all_models_of_a_name_differ_where_the_makers_say() -> None:
    assert preset("Qwen3.8-27B") == preset("qwen3.5-27b")
    assert preset("qwen3-coder-next").rope_theta == 5e6
    assert (preset("qwen3.8-2.4t-a95b").weight_prefix, preset("qwen3.5-9b").weight_prefix) == (
        "model.",
        "model.language_model.",
    )
    tied = [name for name in PRESETS if preset(name).tie_word_embeddings]
    assert tied == ["qwen3.5-0.8b", "qwen3.5-2b", "qwen3.5-4b"]


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"qwen3.5-70b.*qwen3.5-0.8b"):
        preset("qwen3.5-70b")


def test_a_model_does_not_split_over_any_number_of_ranks() -> None:
    shape: ModelConfig = preset("qwen3.5-35b-a3b")
    for size in (1, 2, 4, 8, 16):
        shape.check_tensor_parallel(size)
    with pytest.raises(ConfigError, match="32 does not divide num_attention_heads 16"):
        shape.check_tensor_parallel(32)
