"""The loop: it learns, it goes on where it stopped, and Muon's update is what it says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from training import train
from training.feed import Batch
from training.model import Model, Settings
from training.optimizer import Optimizer, orthogonal
from training.shape import new_weights, parse_shape
from training.train import Plan, Progress, Trainer, make_trainer, parse_arguments, run_slice, save

SHAPE_TEXT = (
    "vocab=64,hidden=32,layers=4,heads=2,kv_heads=1,head_dim=16,key_heads=2,value_heads=4,key_dim=8,value_dim=12,"
    "experts=4,top_k=2,expert_width=8,shared_width=8,rotary_fraction=0.5"
)
ARGUMENTS = f"--batch-tokens 128 --longest 64 --draft-share 0.5 --warmup-steps 5 --budget 1e6 --shape {SHAPE_TEXT}"


class RepeatingFeed:
    """Two rows of a fixed sentence, the same for each index."""

    def next(self, context_of: object, index: int) -> Batch:
        row = np.random.default_rng(index % 2).integers(1, 64, 65)
        ids = np.stack([row, row]).astype(np.uint16)
        return ids, np.ones(ids.shape, np.float16), np.zeros(ids.shape, np.uint8)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    words = f"tokenizer --state {tmp_path / 'state'} --out {tmp_path / 'out'} --device cpu --chunk 16 {ARGUMENTS}"
    return words.split()


def curve(trainer: Trainer, steps: int) -> list[float]:
    run_slice(trainer, RepeatingFeed(), 1e6, print_every=1, max_steps=steps)  # type: ignore[arg-type]
    return [entry["loss"] for entry in trainer.progress.curve]


def test_a_few_sentences_are_learnt_drafts_too(arguments: list[str]) -> None:
    trainer = make_trainer(*parse_arguments([*arguments, "--lr", "0.02", "--adam-lr", "0.01"]))
    losses = curve(trainer, 40)
    assert losses[0] > 4.0 and losses[-1] < 1.0
    first, last = trainer.progress.curve[0], trainer.progress.curve[-1]
    assert all(after < before - 1.5 for before, after in zip(first["draft_loss"], last["draft_loss"], strict=True))


def test_two_slices_are_one_long_one(arguments: list[str]) -> None:
    parsed, plan = parse_arguments(arguments)
    whole = curve(make_trainer(parsed, plan), 4)
    half = make_trainer(parsed, plan)
    curve(half, 2)
    save(parsed, half)
    resumed = make_trainer(parsed, plan)
    assert resumed.progress.slices == 2
    assert curve(resumed, 2) == pytest.approx(whole, abs=2e-4)


def test_lost_optimizers_start_anew_and_warm_up(arguments: list[str], tmp_path: Path) -> None:
    parsed, plan = parse_arguments(arguments)
    trainer = make_trainer(parsed, plan)
    curve(trainer, 3)
    save(parsed, trainer)
    (tmp_path / "state" / "state.pt").unlink()
    parsed, plan = parse_arguments([*arguments, "--resume", str(tmp_path / "out")])
    resumed = make_trainer(parsed, plan)
    assert (resumed.progress.steps, resumed.progress.optimizers_from) == (3, 3)
    for name, weight in resumed.model.weights.items():
        assert torch.equal(weight, trainer.model.weights[name])


def test_a_loss_that_is_no_number_stops_training(arguments: list[str]) -> None:
    trainer = make_trainer(*parse_arguments(arguments))
    with torch.no_grad():
        trainer.model.embed[1:].fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="--lr"):
        curve(trainer, 1)


def test_contexts_grow_and_rates_fall_over_the_budget() -> None:
    plan = Plan()
    contexts = [[plan.context(index, done) for index in range(8)] for done in (0.0, 0.2, 0.5, 0.9)]
    means = [sum(row) for row in contexts]
    assert means == sorted(means) and set(contexts[0]) == {2048} and max(contexts[-1]) == 16384
    assert plan.scale(0, 0.0) < plan.scale(plan.warmup_steps, 0.0) == 1.0
    assert plan.scale(9999, 1.0) == pytest.approx(0.01) and plan.scale(9999, 0.8) < 1.0


def test_orthogonal_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for size in ((3, 24, 40), (2, 40, 24)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(size)))
        assert values.min() > 0.6 and values.max() < 1.3


def test_every_weight_has_one_optimizer_and_moves() -> None:
    shape = parse_shape(SHAPE_TEXT)
    weights = {name: w.requires_grad_() for name, w in new_weights(shape, 0).items()}
    before = {name: w.detach().clone() for name, w in weights.items()}
    optimizer = Optimizer(weights, 0.01, 0.01)
    losses = Model(shape, weights, Settings(torch.float32, 16)).losses(torch.randint(0, 64, (2, 33)), 2, 3)
    total = train.combine(losses, torch.ones(2, 33), Plan())[1]
    total.backward()
    optimizer.step(1.0)
    unmoved = [name for name, w in weights.items() if torch.equal(w, before[name])]
    assert not unmoved, unmoved
    assert Progress().curve == []
