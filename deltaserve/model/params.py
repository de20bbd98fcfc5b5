"""How a parameter is laid out and how it splits over tensor-parallel ranks, declared where the parameter is made.

A parameter is a concatenation of *sections* along one dim (q, k and v of an attention projection, gate and up of an
MLP). Each section splits into equal units (heads, or single rows), so that rank r holds a contiguous run of each
section, in section order. A section with fewer units than ranks is replicated: rank r holds unit r * units // ranks
(KV heads). A parameter without a Split is whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deltaserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Section:
    """`size` entries along the split dim on the whole model, in `units` equal units that stay together."""

    size: int
    units: int

    def local_range(self, rank: int, world: int) -> tuple[int, int]:
        """[start, stop) of this section that `rank` of `world` holds."""
        unit = self.size // self.units
        if self.units % world == 0:
            per_rank = self.units // world
            return rank * per_rank * unit, (rank + 1) * per_rank * unit
        if world % self.units == 0:
            first = rank * self.units // world
            return first * unit, (first + 1) * unit
        raise ConfigError(
            f"--tensor-parallel-size {world} neither divides nor is a multiple of {self.units} "
            f"(the heads or blocks of one section of a weight); choose one that does"
        )


@dataclass(frozen=True, slots=True)
class Split:
    dim: int
    sections: tuple[Section, ...]

    def local_size(self, rank: int, world: int) -> int:
        return sum(stop - start for start, stop in (s.local_range(rank, world) for s in self.sections))

    def take(self, section: int, tensor: Tensor, rank: int, world: int) -> Tensor:
        """This rank's part of a whole section `tensor` (any dtype)."""
        start, stop = self.sections[section].local_range(rank, world)
        return tensor.narrow(self.dim, start, stop - start)

    def offset(self, section: int, rank: int, world: int) -> int:
        """Where the section begins in this rank's parameter, along `dim`."""
        ranges = (s.local_range(rank, world) for s in self.sections[:section])
        return sum(stop - start for start, stop in ranges)


class Parameter(nn.Parameter):
    """An nn.Parameter that knows its split. Made on whatever device is current (the meta device, before loading)."""

    placement: Split | None

    def __new__(
        cls, shape: tuple[int, ...], dtype: torch.dtype, split: Split | None, rank: int, world: int
    ) -> Parameter:
        local = list(shape)
        if split is not None:
            local[split.dim] = split.local_size(rank, world)
        self = super().__new__(cls, torch.empty(local, dtype=dtype), requires_grad=False)
        self.placement = split
        return self
