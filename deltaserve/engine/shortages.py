"""Says which pool is short and the flag to change: when it happens, and not again for a while."""

from __future__ import annotations

from deltaserve.engine.info import EngineStats

LOOK_EVERY_S = 10.0
REPEAT_AFTER_S = 300.0


class Shortages:
    """Compares two looks at an engine's counters. Times in seconds, of any clock."""

    def __init__(self) -> None:
        self._looked_s = 0.0
        self._seen = dict.fromkeys(_counts(EngineStats.empty()), 0)
        self._said_s: dict[str, float] = {}

    def is_due(self, now_s: float) -> bool:
        return now_s - self._looked_s >= LOOK_EVERY_S

    def look(self, stats: EngineStats, now_s: float) -> list[str]:
        """Sentences for the user, about what has happened since the last look."""
        self._looked_s = now_s
        said = []
        for remedy, count in _counts(stats).items():
            if count > self._seen[remedy] and now_s - self._said_s.get(remedy, -REPEAT_AFTER_S) >= REPEAT_AFTER_S:
                self._said_s[remedy] = now_s
                said.append(f"{remedy} ({count:,} so far)")
            self._seen[remedy] = count
        return said


def _counts(stats: EngineStats) -> dict[str, int]:
    return {
        "pages are short, and requests had to give way: raise --memory-utilization, --kv-cache-memory-bytes or "
        "--num-pages, or lower --max-num-seqs": stats.num_preemptions,
        "slots are short, and snapshots were not taken: raise --num-snapshots or --snapshot-memory-share": (
            stats.cache.snapshots_refused
        ),
    }
