"""Making room: who leaves the device, who may move to the host, and who leaves that.

On the device pages go in this order: those of no use, then those whose snapshots have left already, then those of the
snapshot of least value, which leaves first. A slot is taken from the snapshot of least value of all. Last come pages
with blocks in use behind them (a request's own page of a name that was cached already): the cache forgets that path.

With a host tier a snapshot that leaves moves there, if there is room or something of less value to drop for it, and
its pages follow when they are needed. A page finds room by dropping the host's snapshots of least value, its own among
them, in which case it is of no use any more.

Whoever asks for room has made sure that enough can be had, so that nothing is evicted in vain.
"""

from __future__ import annotations

from collections import deque

from deltaserve.cache.blocks import BlockPool
from deltaserve.cache.content import Content
from deltaserve.cache.prefix import Node, Snapshot
from deltaserve.cache.retention import VictimHeap


def free_pages(content: Content, num_pages: int) -> None:
    """Evict until `num_pages` are free; so many are free or evictable."""
    while content.pages.num_free < num_pages:
        if (node := _next_page(content)) is not None:
            _evict_page(content, node)
        elif (victim := _leaf_victim(content)) is not None:
            evict_snapshot(content, victim)
        else:
            _give_up_paths(content, num_pages)
            return


def free_slots(content: Content, num_slots: int) -> None:
    """Evict until `num_slots` are free; so many are free or evictable."""
    while content.slots.num_free < num_slots:
        victim = _slot_victim(content)
        assert victim is not None, "a slot that only the cache holds stands in no line"
        evict_snapshot(content, victim)


def evict_snapshot(content: Content, snapshot: Snapshot) -> None:
    """Off the device: to the host if that has room for it, or gone."""
    content.stats.snapshots_evicted += 1
    host_slot = _host_slot(content, snapshot)
    if host_slot is None:
        content.drop_snapshot(snapshot)
    else:
        content.stats.snapshots_saved += 1
        content.leave_slot(snapshot, host_slot)


def _evict_page(content: Content, node: Node) -> None:
    content.stats.pages_evicted += 1
    host_page = _host_page(content, node)
    if host_page is not None:
        content.stats.pages_saved += 1
        content.leave_page(node, host_page)
    elif not node.is_gone:
        content.remove(node)


def _next_page(content: Content) -> Node | None:
    node = _first_removable(content, content.dead)
    return node if node is not None else _first_removable(content, content.cold)


def _first_removable(content: Content, line: deque[Node]) -> Node | None:
    while line:
        node = line.popleft()
        node.is_queued = False
        if content.is_removable(node):
            return node
    return None


def _leaf_victim(content: Content) -> Snapshot | None:
    while (least := content.leaf_victims.least(content.page_rank)) is not None:
        snapshot, node = least[0], least[0].node
        is_free = snapshot.slot is not None and content.slots.is_evictable(snapshot.slot)
        if is_free and not node.num_on_device and node.page is not None and content.pages.is_evictable(node.page):
            return snapshot
        content.leaf_victims.discard(snapshot)
    return None


def _slot_victim(content: Content) -> Snapshot | None:
    return _first_unused(content, content.slot_victims, content.slots)


def _first_unused(content: Content, victims: VictimHeap, slots: BlockPool) -> Snapshot | None:
    """Those in use leave the line, and come back to it when they are given back."""
    while (least := victims.least(content.rank)) is not None:
        snapshot = least[0]
        if snapshot.slot is not None and slots.is_evictable(snapshot.slot):
            return snapshot
        victims.discard(snapshot)
    return None


def _give_up_paths(content: Content, num_pages: int) -> None:
    """Only blocks with others in use behind them are left: the deepest first, and what is behind them is forgotten."""
    is_evictable = content.pages.is_evictable
    nodes = [node for page, node in enumerate(content.page_nodes) if node is not None and is_evictable(page)]
    nodes.sort(key=lambda node: -node.depth)
    for node in nodes:
        if content.pages.num_free >= num_pages:
            return
        if not node.is_gone:
            content.stats.pages_evicted += 1
            content.remove(node)


# ---- the host's side


def _host_slot(content: Content, snapshot: Snapshot) -> int | None:
    """A host slot for this snapshot; None if all that is there is worth more, or is on its way back."""
    slots = content.host_slots
    if not slots.num_free:
        least = _host_victim(content)
        if least is None or content.rank(least) >= content.rank(snapshot):
            return None
        content.drop_snapshot(least)
    taken = slots.reserve(1)
    return None if taken is None else taken[0]


def _host_page(content: Content, node: Node) -> int | None:
    """A host page for this node; None if it is of no use, or no room can be made before it is."""
    while node.num_live and not content.host_pages.num_free:
        least = _host_victim(content)
        if least is None:
            return None
        content.drop_snapshot(least)
    if node.is_gone or not node.num_live:
        return None
    taken = content.host_pages.reserve(1)
    return None if taken is None else taken[0]


def _host_victim(content: Content) -> Snapshot | None:
    """The one of least value that is not on its way back to the device."""
    held_back = []
    found = None
    while (least := content.host_victims.least(content.rank)) is not None:
        snapshot, rank = least
        if snapshot.host_slot is not None and content.host_slots.num_holders(snapshot.host_slot) == 1:
            found = snapshot
            break
        content.host_victims.discard(snapshot)
        held_back.append((snapshot, rank))
    for snapshot, rank in held_back:
        content.host_victims.push(snapshot, rank)
    return found
