"""The engine on a GPU, end to end: the CPU's tokens in float32, and every way to an answer."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from deltaserve.core.types import SamplingParams
from deltaserve.engine.llm import LLM, Completion

pytestmark = pytest.mark.gpu
MODEL = Path(__file__).parents[2] / "models" / "tiny"
LENGTHS = (1, 63, 64, 130, 200, 300, 420, 700)
GREEDY = SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True)
RULES = (
    GREEDY,
    SamplingParams(max_tokens=40, temperature=0.8, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.7, top_k=20, top_p=0.9, seed=2, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.0, logprobs=3, repetition_penalty=1.1, ignore_eos=True),
)


def prompts() -> list[tuple[int, ...]]:
    """Each begins like the others, so that later ones can hit what earlier ones left."""
    ids = Random(0).choices(range(100, 2000), k=max(LENGTHS))
    return [tuple(ids[:length]) for length in LENGTHS]


def answers(**settings: object) -> list[Completion]:
    """All prompts at once, each under one of the rules, then once more, over what is cached."""
    settings = {"num_threads": 4, "max_model_len": 1024, "num_pages": 300, "debug_checks": True, **settings}
    params = [RULES[n % len(RULES)] for n in range(len(LENGTHS))]
    with LLM(MODEL, **settings) as llm:
        return [answer for _ in range(2) for answer in llm.generate(prompts(), params)]


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    return answers(device="cpu")


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_drafts": 3}, {"max_num_batched_tokens": 128}, {"num_pages": 40, "host_cache_bytes": 1 << 28}],
    ids=["plain", "drafts", "chunks", "host tier"],
)
def test_float32_gives_the_tokens_of_the_cpu(settings: dict[str, object], expected: list[Completion]) -> None:
    found = answers(device="cuda", dtype="float32", **settings)
    pairs = zip(found, expected, strict=True)
    differing = [n for n, (one, other) in enumerate(pairs) if one.token_ids != other.token_ids]
    assert not differing, [(n, found[n].error, found[n].token_ids, expected[n].token_ids) for n in differing[:3]]
    assert any(answer.num_cached for answer in found)


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
def test_bfloat16_says_nearly_the_same(kv: str, expected: list[Completion]) -> None:
    found = answers(device="cuda", kv_cache_dtype=kv, num_drafts=3)
    same = [one.token_ids[:4] == other.token_ids[:4] for one, other in zip(found, expected, strict=True)]
    assert sum(same) > len(same) * 0.6, same
