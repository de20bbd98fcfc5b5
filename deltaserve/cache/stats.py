"""What the prefix cache has counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheStats:
    """Since the start, but for those that end in `now`."""

    num_looked_up: int = 0  # known tokens of requests that took a row
    num_hit: int = 0  # of those, not computed
    num_restored: int = 0  # of those, from host memory
    snapshots_published: int = 0
    snapshots_refused: int = 0  # wanted, but there was no slot
    snapshots_evicted: int = 0  # left the device, for the host or for good
    snapshots_saved: int = 0  # of those, to the host
    snapshots_restored: int = 0
    snapshots_dropped: int = 0  # gone for good, from either tier
    pages_evicted: int = 0
    pages_saved: int = 0
    pages_restored: int = 0
    pages_dropped: int = 0
    events_dropped: int = 0
    snapshots_now: int = 0  # on the device
    pages_now: int = 0  # known by name, on the device
    host_snapshots_now: int = 0
    host_pages_now: int = 0
