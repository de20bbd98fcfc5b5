"""Rules that are told drafts and forget them again are as if they had never heard of them."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from deltaserve.core.plan import Admission
from deltaserve.core.types import SamplingParams
from deltaserve.runner.processors import Penalties, Values, make_processors

VOCAB = 40
EVERYTHING = SamplingParams(
    min_tokens=6,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.25,
    logit_bias={3: 1.5, 9: -2.0},
)


def admission(params: SamplingParams, output_ids: tuple[int, ...] = ()) -> Admission:
    return Admission(1, 0, (5, 6, 7, 5), output_ids, params, stop_ids=(1, 2))


def judged(processors: object, logits_V: Values) -> Values:
    changed = logits_V.copy()
    for processor in processors:  # type: ignore[attr-defined]
        processor.apply(changed)
    return changed


@pytest.mark.parametrize(
    "params",
    [
        EVERYTHING,
        replace(EVERYTHING, repetition_penalty=1.0),
        replace(EVERYTHING, min_tokens=0, presence_penalty=0.0, frequency_penalty=0.0),
        SamplingParams(min_tokens=4),
    ],
    ids=["everything", "no repetition", "repetition", "min_tokens"],
)
@pytest.mark.parametrize("seed", range(4))
def test_rolling_back_leaves_no_trace(params: SamplingParams, seed: int) -> None:
    """Random drafts told, judged and forgotten, some kept; against a fresh request with the same output."""
    rng, generator = random.Random(seed), np.random.default_rng(seed)
    processors = make_processors(admission(params), VOCAB)
    output: tuple[int, ...] = ()
    for _ in range(60):
        logits_V = generator.standard_normal(VOCAB).astype(np.float32)
        drafts = tuple(rng.randrange(14) for _ in range(rng.randrange(8)))
        for place, draft in enumerate(drafts):
            fresh = make_processors(admission(params, output + drafts[:place]), VOCAB)
            assert np.array_equal(judged(processors, logits_V), judged(fresh, logits_V))
            for processor in processors:
                processor.accept(draft)
        num_kept = rng.randrange(len(drafts) + 1)
        for processor in processors:
            if drafts[num_kept:]:
                processor.rollback(drafts[num_kept:])
        output += drafts[:num_kept]
        fresh = make_processors(admission(params, output), VOCAB)
        assert np.array_equal(judged(processors, logits_V), judged(fresh, logits_V))


def test_what_was_said_before_the_admission_is_never_forgotten() -> None:
    """A token of the prompt, drafted and refused, is still a token of the prompt."""
    logits_V = np.ones(VOCAB, np.float32)
    penalties = Penalties(admission(EVERYTHING, (11,)))
    before = judged([penalties], logits_V)
    for token_id in (5, 11, 30, 5):
        penalties.accept(token_id)
    penalties.rollback((5, 11, 30, 5))
    assert np.array_equal(judged([penalties], logits_V), before)
    assert before[5] < 1 and before[11] < before[5] and before[30] == 1
