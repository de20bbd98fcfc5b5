"""Recomputes all that `cache.content` keeps, from the nodes and what requests hold. For tests and debug mode."""

from __future__ import annotations

from collections.abc import Sequence

from deltaserve.cache.content import Content
from deltaserve.cache.prefix import Node, Snapshot
from deltaserve.core.types import BLOCK


def check_content(content: Content, held_pages: Sequence[int], held_slots: Sequence[int]) -> None:
    """`held_*` name each block once per request that holds it. AssertionError where the books differ."""
    content.index.check()
    nodes = list(content.index.nodes.values())
    snapshots = [node.snapshot for node in nodes if node.snapshot is not None]
    content.pages.check(held_pages, (node.page for node in nodes if node.page is not None))
    content.host_pages.check([node.host_page for node in nodes if node.host_page is not None])
    content.slots.check(held_slots, (snapshot.slot for snapshot in snapshots if snapshot.slot is not None))
    content.host_slots.check([each.host_slot for each in snapshots if each.host_slot is not None])
    _check_owners(content, nodes, snapshots)
    for node in nodes:
        _check_node(content, node)
    for snapshot in snapshots:
        _check_snapshot(content, snapshot)


def _check_owners(content: Content, nodes: Sequence[Node], snapshots: Sequence[Snapshot]) -> None:
    pages = {page: node for page, node in enumerate(content.page_nodes) if node is not None}
    assert pages == {node.page: node for node in nodes if node.page is not None}, "page_nodes"
    slots = {slot: snapshot for slot, snapshot in enumerate(content.slot_snapshots) if snapshot is not None}
    assert slots == {each.slot: each for each in snapshots if each.slot is not None}, "slot_snapshots"


def _check_node(content: Content, node: Node) -> None:
    parent = node.parent
    assert parent is not None
    if node.page is None:
        assert node.num_live and not node.num_warm, f"a host page of no use, or needed on the device: {node.depth}"
        assert not node.num_on_device, f"a device page behind a host page: {node.depth}"
        return
    if content.pages.is_evictable(node.page) and not node.num_on_device:
        if not node.num_warm:
            assert node.is_queued and (node in content.dead or node in content.cold), f"in no line: {node.depth}"
        elif node.snapshot is not None and content.slots.is_evictable(node.snapshot.slot or 0):
            assert node.snapshot in content.leaf_victims, f"in no line: {node.depth}"


def _check_snapshot(content: Content, snapshot: Snapshot) -> None:
    if snapshot.slot is not None:
        version = content.versions[snapshot.slot]
        assert version is not None, f"slot {snapshot.slot} is cached, but nobody wrote it"
        assert (version.key, version.boundary) == (snapshot.node.key, snapshot.node.depth * BLOCK), version
        if content.slots.is_evictable(snapshot.slot):
            assert snapshot in content.slot_victims, f"slot {snapshot.slot} is in no line"
        assert snapshot not in content.host_victims
    else:
        assert snapshot in content.host_victims, f"host slot {snapshot.host_slot} is in no line"
