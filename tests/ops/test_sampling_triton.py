"""Tokens chosen by the kernels are those of the CPU reference, for equal logits and all rules."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.ops.triton_case import MARK, move, pick

# isort: split
from deltaserve.ops.sampling import reference
from deltaserve.ops.sampling import triton as sampling
from deltaserve.ops.sampling.noise import seed_keys, stream_keys
from deltaserve.ops.testing import generator

pytestmark = MARK
VOCABS = pick([7, 4096, 151_936, 248_320], [70])
RULES = {
    "plain": {},
    "top_k": {"top_k": 20},
    "top_k of one": {"top_k": 1},
    "top_p": {"top_p": 0.9},
    "tiny top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
    "top_p and min_p": {"top_p": 0.7, "min_p": 0.001},
}


def rules(
    count: int, temperature: float = 0.8, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> reference.Rules:
    keys = stream_keys(seed_keys(np.arange(count).astype(np.uint64)), np.arange(count) * 7)
    full = np.full
    return reference.Rules(
        full(count, temperature), full(count, top_k, np.int64), full(count, top_p), full(count, min_p), keys
    )


@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_with_ties_and_nan(vocab: int) -> None:
    logits = torch.randint(0, 4, (5, vocab), generator=generator(0)).float()
    logits[1] = torch.randn(vocab, generator=generator(1))
    logits[2, 3:5] = torch.nan
    logits[3] = -torch.inf
    expected_ids, expected_peaks = reference.greedy(logits)
    ids, peaks = sampling.greedy(move(logits))
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(peaks, expected_peaks)
    np.testing.assert_array_equal(sampling.greedy_ids(move(logits)).cpu().numpy(), expected_ids)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("temperature", pick([0.6, 1.7], [0.6]))
def test_sample_is_the_reference(name: str, vocab: int, temperature: float) -> None:
    count = pick([16], [2])[0]
    logits = torch.randn(count, vocab, generator=generator(vocab)) * 3
    logits[0] = logits[0].round()  # equals
    logits[1, ::2] = -torch.inf  # forbidden
    parameters = rules(count, temperature, **RULES[name])
    expected_ids, expected_peaks = reference.sample(logits, parameters)
    ids, peaks = sampling.sample(move(logits), parameters)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_array_equal(peaks, expected_peaks)


def test_rows_of_different_rules() -> None:
    vocab = pick([50_000], [90])[0]
    parts = [rules(1, 0.9, **parameters) for parameters in RULES.values()]
    fields = ("temperature_N", "top_k_N", "top_p_N", "min_p_N", "keys_N")
    mixed = reference.Rules(*(np.concatenate([getattr(part, field) for part in parts]) for field in fields))
    logits = torch.randn(len(parts), vocab, generator=generator(5)) * 2
    np.testing.assert_array_equal(sampling.sample(move(logits), mixed)[0], reference.sample(logits, mixed)[0])
