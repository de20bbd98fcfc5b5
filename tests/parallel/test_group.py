"""Meeting of ranks that do not all come. What two ranks exchange: tests/engine/test_client.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaserve.core.errors import EngineDeadError
from deltaserve.parallel.group import join


def test_waiting_has_an_end(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 waited 0\.1 s for the other 1 ranks"):
        join(tmp_path, 0, 2, timeout_s=0.1)


def test_waiting_ends_when_a_rank_will_not_come(tmp_path: Path) -> None:
    def check() -> None:
        raise EngineDeadError("rank 1 exited with code 1")

    with pytest.raises(EngineDeadError, match="rank 1"):
        join(tmp_path, 0, 2, timeout_s=60, check=check)
