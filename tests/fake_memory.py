"""The blocks of a runner without tensors, on both tiers: plain numbers, and rules that no plan may break.

What is sealed (published, debug mode) is not written until it is poisoned; what is copied, sealed or proved holds
numbers that somebody has written; what is poisoned or overwritten by a restore is in nobody's use.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from deltaserve.cache.layout import PoolSizes
from deltaserve.core.plan import DUMMY_PAGE, EMPTY_SLOT, BlockOp, OpKind
from deltaserve.core.types import BLOCK

POISON = -1  # what nobody has written, or what was filled with NaN

B = TypeVar("B")


@dataclass(slots=True)
class Blocks(Generic[B]):
    """One pool on the device and its part of the host tier. Contents are compared by value."""

    device: list[B]
    make_poison: Callable[[], B]
    is_poisoned: Callable[[B], bool]
    num_host: int
    host: dict[int, tuple[B, B | None]] = field(default_factory=dict)
    seals: dict[int, B] = field(default_factory=dict)
    num_ops: dict[OpKind, int] = field(default_factory=lambda: dict.fromkeys(OpKind, 0))

    def do(self, op: BlockOp, in_use: Set[int]) -> None:
        self.num_ops[op.kind] += 1
        if op.kind is OpKind.RESTORE:
            assert op.target not in in_use, f"restored over a block in use: {op}"
            assert op.target not in self.seals, f"restored over what is published: {op}"
            self._check_device(op.target, op)
            self.device[op.target], seal = self.host.pop(op.source)
            if seal is not None:
                self.seals[op.target] = seal
            return
        self._check_device(op.source, op)
        content = self.device[op.source]
        if op.kind is OpKind.POISON:
            assert op.source not in in_use, f"poisoned while in use: {op}"
            self.device[op.source] = self.make_poison()
            self.seals.pop(op.source, None)
            return
        assert not self.is_poisoned(content), f"nobody wrote it: {op}"
        if op.kind is OpKind.SAVE:
            assert 0 < op.target <= self.num_host, f"outside the host tier: {op}"
            self.host[op.target] = (_copy(content), self.seals.get(op.source))
        elif op.kind is OpKind.SEAL:
            self.seals[op.source] = _copy(content)
        else:
            assert self.seals.get(op.source) == content, f"not what was sealed: {op}"

    def _check_device(self, block_id: int, op: BlockOp) -> None:
        assert 0 < block_id < len(self.device), f"outside the pool: {op}"


class FakeMemory:
    """A page holds BLOCK numbers, a slot one. Slot EMPTY_SLOT holds 0 and is never written."""

    def __init__(self, sizes: PoolSizes) -> None:
        host = sizes.host
        pages = [[POISON] * BLOCK for _ in range(sizes.num_pages)]
        self.pages: Blocks[list[int]] = Blocks(
            pages, lambda: [POISON] * BLOCK, lambda page: POISON in page, host.num_pages
        )
        slots = [0 if slot == EMPTY_SLOT else POISON for slot in range(sizes.num_slots)]
        self.slots: Blocks[int] = Blocks(slots, lambda: POISON, lambda slot: slot == POISON, host.num_slots)

    def do(self, op: BlockOp, pages_in_use: Set[int], slots_in_use: Set[int]) -> None:
        if op.is_slot:
            self.slots.do(op, slots_in_use)
        else:
            self.pages.do(op, pages_in_use)

    def write_kv(self, page: int, offset: int, entry: int) -> None:
        assert page != DUMMY_PAGE and page not in self.pages.seals, f"page {page} is published and written"
        self.pages.device[page][offset] = entry

    def write_state(self, slot: int, state: int) -> None:
        assert slot != EMPTY_SLOT and slot not in self.slots.seals, f"slot {slot} is published and written"
        self.slots.device[slot] = state


def _copy(content: B) -> B:
    return list(content) if isinstance(content, list) else content  # type: ignore[return-value]
