"""Our model loaded from a tiny oracle's files, and how close the two must be."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from deltaserve.model.config import ModelConfig
from deltaserve.model.qwen3_5 import Qwen3_5
from deltaserve.model.weights import load_weights
from deltaserve.parallel.mesh import SINGLE, Mesh
from tests.model import tiny
from tests.model.steps import Driver, Sequence, empty_caches

MAX_ERROR = 2e-4


def load_pair(kind: str, directory: Path, **overrides: object) -> tuple[nn.Module, Qwen3_5]:
    oracle = tiny.hf_model(kind, **overrides)
    tiny.save(oracle, directory)
    return oracle, load(directory)


def load(directory: Path, mesh: Mesh = SINGLE, dtype: torch.dtype = torch.float32) -> Qwen3_5:
    config = ModelConfig.from_directory(directory)
    with torch.device("meta"):
        model = Qwen3_5(config, mesh, dtype)
    load_weights(model, config, directory, mesh)
    return model


def driver(model: Qwen3_5, *, drafts: int = 0, tp: int = 1, dtype: torch.dtype = torch.float32) -> Driver:
    return Driver(model, empty_caches(model.config, pages=40, slots=50, rows=6, tp=tp, drafts=drafts, dtype=dtype))


@torch.no_grad()
def assert_logits(model: Qwen3_5, hidden: Tensor | list[Tensor], expected: Tensor) -> None:
    logits = model.logits(torch.cat(hidden) if isinstance(hidden, list) else hidden)
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max() <= MAX_ERROR
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def prefill_in_chunks(run: Driver, sequence: Sequence, ids: list[int], chunks: tuple[int, ...]) -> list[Tensor]:
    """Hidden of each chunk."""
    hidden = []
    for chunk in chunks:
        start = sequence.length
        hidden += run.step(prefill=[(sequence, ids[start : start + chunk])], every_cut=False)
    return hidden
