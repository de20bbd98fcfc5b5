"""Which blocks of a pool are in use, and by how many holders. One instance keeps the pages, another the slots.

A block is an id in 1 .. num_blocks - 1; id 0 (the dummy page, the empty state) belongs to nobody and is never handed
out. `reserve` gives ids with one holder each, or refuses as a whole; `share` adds a holder, `release` takes one away,
and a block without holders is free.

One holder is special, the prefix cache: `keep` makes it a holder of a block that somebody holds, `drop` ends that. A
block that the cache alone holds is *evictable*; how many there are is known at any time.

| who holds it            | free | evictable | left by                                  |
| ----------------------- | ---- | --------- | ---------------------------------------- |
| nobody                  | yes  |           | `reserve`                                |
| requests                |      |           | `release` of the last, or `keep`         |
| requests and the cache  |      |           | `release` of the last request, or `drop` |
| the cache alone         |      | yes       | `share` (a hit), or `drop` (eviction)    |

Free blocks are taken last in, first out. A block just freed is the one most likely still in the processor's caches,
a large pool touches no more memory than its fullest moment needed, and whoever wrongly reads a freed block soon reads
another's data, so that the mistake shows in tests. What is worth keeping is kept by a holder, never by luck.

All operations are O(ids given). `check` recomputes the books from scratch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockPool:
    """`num_blocks` counts block 0."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, num_blocks
        self._num_holders = [0] * num_blocks
        self._is_kept = bytearray(num_blocks)
        self._num_evictable = 0
        self._num_kept = 0
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_usable(self) -> int:
        return len(self._num_holders) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_evictable(self) -> int:
        return self._num_evictable

    @property
    def num_kept(self) -> int:
        """Held by the cache, alone or with requests."""
        return self._num_kept

    @property
    def num_available(self) -> int:
        """Free now, or after eviction."""
        return len(self._free) + self._num_evictable

    def is_free(self, block_id: int) -> bool:
        return self._num_holders[block_id] == 0

    def num_holders(self, block_id: int) -> int:
        return self._num_holders[block_id]

    def is_evictable(self, block_id: int) -> bool:
        return self._num_holders[block_id] == 1 and bool(self._is_kept[block_id])

    def count_evictable(self, block_ids: Iterable[int]) -> int:
        num_holders, is_kept = self._num_holders, self._is_kept
        return sum(num_holders[block_id] == 1 and is_kept[block_id] for block_id in block_ids)

    def reserve(self, num_blocks: int) -> tuple[int, ...] | None:
        """`num_blocks` free ids, now held once each; None, and nothing changed, if there are fewer."""
        if num_blocks > len(self._free):
            return None
        taken = tuple(self._free[: -num_blocks - 1 : -1])
        del self._free[len(self._free) - num_blocks :]
        for block_id in taken:
            self._num_holders[block_id] = 1
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """One more holder for each of these blocks, all of them held already."""
        for block_id in block_ids:
            num_holders = self._num_holders[block_id]
            assert num_holders > 0, f"block {block_id} is free and cannot be shared"
            if num_holders == 1 and self._is_kept[block_id]:
                self._num_evictable -= 1
            self._num_holders[block_id] = num_holders + 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One holder less for each; those without holders are free, the first of them to be handed out first."""
        for block_id in reversed(block_ids):
            num_holders = self._num_holders[block_id] - 1
            assert num_holders >= 0, f"block {block_id} is free and cannot be released"
            assert num_holders or not self._is_kept[block_id], f"block {block_id} is held by the cache alone: drop it"
            self._num_holders[block_id] = num_holders
            if num_holders == 0:
                self._free.append(block_id)
            elif num_holders == 1 and self._is_kept[block_id]:
                self._num_evictable += 1

    def keep(self, block_ids: Sequence[int]) -> None:
        """The cache holds these blocks too; requests do already."""
        for block_id in block_ids:
            assert self._num_holders[block_id] > 0, f"block {block_id} is free and cannot be kept"
            assert not self._is_kept[block_id], f"block {block_id} is kept already"
            self._is_kept[block_id] = True
            self._num_holders[block_id] += 1
        self._num_kept += len(block_ids)

    def drop(self, block_id: int) -> None:
        """The cache holds it no more; it is free if nobody else does."""
        assert self._is_kept[block_id], f"block {block_id} is not kept"
        self._is_kept[block_id] = False
        self._num_kept -= 1
        self._num_holders[block_id] -= 1
        if not self._num_holders[block_id]:
            self._num_evictable -= 1
            self._free.append(block_id)

    def check(self, held: Iterable[int], kept: Iterable[int] = ()) -> None:
        """`held` names each block once per request that holds it, `kept` once if the cache does.

        Raises AssertionError if the books say anything else.
        """
        expected, kept_ids = Counter(held), Counter(kept)
        evictable = kept_ids.keys() - expected.keys()
        expected += kept_ids
        for block_id, num_holders in enumerate(self._num_holders):
            assert num_holders == expected[block_id], (
                f"block {block_id} is held {expected[block_id]} times, the books say {num_holders}"
            )
            assert self._is_kept[block_id] == kept_ids[block_id], f"block {block_id} kept: {kept_ids[block_id]}"
        free = [block_id for block_id in range(1, len(self._num_holders)) if block_id not in expected]
        assert sorted(self._free) == free, f"free list {sorted(self._free)}, blocks without holders {free}"
        assert len(evictable) == self._num_evictable, f"evictable: {evictable}, counted {self._num_evictable}"
        assert self._num_kept == len(kept_ids), f"kept: {kept_ids}, counted {self._num_kept}"
        assert expected.keys() <= set(range(1, len(self._num_holders))), f"held blocks outside the pool: {expected}"
