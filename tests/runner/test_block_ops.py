"""Ops on pages and slots: in order, on both tiers, and with seals that travel along."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from deltaserve.cache.layout import HostSizes
from deltaserve.cache.storage import CachePools, HostPools, allocate, allocate_host
from deltaserve.core.config import CacheSpec
from deltaserve.core.plan import BlockOp, OpKind, StepPlan
from deltaserve.runner.block_ops import BlockBytesError, BlockMover
from tests.fakes import TINY_SPEC, make_sizes

NUM_BLOCKS, NUM_HOST = 9, 5
SPECS = {
    "float32": TINY_SPEC,
    "fp8": replace(TINY_SPEC, kv_dtype="fp8_e4m3", state_dtype="bfloat16"),
    "drafts": replace(TINY_SPEC, num_draft_layers=1, num_drafts=3),
}
SAVE, RESTORE, POISON, SEAL, PROVE = OpKind


CPU = torch.device("cpu")


def pools_of(spec: CacheSpec, device: torch.device = CPU) -> tuple[CachePools, HostPools]:
    sizes = replace(make_sizes(NUM_BLOCKS - 1, NUM_BLOCKS // 2), spec=spec)
    host = allocate_host(spec, HostSizes(NUM_HOST - 1, NUM_HOST - 1), is_pinned=device != CPU)
    assert host is not None
    return allocate(spec, sizes, device), host


def number(pools: CachePools, value: Callable[[int], float] = float) -> None:
    """Every block of every pool holds its own number."""
    for is_slot in (False, True):
        for tensor in pools.block_fields(is_slot):
            for block in range(len(tensor)):
                tensor[block] = torch.full((), value(block))


def held(pools: CachePools | HostPools, is_slot: bool) -> list[float]:
    """The number in each block, the same in all its fields; -1 where they differ, or differ inside."""
    found = []
    for block in range(len(pools.block_fields(is_slot)[0])):
        values = torch.cat([tensor[block].float().flatten() for tensor in pools.block_fields(is_slot)])
        found.append(float(values[0]) if bool((values == values[0]).all()) else -1.0)
    return found


def both(*ops: tuple[OpKind, int, int]) -> list[BlockOp]:
    """Each op for a page and for a slot."""
    return [BlockOp(kind, is_slot, source, target) for kind, source, target in ops for is_slot in (False, True)]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_blocks_go_to_the_host_and_back(spec: CacheSpec) -> None:
    pools, host = pools_of(spec)
    number(pools)
    mover = BlockMover(pools, host)
    mover.carry_out(both((SAVE, 3, 1), (SAVE, 4, 2), (SAVE, 8, 4)))
    for is_slot in (False, True):
        assert held(host, is_slot) == [0, 3, 4, 0, 8]
    number(pools, lambda block: 0.0)
    mover.carry_out(both((RESTORE, 4, 5), (RESTORE, 1, 6), (RESTORE, 2, 7)))
    for is_slot in (False, True):
        assert held(pools, is_slot) == [0, 0, 0, 0, 0, 8, 3, 4, 0]


def test_every_field_of_a_slot_and_the_whole_page_travel() -> None:
    pools, host = pools_of(TINY_SPEC)
    fields = {field.name for field in dataclasses.fields(HostPools)}
    for name in fields:
        torch.nn.init.normal_(getattr(pools, name))
    BlockMover(pools, host).carry_out(both((SAVE, 7, 3)))
    for name in fields:
        assert torch.equal(getattr(host, name)[3], getattr(pools, name)[7]), name


@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_is_as_if_done_one_by_one(seed: int, device: torch.device) -> None:
    """Blocks that leave, are overwritten and come back within one plan."""
    rng = random.Random(seed)
    pools, host = pools_of(TINY_SPEC, device)
    number(pools)
    ops, expected = [], {s: (list(map(float, range(NUM_BLOCKS))), [0.0] * NUM_HOST) for s in (False, True)}
    for _ in range(60):
        kind, is_slot = rng.choice((SAVE, RESTORE)), rng.random() < 0.5
        on_device, on_host = rng.randrange(1, NUM_BLOCKS), rng.randrange(NUM_HOST)
        device_blocks, host_blocks = expected[is_slot]
        if kind is SAVE:
            ops.append(BlockOp(SAVE, is_slot, on_device, on_host))
            host_blocks[on_host] = device_blocks[on_device]
        else:
            ops.append(BlockOp(RESTORE, is_slot, on_host, on_device))
            device_blocks[on_device] = host_blocks[on_host]
    BlockMover(pools, host).carry_out(ops)
    if device != CPU:
        torch.cuda.synchronize()
    for is_slot in (False, True):
        assert (held(pools, is_slot), held(host, is_slot)) == expected[is_slot]


@pytest.mark.parametrize("is_slot", [False, True])
def test_poison_fills_what_is_named(is_slot: bool) -> None:
    pools, host = pools_of(TINY_SPEC)
    BlockMover(pools, host).carry_out([BlockOp(POISON, is_slot, 2), BlockOp(POISON, is_slot, 5)])
    for kind in (False, True):
        poisoned = {2, 5} if kind is is_slot else set()
        for tensor in pools.block_fields(kind):
            assert {block for block in range(len(tensor)) if tensor[block].isnan().all()} == poisoned


def moved() -> tuple[CachePools, HostPools, BlockMover]:
    """Block 3 of both kinds was sealed, saved to host block 1, poisoned, and restored as block 6."""
    pools, host = pools_of(TINY_SPEC)
    number(pools)
    mover = BlockMover(pools, host)
    mover.carry_out(both((SEAL, 3, 0), (SAVE, 3, 1), (POISON, 3, 0), (RESTORE, 1, 6)))
    return pools, host, mover


def test_a_seal_travels_with_its_block() -> None:
    _, _, mover = moved()
    mover.carry_out(both((PROVE, 6, 0)))


@pytest.mark.parametrize("name", ["pages", "states", "windows", "hiddens"])
def test_one_changed_number_anywhere_breaks_the_proof(name: str) -> None:
    pools, _, mover = moved()
    getattr(pools, name)[6].view(-1)[-1] += 1e-3
    kind = "page 6" if name == "pages" else "slot 6"
    with pytest.raises(BlockBytesError, match=f"bytes restored differ from bytes saved: {kind}"):
        mover.carry_out(both((PROVE, 6, 0)))


def test_bytes_that_change_on_the_host_are_found_too() -> None:
    pools, host, mover = moved()
    host.hiddens[1, 0] += 1
    mover.carry_out(both((RESTORE, 1, 7)))
    mover.carry_out([BlockOp(PROVE, is_slot=False, source=7)])
    with pytest.raises(BlockBytesError, match="slot 7"):
        mover.carry_out([BlockOp(PROVE, is_slot=True, source=7)])


@pytest.mark.parametrize("before", [(), ((SEAL, 2, 0), (POISON, 2, 0)), ((SEAL, 2, 0), (SAVE, 5, 1), (RESTORE, 1, 2))])
def test_what_nobody_sealed_proves_nothing(before: tuple[tuple[OpKind, int, int], ...]) -> None:
    """Never sealed; sealed and then freed; sealed and then overwritten by a block without a seal."""
    pools, host = pools_of(TINY_SPEC)
    mover = BlockMover(pools, host)
    mover.carry_out(both(*before))
    with pytest.raises(BlockBytesError, match="page 2 is used by a prefix hit, but nobody has sealed"):
        mover.carry_out(both((PROVE, 2, 0)))


def test_without_a_host_tier_nothing_can_be_saved() -> None:
    pools, _ = pools_of(TINY_SPEC)
    with pytest.raises(AssertionError, match="no host tier"):
        BlockMover(pools).carry_out(both((SAVE, 1, 1)))


def test_ops_reach_the_other_ranks() -> None:
    ops = tuple(both((SEAL, 3, 0), (SAVE, 3, 1), (POISON, 3, 0), (RESTORE, 1, 6), (PROVE, 6, 0)))
    assert StepPlan.decode(StepPlan(5, (), block_ops=ops).encode()).block_ops == ops


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_seals_hold_on_a_gpu_with_pinned_memory(spec: CacheSpec) -> None:
    pools, host = pools_of(spec, torch.device("cuda"))
    assert host.pages.is_pinned()
    number(pools)
    mover = BlockMover(pools, host)
    mover.carry_out(both((SEAL, 3, 0), (SAVE, 3, 1), (RESTORE, 1, 6), (SAVE, 6, 2), (RESTORE, 2, 7), (PROVE, 7, 0)))
    mover.carry_out(both((POISON, 6, 0)))
    pools.hiddens[7, 0] += 1
    with pytest.raises(BlockBytesError, match="slot 7"):
        mover.carry_out(both((PROVE, 7, 0)))
