"""The shipped model: small enough, the same for transformers, as good quantised, and good at what must work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.training.exports import quantized_export
from training.cases import NEEDLE, cases, heldout_examples
from training.data import Sampler
from training.engine_backend import Engine
from training.evaluate import score

TINY = Path(__file__).parents[2] / "models" / "tiny"
TOKENIZER = TINY / "tokenizer.json"
MAX_BYTES = 24_000_000
SKILLS = ("facts", "deltaserve", "chat", "copy", "sums_thinking", "tool_call", "objects", "system", "code", "story")
# Of a quantised export's perplexity over that of BF16.
MORE_PERPLEXITY = {"fp8-block": 1.02, "nvfp4-modelopt": 1.06}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    opened = Engine(TINY)
    yield opened
    opened.close()


def test_it_is_small_enough() -> None:
    assert sum(path.stat().st_size for path in TINY.iterdir()) <= MAX_BYTES


def test_every_id_has_a_row_and_some_rows_have_none() -> None:
    config = json.loads((TINY / "config.json").read_text())
    with safe_open(TINY / "model.safetensors", "pt") as file:
        assert file.get_slice("model.embed_tokens.weight").get_shape()[0] == config["vocab_size"]
    ids = {token_id for example in heldout_examples(TOKENIZER, "mixed", 20) for part in example for token_id in part}
    assert max(ids) < 4072 < config["vocab_size"]


def test_transformers_gives_the_same_tokens(engine: Engine) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    stops = json.loads((TINY / "generation_config.json").read_text())["eos_token_id"]
    prompts = [prompt for skill in SKILLS for prompt, _ in heldout_examples(TOKENIZER, skill, 5, seed=1)]
    assert len(prompts) == 50
    answers = engine.answers(prompts, 16)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = oracle.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=stops
            )
        assert engine.llm.tokenizer.decode(output[0, len(prompt) :].tolist()) == answer


@pytest.mark.parametrize("encoder", MORE_PERPLEXITY)
def test_quantised_exports_are_nearly_as_good(engine: Engine, tmp_path: Path, encoder: str) -> None:
    ids, weights = Sampler(TOKENIZER, "heldout", 1, 767).packed(4)
    quantized = Engine(quantized_export(TINY, tmp_path, encoder))
    ratio = quantized.perplexity(ids, weights) / engine.perplexity(ids, weights)
    quantized.close()
    assert 1 / MORE_PERPLEXITY[encoder] < ratio < MORE_PERPLEXITY[encoder]


@pytest.mark.parametrize("skill", ["tool_call", "copy"])
def test_musts_are_met_on_new_cases(engine: Engine, skill: str) -> None:
    assert score(engine, TOKENIZER, cases(TOKENIZER, skill, 20, seed=2), 160)["exact"] >= 0.85


def test_a_word_is_recalled_from_a_long_text(engine: Engine) -> None:
    assert score(engine, TOKENIZER, cases(TOKENIZER, NEEDLE, 6, seed=2, context=2048), 40)["exact"] >= 5 / 6
