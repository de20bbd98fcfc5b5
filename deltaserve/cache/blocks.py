"""Which blocks of a pool are in use, and by how many holders. One instance keeps the pages, another the slots.

A block is an id in 1 .. num_blocks - 1; id 0 (the dummy page, the empty state) belongs to nobody and is never handed
out. `reserve` gives ids with one holder each, or refuses as a whole; `share` adds a holder, `release` takes one away,
and a block without holders is free.

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
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def num_usable(self) -> int:
        return len(self._num_holders) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

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
            assert self._num_holders[block_id] > 0, f"block {block_id} is free and cannot be shared"
            self._num_holders[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One holder less for each; those without holders are free, the first of them to be handed out first."""
        for block_id in reversed(block_ids):
            assert self._num_holders[block_id] > 0, f"block {block_id} is free and cannot be released"
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id] == 0:
                self._free.append(block_id)

    def check(self, held: Iterable[int]) -> None:
        """`held` names each block once per holder. Raises AssertionError if the books say anything else."""
        expected = Counter(held)
        for block_id, num_holders in enumerate(self._num_holders):
            assert num_holders == expected[block_id], (
                f"block {block_id} is held {expected[block_id]} times, the books say {num_holders}"
            )
        free = [block_id for block_id in range(1, len(self._num_holders)) if block_id not in expected]
        assert sorted(self._free) == free, f"free list {sorted(self._free)}, blocks without holders {free}"
        assert expected.keys() <= set(range(1, len(self._num_holders))), f"held blocks outside the pool: {expected}"
