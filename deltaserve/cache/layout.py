"""How many pages, slots and rows there are, and what they weigh.

Three pools live on a device: KV pages of 64 tokens, recurrent-state slots, and the per-row tables (rings). A row has a
live slot and a spare one, slot 0 is the empty state, and the prefix cache has slots of its own for snapshots, so that
slots can never be what stops a row. Sizes follow from one of four flags:

| given                    | pages                                                                             |
| ------------------------ | --------------------------------------------------------------------------------- |
| --num-pages              | that many                                                                         |
| --mean-sequence-tokens   | so many that --max-num-seqs sequences of that length run at once                  |
| --kv-cache-memory-bytes  | what fits into those bytes beside slots and rows                                  |
| none of them             | the same with --memory-utilization of the free bytes, but never more than         |
|                          | --max-num-seqs sequences of --max-model-len can use, or with the prefix cache on, |
|                          | which fills what they leave, CACHED_LENGTHS times that                            |

Snapshots are --num-snapshots. Without that flag they take --snapshot-memory-share of the bytes left beside rows and
their slots (of the pages' bytes, where the number of pages is given); at least MIN_SNAPSHOTS, no more than pages. The
second tier is divided in the same way.

Page 0 (where padding goes) and slot 0 come on top: counted in `PoolSizes`, never handed out. Guaranteed: one sequence
of --max-model-len fits the pages, and all pools together fit the free bytes. Pure functions of their arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deltaserve.core.config import CacheConfig, CacheSpec, SchedulerConfig
from deltaserve.core.errors import ConfigError
from deltaserve.core.types import BLOCK

SLOTS_PER_ROW = 2  # live and spare
CACHED_LENGTHS = 4
MIN_SNAPSHOTS = 8


def num_pages_for(num_tokens: int) -> int:
    """Pages that hold the KV of `num_tokens` tokens."""
    return -(-num_tokens // BLOCK)


@dataclass(frozen=True, slots=True)
class HostSizes:
    """The second tier, in pages and slots that can be used. Their ids count from 1; block 0 of each comes on top."""

    num_pages: int
    num_slots: int


NO_HOST = HostSizes(num_pages=0, num_slots=0)


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """The pools of one rank. `num_pages` and `num_slots` include the dummy page and the empty state.

    `sized_by` is the flag that decided `num_pages`; `mean_sequence_tokens` is None unless it was that one.
    """

    spec: CacheSpec
    num_pages: int
    num_slots: int
    num_rows: int
    max_model_len: int
    sized_by: str = "--num-pages"
    mean_sequence_tokens: int | None = None
    num_snapshots: int = 0  # slots beyond those of running rows
    host: HostSizes = NO_HOST

    @property
    def num_usable_pages(self) -> int:
        return self.num_pages - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of KV that requests can hold together."""
        return self.num_usable_pages * BLOCK

    @property
    def pages_bytes(self) -> int:
        return self.num_pages * self.spec.page_bytes

    @property
    def slots_bytes(self) -> int:
        return self.num_slots * self.spec.slot_bytes

    @property
    def rows_bytes(self) -> int:
        return self.num_rows * self.spec.row_bytes

    @property
    def total_bytes(self) -> int:
        return self.pages_bytes + self.slots_bytes + self.rows_bytes

    @property
    def host_bytes(self) -> int:
        """What the second tier takes of host memory."""
        if self.host == NO_HOST:
            return 0
        return (1 + self.host.num_pages) * self.spec.page_bytes + (1 + self.host.num_slots) * self.spec.slot_bytes

    def concurrency(self, sequence_tokens: int) -> float:
        """How many sequences of that length the pages hold at once, whatever the number of rows."""
        return self.num_usable_pages / num_pages_for(sequence_tokens)

    def summary(self) -> tuple[str, ...]:
        """What a start prints, one sentence a line."""
        spec = self.spec
        lines = [
            f"pages: {self.num_usable_pages:,} of {BLOCK} tokens = {self.num_tokens:,} tokens of {spec.kv_dtype} KV, "
            f"{_size(self.pages_bytes)}, set by {self.sized_by}",
            f"slots: {self.num_slots - 1:,} of {_size(spec.slot_bytes)} with {spec.state_dtype} states, "
            f"{_size(self.slots_bytes)}, {self.num_snapshots:,} of them for snapshots of the prefix cache",
            f"rows: {self.num_rows:,} with rings of {_size(spec.row_bytes)}, {_size(self.rows_bytes)}",
            self._concurrency_line(self.max_model_len, "--max-model-len"),
        ]
        if self.host != NO_HOST:
            lines.append(
                f"host tier: {self.host.num_pages:,} pages = {self.host.num_pages * BLOCK:,} tokens, and "
                f"{self.host.num_slots:,} snapshots, {_size(self.host_bytes)}, set by --host-cache-bytes"
            )
        if self.mean_sequence_tokens is not None:
            lines.append(self._concurrency_line(self.mean_sequence_tokens, "--mean-sequence-tokens"))
        return tuple(lines)

    def _concurrency_line(self, sequence_tokens: int, flag: str) -> str:
        held = self.concurrency(sequence_tokens)
        if held < self.num_rows:
            limit = f"pages are the limit ({self.sized_by})"
        else:
            limit = f"rows are the limit (--max-num-seqs {self.num_rows})"
        rounded_down = math.floor(held * 100) / 100
        return f"maximum concurrency at {flag} {sequence_tokens:,}: {rounded_down:.2f} sequences; {limit}"


def plan_pools(
    spec: CacheSpec, cache: CacheConfig, scheduler: SchedulerConfig, max_model_len: int, available_bytes: int
) -> PoolSizes:
    """The pools for one rank with `available_bytes` free beside the weights.

    Raises ConfigError, naming the flag to change, if one sequence of `max_model_len` does not fit the pages, or the
    pools do not fit the free bytes.
    """
    sizes = _size_pools(spec, cache, scheduler, max_model_len, available_bytes)
    if sizes.num_tokens < max_model_len:
        raise ConfigError(
            f"{sizes.sized_by} gives {max(sizes.num_tokens, 0):,} tokens of KV, less than one sequence of "
            f"--max-model-len {max_model_len:,}; {_remedy(sizes)}"
        )
    if sizes.total_bytes > available_bytes:
        raise ConfigError(
            f"{sizes.sized_by} with --max-num-seqs {sizes.num_rows} needs {_size(sizes.total_bytes)} for pages, slots "
            f"and rows, but {_size(available_bytes)} are free; lower one of the two"
        )
    return sizes


def fit_model_len(
    spec: CacheSpec, cache: CacheConfig, scheduler: SchedulerConfig, max_model_len: int, available_bytes: int
) -> int:
    """What `--max-model-len auto` means: `max_model_len` (the checkpoint's), or less if the pages hold less.

    Raises ConfigError if the pages hold nothing at all.
    """
    sizes = _size_pools(spec, cache, scheduler, max_model_len, available_bytes)
    if sizes.num_usable_pages < 1:
        raise ConfigError(f"{sizes.sized_by} leaves no room for a page of KV; {_remedy(sizes)}")
    return min(max_model_len, sizes.num_tokens)


def _size_pools(
    spec: CacheSpec, cache: CacheConfig, scheduler: SchedulerConfig, max_model_len: int, available_bytes: int
) -> PoolSizes:
    num_rows = scheduler.max_num_seqs
    fixed_bytes = (1 + SLOTS_PER_ROW * num_rows) * spec.slot_bytes + num_rows * spec.row_bytes
    if cache.num_pages is not None:
        sized_by, num_usable = f"--num-pages {cache.num_pages}", cache.num_pages
        num_snapshots = _num_snapshots(spec, cache, num_usable)
    elif cache.mean_sequence_tokens is not None:
        sized_by = f"--mean-sequence-tokens {cache.mean_sequence_tokens}"
        num_usable = num_rows * num_pages_for(cache.mean_sequence_tokens)
        num_snapshots = _num_snapshots(spec, cache, num_usable)
    elif cache.kv_cache_memory_bytes is not None:
        sized_by = f"--kv-cache-memory-bytes {cache.kv_cache_memory_bytes}"
        num_usable, num_snapshots = _divide(spec, cache, cache.kv_cache_memory_bytes - fixed_bytes, None)
    else:
        sized_by = f"--memory-utilization {cache.memory_utilization:g}"
        num_most = num_rows * num_pages_for(max_model_len) * (CACHED_LENGTHS if cache.enable_prefix_caching else 1)
        left_bytes = int(cache.memory_utilization * available_bytes) - fixed_bytes
        num_usable, num_snapshots = _divide(spec, cache, left_bytes, num_most)
    return PoolSizes(
        spec=spec,
        num_pages=1 + num_usable,
        num_slots=1 + SLOTS_PER_ROW * num_rows + num_snapshots,
        num_rows=num_rows,
        max_model_len=max_model_len,
        sized_by=sized_by,
        mean_sequence_tokens=cache.mean_sequence_tokens,
        num_snapshots=num_snapshots,
        host=_size_host(spec, cache),
    )


def _num_snapshots(spec: CacheSpec, cache: CacheConfig, num_pages: int) -> int:
    """Beside that many pages."""
    if not cache.enable_prefix_caching:
        return 0
    if cache.num_snapshots is not None:
        return cache.num_snapshots
    by_share = int(cache.snapshot_memory_share * num_pages * spec.page_bytes) // spec.slot_bytes
    return min(max(by_share, MIN_SNAPSHOTS), num_pages)


def _divide(spec: CacheSpec, cache: CacheConfig, left_bytes: int, num_most: int | None) -> tuple[int, int]:
    """Usable pages, `num_most` of them at most, and snapshots in `left_bytes`; no pages, or fewer, if they are few."""
    share = cache.snapshot_memory_share
    if not cache.enable_prefix_caching:
        num_snapshots = 0
    elif cache.num_snapshots is not None:
        num_snapshots = cache.num_snapshots
    else:
        num_snapshots = max(int(share * left_bytes) // spec.slot_bytes, MIN_SNAPSHOTS)
    num_pages = (left_bytes - num_snapshots * spec.slot_bytes) // spec.page_bytes - 1
    if num_most is not None:
        num_pages = min(num_pages, num_most)
    if cache.num_snapshots is None and num_snapshots:
        by_share = int(share / (1 - share) * num_pages * spec.page_bytes) // spec.slot_bytes
        num_snapshots = min(num_snapshots, max(by_share, MIN_SNAPSHOTS))
        num_snapshots = max(min(num_snapshots, num_pages), 0)
    return num_pages, num_snapshots


def _size_host(spec: CacheSpec, cache: CacheConfig) -> HostSizes:
    """Raises ConfigError if the bytes hold less than a page and a snapshot."""
    if not cache.host_cache_bytes:
        return NO_HOST
    left_bytes = cache.host_cache_bytes - spec.page_bytes - spec.slot_bytes  # block 0 of each is there and never used
    num_slots = max(int(cache.snapshot_memory_share * left_bytes) // spec.slot_bytes, 1)
    num_pages = (left_bytes - num_slots * spec.slot_bytes) // spec.page_bytes
    if num_pages < 1:
        least = 2 * (spec.page_bytes + spec.slot_bytes)
        raise ConfigError(
            f"--host-cache-bytes {cache.host_cache_bytes} holds no page beside a snapshot of {_size(spec.slot_bytes)}; "
            f"give at least {least}, or 0 for no second tier"
        )
    return HostSizes(num_pages, num_slots)


def _remedy(sizes: PoolSizes) -> str:
    """Which flags to turn, and how far where a number helps."""
    flag = sizes.sized_by.split()[0]
    raised = f"raise {flag}"
    if flag == "--num-pages":
        raised += f" to {num_pages_for(sizes.max_model_len)}"
    elif flag != "--mean-sequence-tokens":
        fixed = _size((SLOTS_PER_ROW * sizes.num_rows + 1) * sizes.spec.slot_bytes + sizes.rows_bytes)
        raised += f", or lower --max-num-seqs {sizes.num_rows} (its slots and rows take {fixed})"
        if sizes.num_snapshots:
            snapshots = _size(sizes.num_snapshots * sizes.spec.slot_bytes)
            raised += f", or --num-snapshots {sizes.num_snapshots} (they take {snapshots})"
    if sizes.num_usable_pages < 1:
        return raised
    return f"{raised}, or lower --max-model-len to {sizes.num_tokens}"


def _size(num_bytes: int) -> str:
    for unit, exponent in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << exponent:
            return f"{num_bytes / (1 << exponent):.2f} {unit}"
    return f"{num_bytes} bytes"
