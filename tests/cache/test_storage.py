"""Pools have the sizes that the planner counted, start as zeros, and can be poisoned block by block."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deltaserve.cache.layout import NO_HOST, HostSizes, PoolSizes
from deltaserve.cache.storage import CachePools, allocate, allocate_host
from deltaserve.core.config import CacheSpec
from deltaserve.model.inputs import CacheTensors
from tests.fakes import TINY_SPEC, make_sizes

SPECS = {
    "float32": TINY_SPEC,
    "drafts": replace(TINY_SPEC, num_draft_layers=1, num_drafts=3),
    "fp8": replace(TINY_SPEC, kv_dtype="fp8_e4m3", state_dtype="bfloat16"),
    "half": replace(TINY_SPEC, kv_dtype="bfloat16", state_dtype="float16", compute_dtype="bfloat16"),
}


def pools_of(spec: CacheSpec, num_pages: int = 6, num_rows: int = 3) -> tuple[CachePools, PoolSizes]:
    sizes = replace(make_sizes(num_pages, num_rows), spec=spec)
    return allocate(spec, sizes), sizes


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_pools_are_zero_and_weigh_what_the_planner_counted(spec: CacheSpec) -> None:
    pools, sizes = pools_of(spec)
    assert pools.pages.nbytes == sizes.pages_bytes
    assert pools.states.nbytes + pools.windows.nbytes + pools.hiddens.nbytes == sizes.slots_bytes
    rings = (pools.ring_k, pools.ring_u, pools.ring_g, pools.conv_ring, pools.last_hiddens)
    assert sum(ring.nbytes for ring in rings if ring is not None) == sizes.rows_bytes
    for field in dataclasses.fields(pools):
        tensor = getattr(pools, field.name)
        if tensor is None:
            continue
        assert not tensor.float().any(), field.name
        assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0, field.name


def test_the_model_takes_the_pools_as_they_are() -> None:
    pools, _ = pools_of(TINY_SPEC)
    caches = CacheTensors(**{field.name: getattr(pools, field.name) for field in dataclasses.fields(pools)})
    assert len(caches.gdn_layers) == TINY_SPEC.num_gdn_layers
    assert caches.attention_layers[0].shape == (7, 1, 2, 64, 8)


@pytest.mark.parametrize("num_drafts", [0, 1, 7])
def test_rows_keep_a_hidden_for_drafts_only(num_drafts: int) -> None:
    spec = replace(TINY_SPEC, num_draft_layers=bool(num_drafts), num_drafts=num_drafts)
    hiddens = pools_of(spec)[0].last_hiddens
    assert hiddens is None if num_drafts == 0 else hiddens is not None and hiddens.shape == (3, 16)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_host_blocks_are_shaped_and_weigh_as_the_devices(spec: CacheSpec) -> None:
    pools, _ = pools_of(spec)
    host = allocate_host(spec, HostSizes(num_pages=3, num_slots=4))
    assert host is not None and host.pages.nbytes == 4 * spec.page_bytes
    assert host.states.nbytes + host.windows.nbytes + host.hiddens.nbytes == 5 * spec.slot_bytes
    for field in dataclasses.fields(host):
        ours, theirs = getattr(host, field.name), getattr(pools, field.name)
        assert (ours.shape[1:], ours.dtype) == (theirs.shape[1:], theirs.dtype), field.name


def test_no_host_blocks_no_host_pools() -> None:
    assert allocate_host(TINY_SPEC, NO_HOST) is None


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_poison_fills_what_it_is_told_and_nothing_else(spec: CacheSpec) -> None:
    pools, _ = pools_of(spec)
    pools.poison(pages=(2, 5), slots=(4,), rows=(1,))
    poisoned = {"pages": {2, 5}, "states": {4}, "windows": {4}, "hiddens": {4}}
    for field in dataclasses.fields(pools):
        if getattr(pools, field.name) is None:
            continue
        blocks = getattr(pools, field.name).float().flatten(1)
        expected = poisoned.get(field.name, {1})
        assert {block for block in range(len(blocks)) if blocks[block].isnan().all()} == expected, field.name
        assert {block for block in range(len(blocks)) if not blocks[block].any()} == set(range(len(blocks))) - expected


@pytest.mark.parametrize("blocks", [{"pages": (0,)}, {"slots": (3, 0)}])
def test_the_dummy_page_and_the_empty_state_cannot_be_poisoned(blocks: dict[str, tuple[int, ...]]) -> None:
    pools, _ = pools_of(TINY_SPEC)
    with pytest.raises(AssertionError):
        pools.poison(**blocks)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_pools_take_memory_only_where_they_are_used() -> None:
    """A pool of 1 GiB, of which one page is written."""
    page_bytes = TINY_SPEC.page_bytes
    before = resident_bytes()
    pools, _ = pools_of(TINY_SPEC, num_pages=(1 << 30) // page_bytes)
    pools.pages[7] = torch.ones(())
    assert pools.pages.nbytes >= 1 << 30
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
