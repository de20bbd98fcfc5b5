"""A follower that raises in its third step. Run by broken_engine."""

from __future__ import annotations

import sys

from deltaserve.engine import follower
from tests.engine.broken_engine import BrokenRunner

if __name__ == "__main__":
    sys.modules["deltaserve.runner.build"].ModelRunner = BrokenRunner  # type: ignore[attr-defined]
    follower.main()
