"""Moves pages and slots between device and host, and in debug mode proves that they arrive as they left.

The ops of a plan are carried out in order, on every rank, before the plan's rows. Pages and slots never share memory,
so each of the two keeps its own order; within it, neighbours that copy to neighbours become one copy. Copies go block
by block: on a CPU that is two to five times faster than gathering them into one indexed copy (LOG.md, 2026-11-30), and
a block that two ops name is then right by itself. On a GPU they are asynchronous, in the order of the stream that the
forward runs in, so host blocks may be reused at once there too.

Debug mode is the manager's: ops say what to poison, to seal and to prove. A seal is a digest of all bytes of a block;
it travels with its block through SAVE and RESTORE, and is forgotten when a block is overwritten or poisoned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from deltaserve.cache.storage import CachePools, HostPools
from deltaserve.core.errors import DeltaserveError
from deltaserve.core.plan import BlockOp, OpKind

_DIGEST_BYTES = 16


class BlockBytesError(DeltaserveError):
    """A block does not hold what was written to it. No answer of this engine can be trusted after it."""


class BlockMover:
    """One rank's. `host` is None without a second tier, and then no op may name it."""

    def __init__(self, pools: CachePools, host: HostPools | None = None) -> None:
        self._pools = pools
        self._host = host
        self._seals: dict[tuple[bool, int], bytes] = {}  # of device blocks, by (is it a slot, its id)
        self._host_seals: dict[tuple[bool, int], bytes] = {}

    def carry_out(self, ops: Sequence[BlockOp]) -> None:
        """Raises BlockBytesError where a PROVE fails."""
        for is_slot in (False, True):
            own = [op for op in ops if op.is_slot == is_slot]
            for kind, group in groupby(own, lambda op: op.kind):
                self._do(kind, is_slot, list(group))

    def _do(self, kind: OpKind, is_slot: bool, ops: list[BlockOp]) -> None:
        match kind:
            case OpKind.SAVE:
                self._copy(is_slot, ops, self._pools, self._host)
                _carry(is_slot, ops, self._seals, self._host_seals)
            case OpKind.RESTORE:
                self._copy(is_slot, ops, self._host, self._pools)
                _carry(is_slot, ops, self._host_seals, self._seals)
            case OpKind.POISON:
                self._poison(is_slot, [op.source for op in ops])
            case OpKind.SEAL:
                for op in ops:
                    self._seals[is_slot, op.source] = self._digest(is_slot, op.source)
            case OpKind.PROVE:
                for op in ops:
                    self._prove(is_slot, op.source)

    def _copy(
        self,
        is_slot: bool,
        ops: list[BlockOp],
        source: CachePools | HostPools | None,
        target: CachePools | HostPools | None,
    ) -> None:
        assert source is not None and target is not None, "there is no host tier to copy to or from"
        fields = tuple(zip(source.block_fields(is_slot), target.block_fields(is_slot), strict=True))
        for first, to, count in _runs(ops):
            for from_tensor, to_tensor in fields:
                to_tensor[to : to + count].copy_(from_tensor[first : first + count], non_blocking=True)

    def _poison(self, is_slot: bool, blocks: list[int]) -> None:
        for block in blocks:
            self._seals.pop((is_slot, block), None)
        self._pools.poison(slots=blocks if is_slot else (), pages=() if is_slot else blocks)

    def _prove(self, is_slot: bool, block: int) -> None:
        name = f"{'slot' if is_slot else 'page'} {block}"
        seal = self._seals.get((is_slot, block))
        if seal is None:
            raise BlockBytesError(f"{name} is used by a prefix hit, but nobody has sealed what it holds")
        if seal != self._digest(is_slot, block):
            raise BlockBytesError(f"bytes restored differ from bytes saved: {name} is not what was sealed")

    def _digest(self, is_slot: bool, block: int) -> bytes:
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for tensor in self._pools.block_fields(is_slot):
            digest.update(_bytes_of(tensor[block]))
        return digest.digest()


def _runs(ops: Sequence[BlockOp]) -> Iterator[tuple[int, int, int]]:
    """(first source, first target, how many) of neighbours that go to neighbours, in order."""
    first, to, count = ops[0].source, ops[0].target, 0
    for op in ops:
        if (op.source, op.target) != (first + count, to + count):
            yield first, to, count
            first, to, count = op.source, op.target, 0
        count += 1
    yield first, to, count


def _carry(
    is_slot: bool,
    ops: Sequence[BlockOp],
    sources: dict[tuple[bool, int], bytes],
    targets: dict[tuple[bool, int], bytes],
) -> None:
    """Seals follow their blocks; a block without one takes the target's away."""
    for op in ops:
        seal = sources.get((is_slot, op.source))
        if seal is None:
            targets.pop((is_slot, op.target), None)
        else:
            targets[is_slot, op.target] = seal


def _bytes_of(block: Tensor) -> memoryview:
    return block.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data
