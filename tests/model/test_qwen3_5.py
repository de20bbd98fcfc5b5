"""Logits of every family against `transformers`, on every path: whole prefill, chunks, decode with folds, batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from deltaserve.core.types import BLOCK
from deltaserve.model.qwen3_5 import Qwen3_5
from tests.model import tiny
from tests.model.pairs import assert_logits, driver, load, load_pair, prefill_in_chunks

Pair = tuple[nn.Module, Qwen3_5]
LENGTH = 300


@pytest.fixture(scope="module", params=tiny.KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One oracle and our model, loaded from the oracle's files."""
    return load_pair(request.param, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return load_pair("moe", tmp_path_factory.mktemp("moe"))


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 130, LENGTH])
def test_whole_prompt(pair: Pair, length: int) -> None:
    oracle, model = pair
    ids = tiny.random_ids(length, seed=length)
    run = driver(model)
    assert_logits(model, run.step(prefill=[(run.open(), ids)]), tiny.hf_logits(oracle, ids))


@pytest.mark.parametrize("chunks", [(64, 64, 64, 64, 44), (128, 172), (64, 192, 44)])
def test_prompt_in_chunks(pair: Pair, chunks: tuple[int, ...]) -> None:
    oracle, model = pair
    ids = tiny.random_ids(LENGTH)
    run = driver(model)
    assert_logits(model, prefill_in_chunks(run, run.open(), ids, chunks), tiny.hf_logits(oracle, ids))


@pytest.mark.parametrize("prompt", [1, 64])
def test_decode_across_boundaries(pair: Pair, prompt: int) -> None:
    oracle, model = pair
    ids = tiny.random_ids(132, seed=prompt)
    run = driver(model)
    sequence = run.open()
    hidden = run.step(prefill=[(sequence, ids[:prompt])])
    for token in ids[prompt:]:
        hidden += run.step(extend=[(sequence, [token])])
    assert sorted(sequence.snapshots) == [64, 128]
    assert_logits(model, hidden, tiny.hf_logits(oracle, ids))


def test_rows_of_both_kinds_in_one_step(pair: Pair) -> None:
    """Two rows decode, one of them over a boundary, while a third is prefilled chunk by chunk and then joins."""
    oracle, model = pair
    prompts = [tiny.random_ids(n, seed=n) for n in (62, 5, 140)]
    run = driver(model)
    first, second, late = run.open(), run.open(), run.open()
    hidden = [[part] for part in run.step(prefill=[(first, prompts[0][:60]), (second, prompts[1][:3])])]
    hidden.append([])
    for i, chunk in enumerate((slice(0, 64), slice(64, 128))):
        extend = [(first, [prompts[0][60 + i]]), (second, [prompts[1][3 + i]])]
        for parts, part in zip(hidden, run.step(extend=extend, prefill=[(late, prompts[2][chunk])]), strict=True):
            parts.append(part)
    hidden[2] += run.step(prefill=[(late, prompts[2][128:])])
    for ids in prompts:
        ids += tiny.random_ids(6, seed=len(ids))
    for _ in range(6):
        extend = [(s, [ids[s.length]]) for s, ids in zip((first, second, late), prompts, strict=True)]
        for parts, part in zip(hidden, run.step(extend=extend), strict=True):
            parts.append(part)
    assert first.boundary == BLOCK
    for ids, parts in zip(prompts, hidden, strict=True):
        assert_logits(model, parts, tiny.hf_logits(oracle, ids))


@pytest.mark.parametrize("drafts", [1, 3])
def test_rejected_drafts_leave_no_trace(moe: Pair, drafts: int) -> None:
    """Each step carries wrong tokens after the right one; a second row of the step carries none."""
    oracle, model = moe
    ids, other_ids = tiny.random_ids(150, seed=1), tiny.random_ids(150, seed=2)
    run = driver(model, drafts=drafts)
    sequence, other = run.open(), run.open()
    hidden = run.step(prefill=[(sequence, ids[:50]), (other, other_ids[:50])])
    by_row = [[hidden[0]], [hidden[1]]]
    for position in range(50, 150):
        room = BLOCK - 1 - sequence.num_ring % BLOCK
        wrong = [(ids[position] + 1 + i) % 490 for i in range(min(drafts, room))]
        rows = [(sequence, [ids[position], *wrong]), (other, [other_ids[position]])]
        parts = run.step(extend=rows, width=1 + drafts)
        sequence.length -= len(wrong)
        by_row[0].append(parts[0][:1])
        by_row[1].append(parts[1])
    assert_logits(model, by_row[0], tiny.hf_logits(oracle, ids))
    assert_logits(model, by_row[1], tiny.hf_logits(oracle, other_ids))


def test_accepted_drafts_count_as_computed(moe: Pair) -> None:
    oracle, model = moe
    ids = tiny.random_ids(133, seed=3)
    run = driver(model, drafts=3)
    sequence = run.open()
    hidden = run.step(prefill=[(sequence, ids[:5])])
    while sequence.length < len(ids):
        count = min(4, BLOCK - sequence.num_ring % BLOCK)
        hidden += run.step(extend=[(sequence, ids[sequence.length : sequence.length + count])])
    assert_logits(model, hidden, tiny.hf_logits(oracle, ids))


def test_resume_from_snapshots(pair: Pair) -> None:
    """From one made by a cut and from one made by a fold; two rows borrow the same slot at once."""
    oracle, model = pair
    ids = tiny.random_ids(150)
    run = driver(model)
    sequence = run.open()
    run.step(prefill=[(sequence, ids[:100])])
    for token in ids[100:130]:
        run.step(extend=[(sequence, [token])])
    assert sorted(sequence.snapshots) == [64, 128]
    expected = tiny.hf_logits(oracle, ids)
    for boundary in (64, 128):
        rows = [(run.resume(sequence, boundary), ids[boundary:]) for _ in range(2)]
        for hidden in run.step(prefill=rows):
            assert_logits(model, hidden, expected[boundary:])


VARIANTS = {
    "tied": ("dense", {"tie_word_embeddings": True}),
    "no renormalised experts": ("next", {"norm_topk_prob": False}),
    "some dense layers": ("next", {"mlp_only_layers": [1], "decoder_sparse_step": 2}),
    "other layer order": ("moe", {"layer_types": ["full_attention", "linear_attention"] * 2}),
    "one KV head, many value heads": ("moe", {"num_key_value_heads": 1, "linear_num_value_heads": 8}),
    "yarn": (
        "dense",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_the_config(name: str, tmp_path: Path) -> None:
    kind, overrides = VARIANTS[name]
    oracle, model = load_pair(kind, tmp_path, **overrides)
    ids = tiny.random_ids(100)
    run = driver(model)
    sequence = run.open()
    hidden = run.step(prefill=[(sequence, ids[:90])])
    for token in ids[90:]:
        hidden += run.step(extend=[(sequence, [token])])
    assert_logits(model, hidden, tiny.hf_logits(oracle, ids))


def test_tied_head_is_one_parameter(tmp_path: Path) -> None:
    tiny.save(tiny.hf_model("dense", tie_word_embeddings=True), tmp_path)
    model = load(tmp_path)
    assert model.lm_head.weight is model.embed.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    """Every op takes the compute dtype and gives it back; the logits point the same way."""
    tiny.save(tiny.hf_model("moe"), tmp_path)
    ids, logits = tiny.random_ids(70), []
    for dtype in (torch.float32, torch.bfloat16):
        model = load(tmp_path, dtype=dtype)
        run = driver(model, dtype=dtype)
        sequence = run.open()
        hidden = run.step(prefill=[(sequence, ids[:60])])
        for token in ids[60:]:
            hidden += run.step(extend=[(sequence, [token])])
        assert {part.dtype for part in hidden} == {dtype}
        logits.append(model.logits(torch.cat(hidden)))
    assert logits[1].dtype == torch.float32
    assert torch.cosine_similarity(*logits).mean() > 0.99


def test_parts_found_as_attributes_are_the_registered_ones(tmp_path: Path) -> None:
    """After moving the model, and after taking a part away."""
    tiny.save(tiny.hf_model("dense"), tmp_path, mtp=True)
    model = load(tmp_path)
    model.to(torch.float64)
    assert model.layers[0].mixer.A_log is dict(model.named_parameters())["layers.0.mixer.A_log"]
    assert model.norm.scale.dtype == torch.float64
    model.mtp = None
    assert model.mtp is None
    assert not any(name.startswith("mtp") for name, _ in model.named_parameters())
