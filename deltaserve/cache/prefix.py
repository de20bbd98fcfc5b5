"""The prefix index: which blocks of 64 tokens are known, where they are, and how far each path can be resumed.

A block is named by the hash that closes it: blake2b over the name of the block before it and its own 64 token ids. The
first block's predecessor is a digest of model, adapter and cache salt, so that paths of different ones never meet.
128 bits of a strong hash: nobody can craft two prompts with one name.

A node is one block. Its page is on the device or on the host, never on both; so is the slot of its snapshot, if it has
one. A path can be resumed up to its deepest snapshot, so a node is *live* if there is a snapshot at it or below it, and
*warm* if one of those is on the device. Both are counted by subtrees, so that a change walks up only as far as it
matters: amortised O(1) a block.

Guaranteed: with a node all its ancestors are known. The index owns no memory; `cache.content` moves blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from deltaserve.cache.boundaries import BoundaryKind
from deltaserve.core.types import BLOCK

if TYPE_CHECKING:
    from deltaserve.cache.retention import Conversation

KEY_BYTES = 16


def root_key(*names: str) -> bytes:
    """The name of the empty prefix. Lengths are part of it: ("ab", "c") and ("a", "bc") differ."""
    digest = blake2b(digest_size=KEY_BYTES, person=b"deltaserve root")
    for name in names:
        encoded = name.encode()
        digest.update(struct.pack("<q", len(encoded)))
        digest.update(encoded)
    return digest.digest()


def extend_keys(keys: list[bytes], root: bytes, token_ids: Sequence[int]) -> None:
    """Append the names of the blocks that `token_ids`, whole blocks, add to the path `keys`."""
    assert len(token_ids) % BLOCK == 0, len(token_ids)
    packed = struct.pack(f"<{len(token_ids)}i", *token_ids)
    key = keys[-1] if keys else root
    for start in range(0, len(packed), 4 * BLOCK):
        key = blake2b(key + packed[start : start + 4 * BLOCK], digest_size=KEY_BYTES).digest()
        keys.append(key)


class Snapshot:
    """The state at the end of a node: in device slot `slot` or host slot `host_slot`, one of them None.

    `num_waiting` counts preempted requests that will come back to it. `turn` is the conversation's turn that last
    wanted it, `is_old` that the conversation has gone on beyond the turns it retains. Times are those of the manager's
    clock.
    """

    __slots__ = (
        "conversation",
        "host_slot",
        "is_old",
        "kind",
        "last_use",
        "node",
        "num_uses",
        "num_waiting",
        "slot",
        "turn",
    )

    def __init__(self, node: Node, kind: BoundaryKind, now: int) -> None:
        self.node = node
        self.kind = kind
        self.last_use = now
        self.slot: int | None = None
        self.host_slot: int | None = None
        self.num_uses = 0
        self.num_waiting = 0
        self.conversation: Conversation | None = None
        self.turn = 0
        self.is_old = False

    @property
    def is_gone(self) -> bool:
        return self.node.snapshot is not self


class Node:
    """One block. `depth` counts blocks from the start, this one included; 0 is the root of all, -1 a removed node.

    `num_live` and `num_warm` count children that are so, and the node's own snapshot. `num_on_device` counts children
    whose page is on the device. `is_queued` belongs to the evictor.
    """

    __slots__ = (
        "_next",
        "_previous",
        "depth",
        "first_child",
        "host_page",
        "is_queued",
        "key",
        "num_live",
        "num_on_device",
        "num_warm",
        "page",
        "parent",
        "snapshot",
    )

    def __init__(self, key: bytes, parent: Node | None, page: int | None) -> None:
        self.key = key
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.page = page
        self.host_page: int | None = None
        self.snapshot: Snapshot | None = None
        self.num_live = 0
        self.num_warm = 0
        self.num_on_device = 0
        self.is_queued = False
        self.first_child: Node | None = None
        self._previous: Node | None = None
        self._next: Node | None = None
        if parent is not None:
            self._next = parent.first_child
            if self._next is not None:
                self._next._previous = self
            parent.first_child = self

    @property
    def is_gone(self) -> bool:
        return self.depth < 0

    @property
    def children(self) -> Iterator[Node]:
        child = self.first_child
        while child is not None:
            following = child._next
            yield child
            child = following

    def disown(self, child: Node) -> None:
        if child._previous is None:
            self.first_child = child._next
        else:
            child._previous._next = child._next
        if child._next is not None:
            child._next._previous = child._previous
        child._next = child._previous = None


class PrefixIndex:
    """All nodes, by name. `root` is above the first block of every path."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {}
        self.root = Node(b"", None, None)

    def walk(self, keys: Sequence[bytes]) -> Node:
        """The deepest known node of a path. O(log blocks): what is behind an unknown block is unknown."""
        nodes, node, first, last = self.nodes, self.root, 0, len(keys)
        while first < last:
            middle = (first + last) // 2
            found = nodes.get(keys[middle])
            if found is None:
                last = middle
            else:
                node, first = found, middle + 1
        return node

    def path(self, node: Node) -> list[Node]:
        """From the first block to `node`."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        return path

    def resumable(self, node: Node, max_blocks: int) -> Node:
        """The deepest node with a snapshot on the way to `node`, at most `max_blocks` deep; or the root."""
        while node.parent is not None and (node.snapshot is None or node.depth > max_blocks):
            node = node.parent
        return node

    def insert(self, parent: Node, key: bytes, page: int) -> Node:
        node = self.nodes[key] = Node(key, parent, page)
        parent.num_on_device += 1
        return node

    def remove(self, node: Node) -> None:
        """Of a node without children and without a snapshot; its page is somebody else's business."""
        parent = node.parent
        assert parent is not None and node.first_child is None and node.snapshot is None, node
        parent.num_on_device -= node.page is not None
        parent.disown(node)
        del self.nodes[node.key]
        node.page = node.host_page = None
        node.depth = -1

    def move_page(self, node: Node, page: int | None, host_page: int | None) -> None:
        """From one tier to the other, or to another page of the same."""
        assert node.parent is not None and (page is None) != (host_page is None), (page, host_page)
        node.parent.num_on_device += (page is not None) - (node.page is not None)
        node.page, node.host_page = page, host_page

    def add_snapshot(self, snapshot: Snapshot, slot: int) -> list[Node]:
        """On the device. Gives the nodes that became live by it, deepest first."""
        node = snapshot.node
        assert node.snapshot is None and node.parent is not None, node
        node.snapshot, snapshot.slot = snapshot, slot
        self._count_warm(node)
        became_live = []
        while node.parent is not None:
            node.num_live += 1
            if node.num_live > 1:
                break
            became_live.append(node)
            node = node.parent
        return became_live

    def move_snapshot(self, snapshot: Snapshot, slot: int | None, host_slot: int | None) -> None:
        assert (slot is None) != (host_slot is None), (slot, host_slot)
        was_warm = snapshot.slot is not None
        snapshot.slot, snapshot.host_slot = slot, host_slot
        if slot is not None and not was_warm:
            self._count_warm(snapshot.node)
        if slot is None and was_warm:
            self._uncount_warm(snapshot.node)

    def remove_snapshot(self, snapshot: Snapshot) -> list[Node]:
        """Gives the nodes that are live no more, deepest first."""
        node = snapshot.node
        if snapshot.slot is not None:
            self._uncount_warm(node)
        node.snapshot, snapshot.slot, snapshot.host_slot = None, None, None
        became_dead = []
        while node.parent is not None:
            node.num_live -= 1
            if node.num_live > 0:
                break
            became_dead.append(node)
            node = node.parent
        return became_dead

    def _count_warm(self, node: Node) -> None:
        while node.parent is not None:
            node.num_warm += 1
            if node.num_warm > 1:
                break
            node = node.parent

    def _uncount_warm(self, node: Node) -> None:
        while node.parent is not None:
            node.num_warm -= 1
            if node.num_warm > 0:
                break
            node = node.parent

    def check(self) -> None:
        """Recount everything; AssertionError where it differs."""
        below: dict[Node, list[int]] = {node: [0, 0, 0] for node in (*self.nodes.values(), self.root)}
        for key, node in sorted(self.nodes.items(), key=lambda item: -item[1].depth):
            parent, snapshot = node.parent, node.snapshot
            assert key == node.key and parent is not None and node.depth == parent.depth + 1, node.depth
            assert parent is self.root or self.nodes.get(parent.key) is parent, "a node whose parent is not known"
            assert (node.page is None) != (node.host_page is None), (node.page, node.host_page)
            live, warm, on_device = below[node]
            if snapshot is not None:
                assert snapshot.node is node and (snapshot.slot is None) != (snapshot.host_slot is None), node.depth
                live, warm = live + 1, warm + (snapshot.slot is not None)
            assert (live, warm, on_device) == (node.num_live, node.num_warm, node.num_on_device), node.depth
            below[parent][0] += live > 0
            below[parent][1] += warm > 0
            below[parent][2] += node.page is not None
            assert node in parent.children, "a node that its parent does not list"
        num_listed = sum(1 for node in below for _ in node.children)
        assert num_listed == len(self.nodes), f"{num_listed} children listed, {len(self.nodes)} nodes known"
