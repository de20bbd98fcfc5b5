"""Which pool is short is said when it happens, once, and again only much later."""

from __future__ import annotations

from dataclasses import replace

from deltaserve.cache.stats import CacheStats
from deltaserve.engine.info import EngineStats
from deltaserve.engine.shortages import REPEAT_AFTER_S, Shortages

QUIET = EngineStats.empty()


def test_nothing_is_said_of_an_engine_that_lacks_nothing() -> None:
    assert Shortages().look(QUIET, 10.0) == []


def test_the_flag_of_the_pool_that_is_short_is_named() -> None:
    (pages,) = Shortages().look(replace(QUIET, num_preemptions=3), 10.0)
    assert "--num-pages" in pages and "(3 so far)" in pages
    (slots,) = Shortages().look(replace(QUIET, cache=CacheStats(snapshots_refused=2)), 10.0)
    assert "--num-snapshots" in slots and "(2 so far)" in slots


def test_it_is_not_repeated_before_its_time_nor_without_news() -> None:
    shortages = Shortages()
    assert len(shortages.look(replace(QUIET, num_preemptions=1), 10.0)) == 1
    assert shortages.look(replace(QUIET, num_preemptions=2), 20.0) == []
    assert shortages.look(replace(QUIET, num_preemptions=2), 20.0 + REPEAT_AFTER_S) == []
    assert len(shortages.look(replace(QUIET, num_preemptions=3), 30.0 + REPEAT_AFTER_S)) == 1


def test_it_looks_only_now_and_then() -> None:
    shortages = Shortages()
    shortages.look(QUIET, 100.0)
    assert not shortages.is_due(105.0) and shortages.is_due(110.0)
