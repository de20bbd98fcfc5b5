"""Scores during training: held-out examples by the training model itself, quickly and without the engine.

Examples are made in a process of their own while training runs. Figures that are published come from
`training.evaluate`, which uses the engine.
"""

from __future__ import annotations

from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from training.cases import NEEDLE, SKILLS, heldout_examples
from training.export import stored_dtype
from training.generate import Example, acceptance, exact, greedy
from training.model import Model, Settings

CHATS = ("facts", "chat", "mixed", "tool_call")
MAX_ANSWER = 96
NUM_DRAFTS = 3

Examples = dict[str, list[Example]]


def begin(tokenizer: Path, count: int, lengths: tuple[int, ...]) -> Future[Examples]:
    """Makes the examples beside training."""
    pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    made = pool.submit(make_examples, tokenizer, count, lengths)
    pool.shutdown(wait=False)
    return made


def make_examples(tokenizer: Path, count: int, lengths: tuple[int, ...]) -> Examples:
    examples = {skill: heldout_examples(tokenizer, skill, count) for skill in SKILLS}
    return examples | {
        f"{NEEDLE} {length}": heldout_examples(tokenizer, NEEDLE, min(count, 21), context=length) for length in lengths
    }


def score(model: Model, examples: Examples) -> dict[str, float]:
    """Share of exact answers by skill, and the mean acceptance length; with the weights as they would be exported."""
    weights = {name: w.detach().to(stored_dtype(name)).float() for name, w in model.weights.items()}
    model = Model(model.shape, weights, Settings(model.settings.dtype, model.settings.chunk))
    found = {skill: exact(model, pairs) for skill, pairs in examples.items()}
    chats = [prompt for skill in CHATS for prompt, _ in examples[skill][:32]]
    stop = {answer[-1] for skill in CHATS for _, answer in examples[skill]}
    answers = greedy(model, chats, MAX_ANSWER, stop)
    found["acceptance"] = acceptance(model, list(zip(chats, answers, strict=True)), NUM_DRAFTS)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {name: round(value, 3) for name, value in found.items()}
