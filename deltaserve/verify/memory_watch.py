"""The least memory that was free while something ran: the host's, or the GPU's where this process uses one."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import torch

from deltaserve.engine.machine import available_memory_bytes
from deltaserve.runner.device import free_bytes

PERIOD_S = 0.1


class MemoryWatch:
    """Looks at the free memory ten times a second, from a thread, while its `with` block lasts."""

    def __init__(self) -> None:
        self.least_bytes = _available_bytes()
        self.num_looks = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(PERIOD_S):
            self.least_bytes = min(self.least_bytes, _available_bytes())
            self.num_looks += 1


def _available_bytes() -> int:
    host_bytes = available_memory_bytes()
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return host_bytes
    return min(host_bytes, free_bytes(torch.device("cuda", 0)))
