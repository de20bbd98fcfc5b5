"""The speculative flag: what each key does, both ways to count acceptance, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deltaserve.core.config import SpeculativeConfig
from deltaserve.core.errors import ConfigError
from deltaserve.engine.settings import engine_config
from deltaserve.engine.speculative import speculative_config

MTP = {"method": "mtp", "num_speculative_tokens": 3}
SYNTHETIC = MTP | {"rejection_sample_method": "synthetic"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, SpeculativeConfig()),
        (MTP, SpeculativeConfig(3)),
        (MTP | {"method": "qwen3_next_mtp"}, SpeculativeConfig(3)),
        (MTP | {"num_speculative_tokens": 0}, SpeculativeConfig(0)),
        (MTP | {"num_speculative_tokens": 7}, SpeculativeConfig(7)),
        (MTP | {"adaptive": True}, SpeculativeConfig(3, is_adaptive=True)),
        (MTP | {"rejection_sample_method": "strict"}, SpeculativeConfig(3)),
        (SYNTHETIC | {"synthetic_acceptance_length": 2.937}, SpeculativeConfig(3, 2.937)),
        (SYNTHETIC | {"synthetic_acceptance_length": 4}, SpeculativeConfig(3, 4.0)),
    ],
)
def test_keys_have_their_effect(given: dict[str, Any] | None, expected: SpeculativeConfig) -> None:
    assert speculative_config(given) == expected
    assert speculative_config(None if given is None else json.dumps(given)) == expected


def test_the_two_ways_to_count_acceptance_differ_by_the_sampled_token() -> None:
    by_drafts = speculative_config(SYNTHETIC | {"synthetic_accepted_drafts": 2.3})
    by_tokens = speculative_config(SYNTHETIC | {"synthetic_acceptance_length": 3.3})
    assert by_drafts.synthetic_acceptance == pytest.approx(3.3) == by_tokens.synthetic_acceptance
    assert speculative_config(SYNTHETIC | {"synthetic_accepted_drafts": 0}).synthetic_acceptance == 1
    assert speculative_config(SYNTHETIC | {"synthetic_accepted_drafts": 3}).synthetic_acceptance == 4


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("{", 'not JSON .* write \'{"method"'),
        ("[1]", "must be a JSON object"),
        (MTP | {"model": "draft"}, "model is not known"),
        (MTP | {"synthetic_acceptance_rates": [1]}, "synthetic_acceptance_rates is not known"),
        ({"num_speculative_tokens": 3}, "method must be mtp"),
        (MTP | {"method": "eagle3"}, "method must be mtp .* not 'eagle3'"),
        ({"method": "mtp"}, "num_speculative_tokens is required"),
        (MTP | {"num_speculative_tokens": "3"}, "num_speculative_tokens must be int, not '3'"),
        (MTP | {"num_speculative_tokens": True}, "num_speculative_tokens must be int, not True"),
        (MTP | {"num_speculative_tokens": 8}, "between 0 and 7, not 8"),
        (MTP | {"adaptive": 1}, "adaptive must be bool"),
        (MTP | {"rejection_sample_method": "typical"}, "must be strict or synthetic"),
        (MTP | {"synthetic_acceptance_length": 2}, 'needs "rejection_sample_method": "synthetic"'),
        (SYNTHETIC, "needs one of synthetic_acceptance_length"),
        (SYNTHETIC | {"synthetic_acceptance_length": 2, "synthetic_accepted_drafts": 1}, "needs one of"),
        (SYNTHETIC | {"synthetic_acceptance_length": 4.1}, "cannot come from 3 drafts"),
        (SYNTHETIC | {"synthetic_accepted_drafts": 3.1}, "cannot come from 3 drafts"),
        (SYNTHETIC | {"synthetic_acceptance_length": 0.5}, "between 1 and 4"),
    ],
)
def test_everything_else_is_refused_by_name(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        speculative_config(given)


def test_llm_takes_the_same_object_or_the_fields() -> None:
    expected = SpeculativeConfig(3, 2.5, is_adaptive=True)
    given = SYNTHETIC | {"synthetic_acceptance_length": 2.5, "adaptive": True}
    assert engine_config("x", {"speculative_config": given}).speculative == expected
    flat = {"num_drafts": 3, "synthetic_acceptance": 2.5, "is_adaptive": True}
    assert engine_config("x", flat).speculative == expected
    with pytest.raises(ConfigError, match="speculative_config and num_drafts"):
        engine_config("x", {"speculative_config": given, "num_drafts": 3})
