"""A model split over ranks gives the whole model's logits. Ranks are threads here, and exchange through a list."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from deltaserve.parallel.mesh import Mesh
from tests.model import tiny
from tests.model.pairs import MAX_ERROR, driver, load


@dataclass
class Exchange:
    """What the threads of one group share."""

    size: int
    parts: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)

    def collect(self, rank: int, x: Tensor) -> list[Tensor]:
        self.parts[rank] = x.clone()
        self.barrier.wait()
        parts = [self.parts[r] for r in range(self.size)]
        self.barrier.wait()
        return parts


@dataclass(frozen=True, slots=True)
class ThreadMesh(Mesh):
    exchange: Exchange | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        assert self.exchange is not None
        return x.copy_(torch.stack(self.exchange.collect(self.rank, x)).sum(0))

    def all_gather(self, x: Tensor) -> Tensor:
        assert self.exchange is not None
        return torch.cat(self.exchange.collect(self.rank, x), dim=-1)


def run_rank(directory: Path, mesh: Mesh, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Logits and draft hidden of every position: most by prefill, then over a boundary token by token."""
    model = load(directory, mesh)
    run = driver(model, tp=mesh.size)
    sequence = run.open()
    hidden = run.step(prefill=[(sequence, ids[:60])])
    drafts = run.draft()
    for token in ids[60:]:
        hidden += run.step(extend=[(sequence, [token])])
        drafts += run.draft()
    with torch.no_grad():
        return model.logits(torch.cat(hidden)), torch.cat(drafts)


@pytest.mark.parametrize(
    ("kind", "size", "overrides"),
    [
        ("dense", 2, {}),
        ("moe", 2, {}),
        ("next", 2, {}),
        ("moe", 4, {"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
        ("dense", 2, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ],
)
def test_ranks_together_are_the_whole(kind: str, size: int, overrides: dict[str, object], tmp_path: Path) -> None:
    """4 ranks share 2 KV heads, and 2 ranks one: each holds a copy."""
    oracle = tiny.hf_model(kind, **overrides)
    tiny.save(oracle, tmp_path, mtp=True)
    ids = tiny.random_ids(70)
    exchange = Exchange(size)
    with ThreadPoolExecutor(size) as pool:
        meshes = [ThreadMesh(rank, size, None, exchange) for rank in range(size)]
        futures = [pool.submit(run_rank, tmp_path, mesh, ids) for mesh in meshes]
        results = [future.result() for future in futures]
    expected, drafts = tiny.hf_logits(oracle, ids), tiny.hf_draft_hidden(tmp_path, ids)
    for logits, draft_hidden in results:
        assert torch.equal(logits, results[0][0])
        assert (logits - expected).abs().max() <= MAX_ERROR
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
        assert (draft_hidden[1:] - drafts).abs().max() <= MAX_ERROR
