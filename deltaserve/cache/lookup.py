"""Looking a request up: the names of its blocks, how far its path is known, and what others are about to add to it.

Hashes are kept with the request and extended only. `promised` names the boundaries that running requests still mean to
publish: a request on such a path does better to wait than to compute the same once more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from deltaserve.cache.prefix import Node, PrefixIndex, extend_keys, root_key
from deltaserve.core.request import Request
from deltaserve.core.types import BLOCK, CacheNote


@dataclass(frozen=True, slots=True)
class Hit:
    """A resumable prefix of one request, true until the cache next loses something.

    The first `num_tokens` (a multiple of BLOCK) can be resumed; pages are known up to `num_matched`. `num_restored` of
    the tokens would have to be computed if it were not for the host tier. `awaits` > num_tokens: a running request is
    about to publish a snapshot there, on this very path; 0: nobody is.
    """

    num_tokens: int
    num_matched: int = 0
    num_restored: int = 0
    note: CacheNote = CacheNote.OFF
    awaits: int = 0


EMPTY_HIT = Hit(num_tokens=0)


class Lookup:
    """`identity` names the model (and its adapter): paths of two of them never meet."""

    def __init__(self, identity: str) -> None:
        self._identity = identity
        self._roots: dict[str, bytes] = {}
        self.promised: Counter[tuple[int, bytes]] = Counter()  # depth and name of the block

    def extend(self, request: Request, num_tokens: int) -> list[bytes]:
        """The names of the request's full blocks, at least of those in its first `num_tokens` tokens."""
        keys = request.block_hashes
        start, end = len(keys) * BLOCK, num_tokens // BLOCK * BLOCK
        if start < end:
            extend_keys(keys, self._root(request.options.cache_salt), request.known_ids(start, end))
        return keys

    def find(self, index: PrefixIndex, request: Request) -> tuple[Hit, Node]:
        """The hit and its last node, the root if it is empty.

        O(new blocks to hash + blocks behind the hit's snapshot that are known + promises).
        """
        num_known = request.num_known
        keys = self.extend(request, num_known)
        max_blocks = (num_known - 1) // BLOCK
        deepest = index.walk(keys)
        node = index.resumable(deepest, max_blocks)
        hit = Hit(
            num_tokens=node.depth * BLOCK,
            num_matched=deepest.depth * BLOCK,
            num_restored=(node.depth - _on_device(node).depth) * BLOCK,
            note=_note(node.depth, deepest.depth, max_blocks),
            awaits=self._awaits(keys, node.depth, max_blocks),
        )
        return hit, node

    def promise(self, request: Request, positions: Iterable[int]) -> None:
        self.promised.update((position // BLOCK, request.block_hashes[position // BLOCK - 1]) for position in positions)

    def end_promise(self, request: Request, position: int) -> None:
        """One promise less, kept or not."""
        block = (position // BLOCK, request.block_hashes[position // BLOCK - 1])
        self.promised[block] -= 1
        if not self.promised[block]:
            del self.promised[block]

    def _awaits(self, keys: list[bytes], num_blocks: int, max_blocks: int) -> int:
        ahead = [d for d, key in self.promised if num_blocks < d <= max_blocks and keys[d - 1] == key]
        return max(ahead, default=0) * BLOCK

    def _root(self, cache_salt: str) -> bytes:
        root = self._roots.get(cache_salt)
        if root is None:
            if len(self._roots) > 1024:  # salts may be many; the digest is quickly made again
                self._roots.clear()
            root = self._roots[cache_salt] = root_key(self._identity, "", cache_salt)
        return root


def _note(num_hit: int, num_matched: int, max_blocks: int) -> CacheNote:
    if num_hit == max_blocks:
        return CacheNote.FULL
    if num_matched > num_hit:
        return CacheNote.NO_SNAPSHOT
    return CacheNote.DIVERGED if num_matched else CacheNote.COLD


def _on_device(node: Node) -> Node:
    """The deepest node on the way to this one that can be resumed without the host; the root if there is none."""
    while node.parent is not None and (node.snapshot is None or node.snapshot.slot is None):
        node = node.parent
    return node
