"""An exported checkpoint is what the engine and transformers take it for, the draft head included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from deltaserve.model.sample_tokenizer import train_tokenizer, write_tokenizer
from tests.model.pairs import driver, load
from training.export import export, read_parts, stored_dtype, write_parts
from training.generate import acceptance, exact, greedy
from training.model import Model, load_checkpoint
from training.shape import new_weights, parse_shape, read_shape

SHAPE = parse_shape(
    "vocab=768,hidden=64,layers=4,heads=4,head_dim=32,key_heads=2,value_heads=4,key_dim=16,value_dim=24,"
    "experts=8,top_k=2,expert_width=16,shared_width=48"
)
MAX_ERROR = 2e-4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights far from their first values, so that a lost norm or a swapped part shows."""
    folder = tmp_path_factory.mktemp("export")
    write_tokenizer(train_tokenizer(700), folder, SHAPE.max_model_len)
    torch.manual_seed(0)
    weights = {n: w * 2 if w.dim() > 1 else w + 0.3 * torch.randn_like(w) for n, w in new_weights(SHAPE, 3).items()}
    write_parts(weights, folder / "parts")
    export(read_parts(folder / "parts"), SHAPE, folder, folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def model(directory: Path) -> Model:
    return load_checkpoint(directory)


@torch.no_grad()
def test_engine_transformers_and_training_agree(directory: Path, model: Model) -> None:
    ids = torch.randint(0, 700, (1, 192), generator=torch.Generator().manual_seed(1))
    ours = model.logits(model.hidden(ids)[0])
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert (oracle(ids).logits[0] - ours).abs().max() < MAX_ERROR
    engine = load(directory)
    run = driver(engine)
    (hidden,) = run.step(prefill=[(run.open(), ids[0].tolist())])
    assert (engine.logits(hidden) - ours).abs().max() < MAX_ERROR


@torch.no_grad()
def test_the_engines_draft_head_gives_the_first_drafts_of_training(directory: Path, model: Model) -> None:
    ids = torch.randint(0, 700, (1, 129), generator=torch.Generator().manual_seed(2))
    ours, _ = model.draft(ids[:, 1:], model.hidden(ids[:, :-1])[0], 1)[0]
    run = driver(load(directory))
    run.step(prefill=[(run.open(), ids[0].tolist())])
    (theirs,) = run.draft()
    assert (theirs[1:] - ours).abs().max() < MAX_ERROR


def test_files_hold_the_released_names_and_dtypes(directory: Path) -> None:
    stored = load_file(directory / "model.safetensors")
    assert all(weight.dtype == stored_dtype(name) for name, weight in stored.items())
    assert stored["model.layers.0.linear_attn.A_log"].dtype == torch.float32
    assert stored["mtp.layers.0.mlp.experts.gate_up_proj"].dtype == torch.bfloat16
    assert "lm_head.weight" not in stored
    assert read_shape(directory) == SHAPE
    stops = json.loads((directory / "generation_config.json").read_text("utf-8"))["eos_token_id"]
    assert stops[1] == json.loads((directory / "config.json").read_text("utf-8"))["eos_token_id"] != stops[0]


def test_weights_of_another_shape_are_refused(directory: Path) -> None:
    weights = new_weights(SHAPE, 0)
    with pytest.raises(ValueError, match="do not fit the shape"):
        export(weights, parse_shape("vocab=768,layers=4"), directory, directory / "other")


def test_greedy_answers_score_as_exact_and_count_as_accepted_where_drafts_agree(model: Model) -> None:
    prompts = [torch.randint(0, 700, (n,)).tolist() for n in (5, 70, 33)]
    answers = greedy(model, prompts, 12, stop_ids={0})
    assert exact(model, list(zip(prompts, answers, strict=True))) == 1.0
    wrong = [answer[:-1] + [(answer[-1] + 1) % 700] for answer in answers]
    assert exact(model, list(zip(prompts, wrong, strict=True))) == 0.0
    assert 1.0 <= acceptance(model, list(zip(prompts, answers, strict=True)), 3) <= 4.0
