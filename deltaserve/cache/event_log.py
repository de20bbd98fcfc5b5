"""What the cache has to tell a router, until somebody takes it. Bounded: if nobody does, the oldest are dropped.

A reader sees a drop as a gap in the sequence numbers. Token ids wait packed: as Python's numbers they would outlive
their request and weigh nine times as much.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import replace

from deltaserve.core.events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent

_NO_TOKENS = array("i")
MAX_BLOCKS = 1 << 15  # named by the events that are kept; 8 MiB of token ids at most


class EventLog:
    """Events in order, numbered from 0. `num_dropped` of them were never taken."""

    def __init__(self) -> None:
        self._events: deque[tuple[CacheEvent, array[int]]] = deque()  # each with its token ids
        self._num_blocks = 0
        self._next_sequence = 0
        self.num_dropped = 0

    def stored(self, parent_hash: bytes | None, block_hashes: tuple[bytes, ...], token_ids: tuple[int, ...]) -> None:
        self._append(BlocksStored(self._next_sequence, parent_hash, block_hashes, ()), array("i", token_ids))

    def removed(self, block_hashes: tuple[bytes, ...]) -> None:
        self._append(BlocksRemoved(self._next_sequence, block_hashes))

    def cleared(self) -> None:
        self._append(CacheCleared(self._next_sequence))

    def take(self) -> tuple[CacheEvent, ...]:
        events = tuple(
            replace(event, token_ids=tuple(token_ids)) if isinstance(event, BlocksStored) else event
            for event, token_ids in self._events
        )
        self._events.clear()
        self._num_blocks = 0
        return events

    def _append(self, event: CacheEvent, token_ids: array[int] = _NO_TOKENS) -> None:
        self._next_sequence += 1
        self._events.append((event, token_ids))
        self._num_blocks += _weight(event)
        while self._num_blocks > MAX_BLOCKS and len(self._events) > 1:
            self._num_blocks -= _weight(self._events.popleft()[0])
            self.num_dropped += 1


def _weight(event: CacheEvent) -> int:
    return 1 if isinstance(event, CacheCleared) else 1 + len(event.block_hashes)
