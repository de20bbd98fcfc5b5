"""Exclusive times of named functions: what each took itself, without what it called among the others.

Functions are replaced by timed ones for the duration of a `with` block, where their callers look them up (a module's
or a class's attribute), so that the code under measurement knows nothing of it.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stopwatch:
    """`self_s` and `calls` by label. One thread."""

    def __init__(self) -> None:
        self.self_s: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._inner_s: list[float] = []  # per call in progress: time spent in timed functions that it called

    @contextmanager
    def watching(self, places: dict[str, tuple[Any, str]]) -> Iterator[None]:
        """`places` are label: (module or class, attribute)."""
        originals = [(owner, name, getattr(owner, name)) for owner, name in places.values()]
        try:
            for label, (owner, name) in places.items():
                setattr(owner, name, self._timed(label, getattr(owner, name)))
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def _timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner_s.append(0.0)
            start_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took_s = time.perf_counter() - start_s
                self.self_s[label] += took_s - self._inner_s.pop()
                self.calls[label] += 1
                if self._inner_s:
                    self._inner_s[-1] += took_s

        return timed
