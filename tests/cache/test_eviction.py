"""Who goes when room is needed, in which order, and what the second tier does with it."""

from __future__ import annotations

import pytest

from deltaserve.cache.offload import evict_snapshot
from deltaserve.cache.retention import ByValue, LeastRecentlyUsed
from deltaserve.core.plan import OpKind
from tests.cache.ledger import Ledger
from tests.cache.test_sharing import ids


def matched(ledger: Ledger, start: int, length: int = 200) -> tuple[int, int]:
    hit = ledger.manager.match(ledger.request(ids(length, start)))
    return hit.num_tokens, hit.num_matched


def test_pages_that_nothing_resumes_go_first() -> None:
    """A failed snapshot leaves its pages known and useless; a useful path of the same age stays."""
    ledger = Ledger(10, 2, 4)
    ledger.serve(ids(200))
    ledger.serve(ids(200, 1000))
    content = ledger.manager._content
    content.drop_snapshot(next(each for each in content.slot_snapshots if each is not None and each.last_use == 400))
    assert (matched(ledger, 0), matched(ledger, 1000)) == ((192, 192), (0, 192))
    ledger.serve(ids(310, 2000))
    assert (matched(ledger, 0), matched(ledger, 1000)) == ((192, 192), (0, 128))
    ledger.check()


def test_pages_of_no_use_go_before_those_that_could_follow_their_snapshot() -> None:
    ledger = Ledger(10, 1, 0, host=(16, 4), retention=LeastRecentlyUsed())
    for start in (0, 1000):
        ledger.serve(ids(200, start))
    content = ledger.manager._content
    evict_snapshot(content, next(each for each in content.slot_snapshots if each is not None and each.last_use == 200))
    content.drop_snapshot(next(each for each in content.slot_snapshots if each is not None))
    assert (matched(ledger, 0), matched(ledger, 1000)) == ((192, 192), (0, 192))
    ledger.serve(ids(380, 2000))
    assert ledger.manager.stats.pages_saved == 0
    assert (matched(ledger, 0), matched(ledger, 1000)) == ((192, 192), (0, 64))
    ledger.check()


def test_the_deepest_page_goes_first_and_the_snapshot_before_it() -> None:
    ledger = Ledger(10, 2, 4, retention=LeastRecentlyUsed())
    ledger.serve(ids(200))
    ledger.serve(ids(300, 1000))
    assert ledger.manager.num_free_pages == 3
    ledger.serve(ids(250, 2000))
    assert (matched(ledger, 0), matched(ledger, 1000, 300)) == ((0, 128), (256, 256))
    ledger.check()


def test_least_recently_used_first() -> None:
    ledger = Ledger(9, 2, 4, retention=LeastRecentlyUsed())
    for start in (0, 1000, 0, 2000):
        ledger.serve(ids(200, start))
    assert matched(ledger, 1000)[0] == 0
    assert (matched(ledger, 0)[0], matched(ledger, 2000)[0]) == (192, 192)


def test_by_value_a_long_way_to_compute_outlives_a_short_one() -> None:
    ledger = Ledger(40, 2, num_snapshots=0)  # four slots in all
    ledger.serve(ids(900))
    for start in range(1000, 1800, 100):
        ledger.serve(ids(70, start))
    assert matched(ledger, 0, 900)[0] == 896
    assert ledger.manager.stats.snapshots_evicted > 0
    ledger.check()


def test_an_older_turn_of_a_session_goes_before_the_newest_of_another() -> None:
    """Three turns whose paths diverge at once: only the session says that they belong together."""
    ledger = Ledger(64, 1, num_snapshots=4)
    for start in (0, 1000, 2000, 3000):
        ledger.serve(ids(130, start), session_id="one")
    ledger.serve(ids(130, 4000), session_id="two")
    for start in (5000, 6000):
        ledger.serve(ids(130, start))
    assert matched(ledger, 0, 130)[0] == 0
    assert matched(ledger, 4000, 130)[0] == matched(ledger, 3000, 130)[0] == 128
    ledger.check()


def test_blocks_in_use_are_never_evicted() -> None:
    ledger = Ledger(8, 3, 2)
    ledger.serve(ids(200))
    request = ledger.request(ids(200))
    ledger.open(request)
    other = ledger.request(ids(260, 1000))
    assert ledger.open(other) is None, "three pages are lent, one is the request's own: four are left, not five"
    assert ledger.manager.num_available_pages == 4
    ledger.finish(request, 2)
    assert ledger.open(other) is not None
    ledger.check()


@pytest.mark.parametrize("keep_free", [0, 2])
def test_nothing_is_evicted_in_vain(keep_free: int) -> None:
    ledger = Ledger(8, 3, 2)
    ledger.serve(ids(200))
    runs = ledger.request(ids(250, 2000))
    ledger.open(runs)
    big = ledger.request(ids(64 * (5 - keep_free) - 10, 1000))
    assert ledger.open(big, keep_free) is None
    assert ledger.manager.reserve(runs, 64 * 9) is None
    assert matched(ledger, 0) == (192, 192)
    assert ledger.open(ledger.request(ids(64 * (4 - keep_free) - 10, 1000)), keep_free) is not None
    ledger.check()


def test_a_path_with_others_own_pages_behind_it_can_be_given_up() -> None:
    """Two compute the same; the second runs on behind the first one's pages, which then only the cache holds."""
    ledger = Ledger(12, 3, 4)
    first, second = ledger.request(ids(200)), ledger.request(ids(320))
    ledger.open(first)
    ledger.open(second)
    assert ledger.plan(first, 500) and ledger.plan(second, 500)
    ledger.execute()
    ledger.commit(first, 7)
    ledger.commit(second, 7)
    ledger.release(first)
    assert ledger.manager.num_available_pages == 12 - 5
    third = ledger.request(ids(6 * 64 - 1, 1000))
    assert ledger.open(third) is not None
    ledger.check()
    assert ledger.manager.match(ledger.request(ids(320))).num_matched == 64
    ledger.finish(second, 50)
    ledger.finish(third, 1)
    ledger.check()


def test_a_spare_slot_can_always_be_had() -> None:
    """No slots beyond those of rows: snapshots live in those that rows do not use now."""
    ledger = Ledger(64, 3, num_snapshots=0)
    for start in range(0, 5000, 1000):
        ledger.serve(ids(200, start))
    assert ledger.manager.stats.snapshots_now > 1
    requests = [ledger.request(ids(300, start)) for start in (10_000, 20_000, 30_000)]
    for request in requests:
        assert ledger.open(request) is not None
    for _ in range(140):
        for request in requests:
            ledger.step(request)
    ledger.check()


def test_to_the_host_and_back() -> None:
    ledger = Ledger(8, 2, 2, host=(16, 4))
    ledger.serve(ids(300))
    for start in (1000, 2000):
        ledger.serve(ids(300, start))
    stats = ledger.manager.stats
    assert (stats.pages_saved, stats.snapshots_saved) == (5, 2), stats
    hit, request = ledger.serve(ids(300))
    assert (hit.num_tokens, hit.num_restored) == (256, 256)
    assert request.cache_record is not None and request.cache_record.num_restored == 256
    stats = ledger.manager.stats
    assert stats.snapshots_restored == 1 and stats.pages_restored >= 2
    assert stats.num_restored == 256
    ledger.check()


def test_the_order_of_ops_lets_a_freed_block_be_used_at_once() -> None:
    """What makes room for a restored path is saved before, into other blocks."""
    ledger = Ledger(5, 1, 1, host=(5, 2), debug=False)
    ledger.serve(ids(300))
    ledger.serve(ids(300, 1000))
    request = ledger.request(ids(300))
    ledger.manager.take_block_ops()
    hit = ledger.manager.match(request)
    assert (hit.num_tokens, hit.num_restored) == (256, 256)
    assert ledger.manager.open(request, hit, 300) is not None
    kinds = [op.kind for op in ledger.manager.take_block_ops()]
    assert kinds == sorted(kinds), "all SAVE before all RESTORE"
    assert {OpKind.SAVE, OpKind.RESTORE} == set(kinds)
    ledger.manager.check()


def test_a_full_host_drops_what_is_worth_least() -> None:
    ledger = Ledger(6, 1, 2, host=(64, 2), retention=LeastRecentlyUsed())
    for start in range(0, 6000, 1000):
        ledger.serve(ids(300, start))
    assert [matched(ledger, start, 300)[0] for start in range(0, 6000, 1000)] == [0, 0, 0, 256, 256, 256]
    assert ledger.manager.stats.snapshots_dropped == 3
    ledger.check()


def test_the_host_keeps_what_is_worth_more_than_the_newcomer() -> None:
    ledger = Ledger(20, 1, 0, host=(64, 1), retention=ByValue(tau_tokens=1e9))
    ledger.serve(ids(1200))
    ledger.serve(ids(1000, 20_000))
    for start in range(2000, 8000, 1000):
        ledger.serve(ids(100, start))
    assert ledger.manager.stats.host_snapshots_now == 1
    assert matched(ledger, 0, 1200)[0] == 1152
    ledger.check()


def test_too_few_host_pages_drop_the_snapshots_that_need_them() -> None:
    ledger = Ledger(6, 1, 2, host=(2, 8))
    for start in range(0, 4000, 1000):
        ledger.serve(ids(300, start))
    assert ledger.manager.stats.pages_saved > 0
    ledger.check()
    for start in range(0, 4000, 1000):
        ledger.serve(ids(300, start))
        ledger.check()


def test_a_restore_outlives_the_row_that_asked_for_it() -> None:
    """The row is dropped again before its plan is sent; the op stays, and whoever comes next finds what it says."""
    ledger = Ledger(8, 2, 2, host=(16, 4))
    for start in (0, 1000, 2000):
        ledger.serve(ids(300, start))
    request, other = ledger.request(ids(300)), ledger.request(ids(310))
    hit = ledger.open(request)
    assert hit is not None and hit.num_restored == 256
    ledger.release(request, is_preempted=True)
    hit = ledger.open(other)
    assert hit is not None and (hit.num_tokens, hit.num_restored) == (256, 0)
    ledger.finish(other, 2)
    ledger.check()
