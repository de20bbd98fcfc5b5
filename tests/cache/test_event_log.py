"""Events are numbered, come in order, and do not pile up."""

from __future__ import annotations

from deltaserve.cache.event_log import MAX_BLOCKS, EventLog
from deltaserve.core.events import BlocksRemoved, BlocksStored, CacheCleared


def test_in_order_and_once() -> None:
    log = EventLog()
    log.stored(None, (b"a",), tuple(range(64)))
    log.removed((b"a",))
    log.cleared()
    assert log.take() == (BlocksStored(0, None, (b"a",), tuple(range(64))), BlocksRemoved(1, (b"a",)), CacheCleared(2))
    assert log.take() == ()
    log.cleared()
    assert log.take() == (CacheCleared(3),)


def test_a_reader_who_does_not_come_sees_a_gap() -> None:
    log = EventLog()
    for _ in range(MAX_BLOCKS):
        log.removed((b"a",))
    events = log.take()
    assert len(events) == MAX_BLOCKS // 2
    assert events[-1].sequence == MAX_BLOCKS - 1
    assert log.num_dropped == events[0].sequence == MAX_BLOCKS // 2


def test_one_event_is_kept_however_large() -> None:
    log = EventLog()
    log.removed((b"a",) * (MAX_BLOCKS + 1))
    assert len(log.take()) == 1
