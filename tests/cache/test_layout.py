"""Pool sizes: the three ways of sizing, the refusals, and what a start prints."""

from __future__ import annotations

import dataclasses

import pytest

from deltaserve.cache.layout import PoolSizes, fit_model_len, num_pages_for, plan_pools
from deltaserve.core.config import CacheConfig, CacheSpec, SchedulerConfig
from deltaserve.core.errors import ConfigError

GIB = 1 << 30

# One rank of a model shaped like the published 35B: 10 attention and 30 GDN layers.
SPEC = CacheSpec(
    num_attention_layers=10,
    num_draft_layers=1,
    num_kv_heads=2,
    head_dim=256,
    num_gdn_layers=30,
    num_key_heads=16,
    num_value_heads=32,
    key_head_dim=128,
    value_head_dim=128,
    conv_width=4,
    hidden_size=2048,
    kv_dtype="bfloat16",
    state_dtype="float32",
    compute_dtype="bfloat16",
)
SCHEDULER = SchedulerConfig(max_num_seqs=16)
PAGE_BYTES = 64 * 2 * 11 * 2 * 256 * 2
SLOT_BYTES = 30 * (32 * 128 * 128 * 4 + 3 * 8192 * 2) + 2048 * 2
ROW_BYTES = 30 * (64 * (16 * 128 * 2 + 32 * 128 * 4 + 32 * 4) + 4 * 8192 * 2)


def plan(
    cache: CacheConfig, max_model_len: int = 131_072, available_bytes: int = 80 * GIB, spec: CacheSpec = SPEC
) -> PoolSizes:
    return plan_pools(spec, cache, SCHEDULER, max_model_len, available_bytes)


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_num_pages_for(num_tokens: int, num_pages: int) -> None:
    assert num_pages_for(num_tokens) == num_pages


def test_pinned_pages_hold_sixteen_long_sequences() -> None:
    sizes = plan(CacheConfig(num_pages=16 * 2048, enable_prefix_caching=False))
    assert (sizes.num_pages, sizes.num_slots, sizes.num_rows) == (16 * 2048 + 1, 33, 16)
    assert sizes.num_tokens == 16 * 131_072
    assert sizes.pages_bytes == (16 * 2048 + 1) * PAGE_BYTES
    assert sizes.slots_bytes == 33 * SLOT_BYTES
    assert sizes.rows_bytes == 16 * ROW_BYTES
    assert sizes.total_bytes == sizes.pages_bytes + sizes.slots_bytes + sizes.rows_bytes
    assert sizes.concurrency(131_072) == 16


def test_mean_sequence_tokens_times_rows() -> None:
    sizes = plan(CacheConfig(mean_sequence_tokens=10_001))
    assert sizes.num_usable_pages == 16 * 157
    assert sizes.concurrency(10_001) == 16
    assert sizes.mean_sequence_tokens == 10_001


@pytest.mark.parametrize(
    ("cache", "budget"),
    [
        (CacheConfig(kv_cache_memory_bytes=20 * GIB + 12_345), 20 * GIB + 12_345),
        (CacheConfig(memory_utilization=0.25), 20 * GIB),
    ],
)
def test_bytes_are_filled_and_not_exceeded(cache: CacheConfig, budget: int) -> None:
    sizes = plan(cache)
    assert budget - PAGE_BYTES < sizes.total_bytes <= budget


def test_free_memory_beyond_what_rows_can_use_is_left() -> None:
    sizes = plan(CacheConfig(memory_utilization=1.0, enable_prefix_caching=False), max_model_len=1_000)
    assert sizes.num_usable_pages == 16 * 16
    cached = plan(CacheConfig(memory_utilization=1.0), max_model_len=1_000)
    assert cached.num_usable_pages == 4 * 16 * 16
    assert cached.num_snapshots == 8  # a third of so few pages weighs less
    given = plan(CacheConfig(kv_cache_memory_bytes=40 * GIB), max_model_len=1_000)
    assert given.num_usable_pages > 16 * 16


@pytest.mark.parametrize(
    ("kv_dtype", "state_dtype", "kv_factor", "state_bytes"),
    [
        ("bfloat16", "float32", 2, 4),
        ("fp8_e4m3", "float32", 1, 4),
        ("bfloat16", "float16", 2, 2),
        ("float32", "bfloat16", 4, 2),
    ],
)
def test_dtypes_change_the_bytes(kv_dtype: str, state_dtype: str, kv_factor: int, state_bytes: int) -> None:
    spec = dataclasses.replace(SPEC, kv_dtype=kv_dtype, state_dtype=state_dtype)
    sizes = plan(CacheConfig(num_pages=2048, enable_prefix_caching=False), spec=spec)
    assert sizes.pages_bytes == 2049 * (PAGE_BYTES // 2) * kv_factor
    assert sizes.slots_bytes == 33 * (SLOT_BYTES - 30 * 32 * 128 * 128 * (4 - state_bytes))


def test_smaller_kv_gives_more_pages_for_the_same_bytes() -> None:
    cache = CacheConfig(kv_cache_memory_bytes=20 * GIB)
    wide, narrow = plan(cache), plan(cache, spec=dataclasses.replace(SPEC, kv_dtype="fp8_e4m3"))
    assert narrow.num_usable_pages in (2 * wide.num_pages - 1, 2 * wide.num_pages)


@pytest.mark.parametrize(
    ("cache", "flag", "remedy"),
    [
        (CacheConfig(num_pages=2047), "--num-pages 2047", "raise --num-pages to 2048"),
        (CacheConfig(mean_sequence_tokens=8_000), "--mean-sequence-tokens 8000", "raise --mean-sequence-tokens"),
        (CacheConfig(kv_cache_memory_bytes=4 * GIB), "--kv-cache-memory-bytes 4294967296", "--max-num-seqs 16"),
        (CacheConfig(memory_utilization=0.05), "--memory-utilization 0.05", "--max-num-seqs 16"),
    ],
)
def test_one_sequence_must_fit(cache: CacheConfig, flag: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(cache)
    assert str(error.value).startswith(flag)
    assert remedy in str(error.value)
    held = fit_model_len(SPEC, cache, SCHEDULER, 131_072, 80 * GIB)
    assert f"lower --max-model-len to {held}" in str(error.value)
    assert plan(cache, max_model_len=held).num_tokens >= held
    with pytest.raises(ConfigError):
        plan(cache, max_model_len=held + 1)


@pytest.mark.parametrize("cache", [CacheConfig(kv_cache_memory_bytes=GIB), CacheConfig(memory_utilization=0.01)])
def test_slots_alone_may_be_too_much(cache: CacheConfig) -> None:
    with pytest.raises(ConfigError, match="lower --max-num-seqs 16"):
        plan(cache)
    with pytest.raises(ConfigError, match="no room for a page"):
        fit_model_len(SPEC, cache, SCHEDULER, 131_072, 80 * GIB)


@pytest.mark.parametrize("cache", [CacheConfig(num_pages=10**6), CacheConfig(kv_cache_memory_bytes=81 * GIB)])
def test_pools_must_fit_the_free_bytes(cache: CacheConfig) -> None:
    with pytest.raises(ConfigError, match=r"needs .* but 80\.00 GiB are free"):
        plan(cache)


def test_auto_length_is_the_checkpoints_where_it_fits() -> None:
    assert fit_model_len(SPEC, CacheConfig(num_pages=4096), SCHEDULER, 262_144, 80 * GIB) == 262_144
    assert fit_model_len(SPEC, CacheConfig(num_pages=4095), SCHEDULER, 262_144, 80 * GIB) == 262_080


def test_summary_names_pools_concurrency_and_limit() -> None:
    cache = CacheConfig(num_pages=33_920, num_snapshots=100, host_cache_bytes=40 * GIB)
    sizes = plan_pools(SPEC, cache, SCHEDULER, 262_144, 80 * GIB)
    lines = sizes.summary()
    assert lines[0].startswith("pages: 33,920 of 64 tokens = 2,170,880 tokens of bfloat16 KV, 45.55 GiB")
    assert lines[1] == (
        "slots: 132 of 61.41 MiB with float32 states, 7.98 GiB, 100 of them for snapshots of the prefix cache"
    )
    assert lines[2].startswith("rows: 16 with rings of")
    assert lines[3] == (
        "maximum concurrency at --max-model-len 262,144: 8.28 sequences; pages are the limit (--num-pages 33920)"
    )
    assert lines[4].startswith("host tier: 22,329 pages = 1,429,056 tokens, and 166 snapshots, 40.00 GiB")
    assert len(lines) == 5


@pytest.mark.parametrize(
    ("cache", "expected"),
    [
        (CacheConfig(num_pages=4096, num_snapshots=5), 5),
        (CacheConfig(num_pages=4096, num_snapshots=0), 0),
        (CacheConfig(num_pages=4096, enable_prefix_caching=False, num_snapshots=5), 0),
        (CacheConfig(num_pages=4096), 4096 * PAGE_BYTES // 4 // SLOT_BYTES),
        (CacheConfig(num_pages=4096, snapshot_memory_share=0.0), 8),
        (CacheConfig(mean_sequence_tokens=16_384), 4096 * PAGE_BYTES // 4 // SLOT_BYTES),
        (CacheConfig(mean_sequence_tokens=4096), 8),
    ],
)
def test_snapshots_beside_a_given_number_of_pages(cache: CacheConfig, expected: int) -> None:
    sizes = plan(cache, max_model_len=4096)
    assert sizes.num_snapshots == expected
    assert sizes.num_slots == 33 + expected


def test_snapshots_are_no_more_than_pages() -> None:
    assert plan(CacheConfig(num_pages=6), max_model_len=384).num_snapshots == 6


def test_snapshots_take_their_share_of_what_rows_leave() -> None:
    sizes = plan(CacheConfig(kv_cache_memory_bytes=20 * GIB, snapshot_memory_share=0.5))
    left = 20 * GIB - 33 * SLOT_BYTES - 16 * ROW_BYTES
    assert sizes.num_snapshots == left // 2 // SLOT_BYTES
    assert 20 * GIB - PAGE_BYTES < sizes.total_bytes <= 20 * GIB
    pinned = plan(CacheConfig(kv_cache_memory_bytes=20 * GIB, num_snapshots=10))
    assert pinned.num_snapshots == 10
    assert pinned.num_usable_pages > sizes.num_usable_pages


def test_the_host_tier_stays_within_its_bytes() -> None:
    sizes = plan(CacheConfig(num_pages=4096, host_cache_bytes=3 * GIB))
    assert 3 * GIB - PAGE_BYTES < sizes.host_bytes <= 3 * GIB
    assert sizes.host.num_slots == (3 * GIB - PAGE_BYTES - SLOT_BYTES) // 4 // SLOT_BYTES
    assert plan(CacheConfig(num_pages=4096)).host_bytes == 0


def test_a_host_tier_too_small_for_anything_is_refused() -> None:
    least = 2 * (PAGE_BYTES + SLOT_BYTES)
    sizes = plan(CacheConfig(num_pages=4096, host_cache_bytes=least))
    assert (sizes.host.num_pages, sizes.host.num_slots) == (1, 1)
    with pytest.raises(ConfigError, match=f"give at least {least}"):
        plan(CacheConfig(num_pages=4096, host_cache_bytes=least - 1))


def test_summary_at_the_mean_is_limited_by_rows() -> None:
    lines = plan(CacheConfig(mean_sequence_tokens=16_384), max_model_len=65_536).summary()
    assert "at --max-model-len 65,536: 4.00 sequences; pages are the limit (--mean-sequence-tokens 16384)" in lines[3]
    assert "at --mean-sequence-tokens 16,384: 16.00 sequences; rows are the limit (--max-num-seqs 16)" in lines[4]


def test_concurrency_is_rounded_down() -> None:
    sizes = plan(CacheConfig(num_pages=15_999), max_model_len=128_000)
    assert "7.99 sequences" in sizes.summary()[3]
