"""What is cached: blocks that the prefix index knows by name, and who may take them away.

The index holds pages and slots as one more holder in the pools, so a block in use and cached has two, and one that is
only cached can be evicted. This module publishes blocks, lends them and drops them; `cache.offload` decides what has to
go when room is needed. Moving bytes is the runner's: what it must do is queued here as block ops, in order.

What may go, and where it stands in line (`consider` puts it there whenever its state changes):

| line           | what                                                                        | why it may go      |
| -------------- | --------------------------------------------------------------------------- | ------------------ |
| `dead`         | a page that no snapshot makes resumable, no device page behind it           | it is of no use    |
| `cold`         | a page whose snapshots are all on the host, no device page behind it        | it can follow them |
| `leaf_victims` | a device snapshot that alone keeps its page, no device page behind it       | least value        |
| `slot_victims` | any device snapshot that no request borrows                                 | least value        |
| `host_victims` | any host snapshot                                                           | least value        |

Entries may be stale; whoever takes one looks again. Guaranteed: what can be evicted stands in a line or behind such a
block; pages on the device form whole paths from the start, pages on the host continue them; a warm node's page is on
the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from deltaserve.cache.blocks import BlockPool
from deltaserve.cache.boundaries import BoundaryKind, SlotVersion
from deltaserve.cache.chances import Chances
from deltaserve.cache.event_log import EventLog
from deltaserve.cache.layout import PoolSizes
from deltaserve.cache.prefix import Node, PrefixIndex, Snapshot
from deltaserve.cache.retention import Retention, Sizes, VictimHeap, describe
from deltaserve.cache.stats import CacheStats
from deltaserve.core.plan import BlockOp, OpKind
from deltaserve.core.request import Request
from deltaserve.core.types import BLOCK


class Content:
    """Both tiers. `debug` queues SEAL, PROVE and POISON ops."""

    def __init__(
        self, sizes: PoolSizes, retention: Retention, debug: bool, make_pool: Callable[[int], BlockPool]
    ) -> None:
        self.pages = make_pool(sizes.num_pages)
        self.slots = make_pool(sizes.num_slots)
        self.host_pages = BlockPool(1 + sizes.host.num_pages)
        self.host_slots = BlockPool(1 + sizes.host.num_slots)
        self.index = PrefixIndex()
        self.page_nodes: list[Node | None] = [None] * sizes.num_pages
        self.slot_snapshots: list[Snapshot | None] = [None] * sizes.num_slots
        self.versions: list[SlotVersion | None] = [None] * sizes.num_slots
        self.dead: deque[Node] = deque()
        self.cold: deque[Node] = deque()
        self.leaf_victims, self.slot_victims, self.host_victims = VictimHeap(), VictimHeap(), VictimHeap()
        self.ops: list[BlockOp] = []
        self.events = EventLog()
        self.stats = CacheStats()
        self.now = 0  # tokens looked up
        self.chances = Chances()
        self._retention = retention
        self._sizes = Sizes(sizes.spec.page_bytes, sizes.spec.slot_bytes)
        self._debug = debug

    def rank(self, snapshot: Snapshot) -> float:
        return self._retention.rank(describe(snapshot, self._sizes, self.chances), self.now)

    def page_rank(self, snapshot: Snapshot) -> float:
        """Its rank among `leaf_victims`."""
        return self._retention.rank(describe(snapshot, self._sizes, self.chances), self.now, is_for_pages=True)

    def counted(self) -> CacheStats:
        """With what there is now."""
        stats = self.stats
        stats.snapshots_now, stats.pages_now = self.slots.num_kept, self.pages.num_kept
        stats.host_pages_now = self.host_pages.num_usable - self.host_pages.num_free
        stats.host_snapshots_now = self.host_slots.num_usable - self.host_slots.num_free
        stats.events_dropped = self.events.num_dropped
        return stats

    def rank_anew(self, snapshot: Snapshot) -> None:
        """What a rank follows from has changed."""
        for victims in (self.slot_victims, self.host_victims):
            if snapshot in victims:
                victims.push(snapshot, self.rank(snapshot))
        if snapshot in self.leaf_victims:
            self.leaf_victims.push(snapshot, self.page_rank(snapshot))

    # ---- publication

    def publish_pages(self, tip: Node, keys: Sequence[bytes], pages: Sequence[int]) -> Node:
        """The blocks `keys` behind `tip` are in `pages`, which a request holds. The first page of a name stays."""
        index, node, published = self.index, tip, []
        for key, page in zip(keys, pages, strict=True):
            parent, known = node, index.nodes.get(key)
            if known is None:
                node = index.insert(parent, key, page)
            elif known.host_page is not None:
                node = known
                self.host_pages.release((known.host_page,))
                index.move_page(node, page, None)
            else:
                node = known
                continue
            self.page_nodes[page] = node
            published.append(page)
        self.pages.keep(published)
        if self._debug:
            self.ops += [BlockOp(OpKind.SEAL, False, page) for page in published]
        return node

    def publish_snapshot(self, node: Node, slot: int, kind: BoundaryKind, request: Request) -> Snapshot:
        """The state after `node` is in `slot`, which a request holds. The first slot stays."""
        snapshot = node.snapshot
        if snapshot is None:
            snapshot = Snapshot(node, kind, self.now)
            self._announce(self.index.add_snapshot(snapshot, slot), request)
        elif snapshot.host_slot is not None:
            self.host_slots.release((snapshot.host_slot,))
            self.host_victims.discard(snapshot)
            self.index.move_snapshot(snapshot, slot, None)
        else:
            return snapshot
        self._keep_slot(snapshot, slot)
        if self._debug:
            self.ops.append(BlockOp(OpKind.SEAL, True, slot))
        self.stats.snapshots_published += 1
        self.chances.published(node.key, kind)
        return snapshot

    def _keep_slot(self, snapshot: Snapshot, slot: int) -> None:
        self.slots.keep((slot,))
        self.slot_snapshots[slot] = snapshot

    def _announce(self, became_live: list[Node], request: Request) -> None:
        if became_live:
            first, last = became_live[-1], became_live[0]
            assert first.parent is not None
            self.events.stored(
                first.parent.key or None,
                tuple(node.key for node in reversed(became_live)),
                request.known_ids((first.depth - 1) * BLOCK, last.depth * BLOCK),
            )

    # ---- lending

    def pin(self, path: Sequence[Node], snapshot: Snapshot) -> None:
        """A request that is about to take this hit holds its blocks, wherever they are."""
        self.pages.share(node.page for node in path if node.page is not None)
        self.host_pages.share(node.host_page for node in path if node.host_page is not None)
        if snapshot.slot is not None:
            self.slots.share((snapshot.slot,))
        elif snapshot.host_slot is not None:
            self.host_slots.share((snapshot.host_slot,))

    def unpin(self, path: Sequence[Node], snapshot: Snapshot) -> None:
        self.host_pages.release([node.host_page for node in path if node.host_page is not None])
        if snapshot.host_slot is not None:
            self.host_slots.release((snapshot.host_slot,))
        self.give_back_pages([node.page for node in path if node.page is not None])
        if snapshot.slot is not None:
            self.give_back_slot(snapshot.slot)

    def restore_page(self, node: Node, page: int) -> None:
        """A pinned page comes back to the device, into `page`, which the request holds."""
        assert node.host_page is not None
        self.ops.append(BlockOp(OpKind.RESTORE, False, node.host_page, page))
        self.host_pages.release((node.host_page, node.host_page))
        self.index.move_page(node, page, None)
        self.pages.keep((page,))
        self.page_nodes[page] = node
        self.stats.pages_restored += 1

    def lend_slot(self, snapshot: Snapshot, *target: int) -> int:
        """The device slot of a pinned snapshot; one on the host comes back into `target`, which the request holds."""
        if snapshot.host_slot is not None:
            (slot,) = target
            self.ops.append(BlockOp(OpKind.RESTORE, True, snapshot.host_slot, slot))
            self.host_slots.release((snapshot.host_slot, snapshot.host_slot))
            self.host_victims.discard(snapshot)
            self.index.move_snapshot(snapshot, slot, None)
            self._keep_slot(snapshot, slot)
            self.versions[slot] = SlotVersion(snapshot.node.key, snapshot.node.depth * BLOCK)
            self.stats.snapshots_restored += 1
        assert snapshot.slot is not None
        return snapshot.slot

    def prove(self, path: Iterable[Node], snapshot: Snapshot) -> None:
        """In debug mode the runner compares a hit's bytes with those that were published."""
        if self._debug:
            assert snapshot.slot is not None
            self.ops += (BlockOp(OpKind.PROVE, False, node.page) for node in path if node.page is not None)
            self.ops.append(BlockOp(OpKind.PROVE, True, snapshot.slot))

    def give_back_pages(self, pages: Sequence[int]) -> None:
        self.pages.release(pages)
        for page in pages:
            node = self.page_nodes[page]
            if node is None:
                self._poison_page(page)
            elif not node.num_on_device:
                self.consider(node)

    def give_back_slot(self, slot: int) -> None:
        self.slots.release((slot,))
        snapshot = self.slot_snapshots[slot]
        if snapshot is None:
            self._poison_slot(slot)
        elif self.slots.is_evictable(slot):
            self.slot_victims.push(snapshot, self.rank(snapshot))
            self.consider(snapshot.node)

    # ---- what may go, and going

    def consider(self, node: Node) -> None:
        """Put a node in the line in which it now belongs, if any."""
        if node.page is None or node.num_on_device or not self.pages.is_evictable(node.page):
            return
        if node.num_warm == 0:
            if not node.is_queued:
                node.is_queued = True
                (self.cold if node.num_live else self.dead).append(node)
            return
        snapshot = node.snapshot
        assert snapshot is not None and snapshot.slot is not None, "warm, with no device page behind it"
        if self.slots.is_evictable(snapshot.slot) and snapshot not in self.leaf_victims:
            self.leaf_victims.push(snapshot, self.page_rank(snapshot))

    def is_removable(self, node: Node) -> bool:
        """Whether a dead or cold node is still that."""
        page = node.page
        return page is not None and not node.num_on_device and not node.num_warm and self.pages.is_evictable(page)

    def leave_page(self, node: Node, host_page: int) -> None:
        """The page has been copied to the host."""
        page = node.page
        assert page is not None and node.parent is not None
        self.ops.append(BlockOp(OpKind.SAVE, False, page, host_page))
        self.index.move_page(node, None, host_page)
        self._drop_page(page)
        self.consider(node.parent)

    def leave_slot(self, snapshot: Snapshot, host_slot: int) -> None:
        slot = snapshot.slot
        assert slot is not None
        self.ops.append(BlockOp(OpKind.SAVE, True, slot, host_slot))
        self.index.move_snapshot(snapshot, None, host_slot)
        self._drop_slot(slot)
        self._leave_lines(snapshot)
        self.host_victims.push(snapshot, self.rank(snapshot))
        self.consider(snapshot.node)

    def drop_snapshot(self, snapshot: Snapshot) -> None:
        """Gone for good; host pages that nothing makes resumable any more go with it."""
        node, slot, host_slot = snapshot.node, snapshot.slot, snapshot.host_slot
        became_dead = self.index.remove_snapshot(snapshot)
        self._leave_lines(snapshot)
        if slot is not None:
            self._drop_slot(slot)
        elif host_slot is not None:
            self.host_slots.release((host_slot,))
        self.stats.snapshots_dropped += 1
        if became_dead:
            self.events.removed(tuple(dead.key for dead in became_dead))
        self.consider(node)
        for dead in became_dead:
            if dead.host_page is not None:
                self.remove(dead)
            elif not dead.is_gone:
                self.consider(dead)

    def remove(self, node: Node) -> None:
        """A node and all behind it. Requests keep what they hold of it; it is private to them then."""
        doomed = [node]
        if node.first_child is not None:
            for parent in doomed:
                doomed += parent.children
        for each in reversed(doomed):
            if each.snapshot is not None:
                self.drop_snapshot(each.snapshot)
            if not each.is_gone:
                self._unlink(each)

    def reset(self) -> None:
        """Nothing is known any more."""
        self.events.cleared()
        for victims in (self.leaf_victims, self.slot_victims, self.host_victims):
            victims.clear()
        self.dead.clear()
        self.cold.clear()
        self.chances.forget_paths()
        nodes, self.index = self.index.nodes.values(), PrefixIndex()
        for node in nodes:
            if node.snapshot is not None:
                self._forget_slot(node.snapshot)
            if node.page is not None:
                self._drop_page(node.page)
            elif node.host_page is not None:
                self.host_pages.release((node.host_page,))
            node.depth = -1

    def _forget_slot(self, snapshot: Snapshot) -> None:
        if snapshot.slot is not None:
            self._drop_slot(snapshot.slot)
        elif snapshot.host_slot is not None:
            self.host_slots.release((snapshot.host_slot,))
        snapshot.node.snapshot = None

    def _unlink(self, node: Node) -> None:
        page, host_page, parent = node.page, node.host_page, node.parent
        assert parent is not None
        self.index.remove(node)
        if page is not None:
            self._drop_page(page)
        elif host_page is not None:
            self.host_pages.release((host_page,))
        self.stats.pages_dropped += 1
        if not parent.num_on_device:
            self.consider(parent)

    def _leave_lines(self, snapshot: Snapshot) -> None:
        for victims in (self.leaf_victims, self.slot_victims, self.host_victims):
            victims.discard(snapshot)

    def _drop_page(self, page: int) -> None:
        self.page_nodes[page] = None
        self.pages.drop(page)
        if self._debug:
            self._poison_page(page)

    def _drop_slot(self, slot: int) -> None:
        self.slot_snapshots[slot] = None
        self.slots.drop(slot)
        self._poison_slot(slot)

    def _poison_page(self, page: int) -> None:
        if self._debug and self.pages.is_free(page):
            self.ops.append(BlockOp(OpKind.POISON, False, page))

    def _poison_slot(self, slot: int) -> None:
        if self._debug and self.slots.is_free(slot):
            self.ops.append(BlockOp(OpKind.POISON, True, slot))
