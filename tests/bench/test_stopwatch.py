"""Times are exclusive and the watched code is left as it was."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from deltaserve.bench.stopwatch import Stopwatch


def test_time_belongs_to_the_innermost_function() -> None:
    parts = SimpleNamespace(inner=lambda: time.sleep(0.05))
    parts.outer = lambda: (time.sleep(0.02), parts.inner(), parts.inner())
    stopwatch = Stopwatch()
    with stopwatch.watching({"inner": (parts, "inner"), "outer": (parts, "outer")}):
        parts.outer()
    assert stopwatch.calls == {"inner": 2, "outer": 1}
    assert stopwatch.self_s["inner"] >= 0.1
    assert 0.02 <= stopwatch.self_s["outer"] < 0.1


def test_functions_are_put_back_after_an_error() -> None:
    def fails() -> None:
        raise ValueError("no")

    parts = SimpleNamespace(work=fails)
    stopwatch = Stopwatch()
    with pytest.raises(ValueError, match="no"), stopwatch.watching({"work": (parts, "work")}):
        parts.work()
    assert parts.work is fails
    assert stopwatch.calls["work"] == 1
