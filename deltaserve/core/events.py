"""What the prefix cache tells a router: which blocks can be resumed from here, in order.

A block is named by the hash that closes it, which covers the whole prefix (parent, 64 token ids, salt, model). It is
announced when a snapshot at or after it makes it worth routing to, and withdrawn when the last such snapshot goes:
exact for a continuation of a known path, an upper bound for a prompt that leaves it in between.

Numbers count up by one; a reader that misses one asks for everything anew.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks: `parent_hash` (None at the start of a prompt) closes the block before the first.

    `token_ids` are those of all the blocks, 64 each. Moves between the tiers are no events.
    """

    sequence: int
    parent_hash: bytes | None
    block_hashes: tuple[bytes, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    sequence: int
    block_hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    sequence: int


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared
