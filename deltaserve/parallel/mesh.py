"""This rank's place among the ranks, and the exchanges a model needs. A mesh of one rank exchanges nothing.

Passed to whoever needs it; there is no global mesh.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mesh:
    """`group` is None on one rank. Reductions are sums; gathers concatenate along the last dim in rank order."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place; returns x."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[..., n] on each rank -> [..., size * n] on every rank."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x to every rank, in place; returns x."""
        if self.size > 1:
            dist.broadcast(x, src=0, group=self.group)
        return x


SINGLE = Mesh()
