"""Trains the small model in slices that save and resume.

A slice runs for a given time and leaves, in the state folder, everything the next one needs (weights, both optimizers,
counts, loss curve), and in the out folder the float32 weights in small parts, from which `training.export` makes the
checkpoint. The schedule is over training time, summed over slices: learning rates rise over the first steps, stay, and
fall linearly over the last part; contexts are 2K at first, with more and more batches of 8K and 16K later.

    python -m training.train TOKENIZER_DIRECTORY --state STATE --out OUT --budget 1320 --slice 480

Loss = weighted cross-entropy of the next token + `draft_weight` * that of each draft depth (on part of the sequences)
+ `balance_weight` * the experts' balance of each layer.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.data import SHARES
from training.export import read_parts, write_parts
from training.feed import Batch, Feed
from training.model import Losses, Model, Settings
from training.optimizer import Optimizer
from training.progress import report
from training.score import begin, score
from training.shape import new_weights, parse_shape


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained and how. Times in seconds of training, tokens per step over all its batches."""

    budget_s: float = 1320.0
    batch_tokens: int = 131072
    batches_per_step: int = 1
    lr: float = 6e-3
    adam_lr: float = 2e-3
    warmup_steps: int = 150
    decay_from: float = 0.45
    draft_share: float = 0.125
    draft_depths: int = 4
    draft_weight: float = 0.1
    balance_weight: float = 0.003
    longest: int = 16384
    seed: int = 1

    def scale(self, step: int, done: float) -> float:
        """What the learning rates are multiplied by; `step` counts from where the optimizers were new, `done` is the
        share of the budget that has passed."""
        falling = (1.0 - done) / (1.0 - self.decay_from)
        return min((step + 1) / self.warmup_steps, 1.0, max(falling, 0.01))

    def context(self, index: int, done: float) -> int:
        """The context of batch `index`: of every eight, so many are longer than 2K."""
        longer: dict[int, int] = {7: 8192} if done > 0.1 else {}
        if done > 0.35:
            longer = {3: 8192, 7: 16384}
        if done > 0.7:
            longer = {1: 8192, 3: 16384, 5: 8192, 7: 16384}
        return min(longer.get(index % 8, 2048), self.longest)


@dataclass(slots=True)
class Progress:
    """Counts over all slices, and the curve: one entry per printed line."""

    slices: int = 0
    steps: int = 0
    optimizers_from: int = 0
    batches: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    scores: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    def __init__(self, model: Model, plan: Plan, progress: Progress) -> None:
        self.model, self.plan, self.progress = model, plan, progress
        self.optimizer = Optimizer(model.weights, plan.lr, plan.adam_lr)
        self.device = model.embed.device
        self.first_batch = progress.batches
        self.sums: list[Tensor] = []
        self.by_skill = torch.zeros(2, len(SHARES), device=self.device)

    def step(self, feed: Feed, done: float) -> None:
        """One update. Nothing waits for the GPU; figures are collected for `line`."""
        figures = []
        for _ in range(self.plan.batches_per_step):
            batch = feed.next(lambda index: self.plan.context(index, done), self.progress.batches - self.first_batch)
            figures.append(self._backward(batch))
            self.progress.batches += 1
            self.progress.tokens += batch[0].shape[0] * (batch[0].shape[1] - 1)
        norm = self.optimizer.step(self.plan.scale(self.progress.steps - self.progress.optimizers_from, done))
        self.progress.steps += 1
        self.sums.append(torch.cat((torch.stack(figures).mean(0), norm[None])))

    def line(self) -> dict[str, Any]:
        """Means since the last line; waits for the GPU."""
        main, right, balance, *rest = torch.stack(self.sums).mean(0).tolist()
        if not math.isfinite(main):
            raise FloatingPointError(f"the loss is {main} at step {self.progress.steps}; lower --lr and resume")
        right_by_skill, weight_by_skill = self.by_skill.tolist()
        self.sums.clear()
        self.by_skill.zero_()
        depths = self.plan.draft_depths
        return {
            "loss": main,
            "right": right,
            "balance": balance / (self.model.shape.layers + 1),
            "draft_loss": rest[:depths],
            "draft_right": rest[depths : 2 * depths],
            "gradient": rest[-1],
            "skills": {
                skill: right / max(weight, 1.0)
                for skill, right, weight in zip(SHARES, right_by_skill, weight_by_skill, strict=True)
            },
        }

    def _backward(self, batch: Batch) -> Tensor:
        """Adds one batch's gradients; returns its figures without waiting for them."""
        plan = self.plan
        ids, weights, skills = (to_device(x, self.device) for x in batch)
        num_drafts = max(int(ids.shape[0] * plan.draft_share), 1) if plan.draft_depths else 0
        losses = self.model.losses(ids.int(), num_drafts, plan.draft_depths)
        figures, total = combine(losses, weights.float(), plan)
        (total / plan.batches_per_step).backward()
        own = weights[:, 1:].flatten().float()
        right_and_weight = torch.stack((losses.hits.flatten() * own, own))
        self.by_skill.index_add_(1, skills[:, 1:].flatten().int(), right_and_weight)
        return figures


def combine(losses: Losses, weights_BS1: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """The figures that are printed (detached) and the loss."""
    main, right = _means(losses.main, losses.hits, weights_BS1[:, 1:])
    total = main + plan.balance_weight * losses.balance
    draft_means = []
    for depth, (loss, hits) in enumerate(zip(losses.drafts, losses.draft_hits, strict=True)):
        weights = torch.nn.functional.pad(weights_BS1[: len(loss), 2:], (0, 1))
        mean = _means(loss[:, depth:], hits[:, depth:], weights[:, depth:])
        total = total + plan.draft_weight * mean[0]
        draft_means.append(mean)
    figures = [main, right, losses.balance, *(m for m, _ in draft_means), *(r for _, r in draft_means)]
    return torch.stack([x.detach() for x in figures]), total


def _means(losses: Tensor, hits: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    total = weights.sum().clamp(min=1.0)
    return (losses * weights).sum() / total, (hits * weights).sum() / total


def to_device(x: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(x)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def run_slice(trainer: Trainer, feed: Feed, seconds: float, print_every: int, max_steps: int | None = None) -> None:
    """Trains until the slice's time, the budget or the number of steps is used up. Compiling counts as time too."""
    progress, budget = trainer.progress, trainer.plan.budget_s
    start, before, first = time.monotonic(), progress.elapsed_s, progress.steps
    tokens, printed = progress.tokens, start
    while True:
        trainer.step(feed, min(progress.elapsed_s / budget, 1.0))
        steps = progress.steps - first
        last = max_steps is not None and steps >= max_steps
        if steps % print_every == 0 or steps in (1, 2, 5) or last:
            figures = trainer.line()
            now = time.monotonic()
            figures["tokens_per_s"] = (progress.tokens - tokens) / (now - printed)
            tokens, printed = progress.tokens, now
            report(progress, figures)
        now = time.monotonic()
        progress.elapsed_s = before + now - start
        if last or now - start >= seconds or progress.elapsed_s >= budget:
            return


def save(arguments: argparse.Namespace, trainer: Trainer) -> None:
    """All that the next slice needs, and the float32 weights in parts with the record of how they came to be."""
    arguments.state.mkdir(parents=True, exist_ok=True)
    path, progress = arguments.state / "state.pt", asdict(trainer.progress)
    state = {"weights": trainer.model.weights, "optimizer": trainer.optimizer.state(), "progress": progress}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
    write_parts(trainer.model.weights, arguments.out)
    record = {"plan": asdict(trainer.plan), "shape": asdict(trainer.model.shape), "progress": progress}
    (arguments.out / "progress.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def make_trainer(arguments: argparse.Namespace, plan: Plan) -> Trainer:
    """A new trainer, or the one that the state folder or, without optimizers, the `--resume` folder holds."""
    device, path = torch.device(arguments.device), arguments.state / "state.pt"
    shape, weights, progress, optimizers = parse_shape(arguments.shape), None, Progress(), None
    if path.exists():
        state = torch.load(path, map_location="cpu", weights_only=True)
        weights, progress, optimizers = state["weights"], Progress(**state["progress"]), state["optimizer"]
    elif arguments.resume:
        weights = read_parts(arguments.resume)
        progress = Progress(**json.loads((arguments.resume / "progress.json").read_text("utf-8"))["progress"])
        progress.optimizers_from = progress.steps
    weights = weights or new_weights(shape, plan.seed)
    weights = {name: weight.detach().float().to(device).requires_grad_() for name, weight in weights.items()}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Model(shape, weights, Settings(dtype, arguments.chunk, compiled=device.type == "cuda"))
    trainer = Trainer(model, plan, progress)
    if optimizers is not None:
        trainer.optimizer.load_state(optimizers)
    progress.slices += 1
    return trainer


def parse_arguments(arguments: list[str] | None = None) -> tuple[argparse.Namespace, Plan]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path, help="folder with tokenizer.json and the chat template")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, default=None, help="an --out folder, where the state folder is lost")
    parser.add_argument("--slice", type=float, default=480.0, help="seconds of this slice")
    parser.add_argument("--steps", type=int, default=None, help="stop after so many steps")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--print-every", type=int, default=50)
    parser.add_argument("--examples", type=int, default=60, help="held-out examples of each skill at the end")
    parser.add_argument("--shares", default="", help="shares of tokens that replace the usual: tools=0.6,chat=0.1")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--shape", default="")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for name, value in asdict(Plan()).items():
        option = "--" + name.removesuffix("_s").replace("_", "-")
        parser.add_argument(option, type=type(value), default=value, dest=name)
    parsed = parser.parse_args(arguments)
    return parsed, Plan(**{name: getattr(parsed, name) for name in asdict(Plan())})


def main(arguments: list[str] | None = None) -> Trainer:
    torch.set_float32_matmul_precision("high")
    parsed, plan = parse_arguments(arguments)
    trainer = make_trainer(parsed, plan)
    tokenizer = parsed.tokenizer / "tokenizer.json"
    shares = {name: float(share) for name, share in (pair.split("=") for pair in parsed.shares.split(",") if pair)}
    feed = Feed(tokenizer, plan.seed + trainer.progress.slices, parsed.workers, plan.batch_tokens, shares)
    examples = begin(tokenizer, parsed.examples, tuple(n for n in (2048, 4096, 16384) if n <= plan.longest))
    try:
        run_slice(trainer, feed, parsed.slice, parsed.print_every, parsed.steps)
    finally:
        feed.close()
    save(parsed, trainer)
    figures = score(trainer.model, examples.result(timeout=60))
    trainer.progress.scores.append({"step": trainer.progress.steps, **figures})
    print(json.dumps(figures), flush=True)
    save(parsed, trainer)
    return trainer


if __name__ == "__main__":
    main()
