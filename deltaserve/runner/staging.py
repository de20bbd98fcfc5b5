"""How the integers of a step reach the device: many small arrays, one copy that the host does not wait for.

On the CPU a tensor shares the memory of its array and nothing is copied. For a GPU the arrays are gathered in pinned
memory, and each tensor that is handed out is a part of one device buffer, which `send` fills: tensors may be passed on
at once, but nothing may be launched that reads them before `send`. Buffers are made anew for each `send`; torch keeps a
pinned one until its copy is done.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

_LEAST_NUMEL = 1 << 14
_ALIGN = 16  # numbers; every part begins where Triton's widest loads may


class Staging:
    """For one device. On the CPU `put` is torch.from_numpy and `send` does nothing, unless `is_direct` says no."""

    def __init__(self, device: torch.device, is_direct: bool | None = None) -> None:
        self._device = device
        self._is_direct = device.type == "cpu" if is_direct is None else is_direct
        self._host: Tensor
        self._buffer: Tensor
        self._used: int
        self._open()

    def put(self, values: Ints) -> Tensor:
        """The int64 tensor of these values on the device, of their shape."""
        if self._is_direct:
            return torch.from_numpy(values)
        if self._used + values.size > len(self._host):
            self.send()
            self._open(values.size)
        begin, end = self._used, self._used + values.size
        self._host.numpy()[begin:end] = values.reshape(-1)
        self._used = -(-end // _ALIGN) * _ALIGN
        return self._buffer[begin:end].view(values.shape)

    def send(self) -> None:
        """Copy what was put since the last time."""
        if self._used:
            used = min(self._used, len(self._host))
            self._buffer[:used].copy_(self._host[:used], non_blocking=True)
            self._open()

    def _open(self, numel: int = 0) -> None:
        """New buffers, with room for `numel` numbers at least; none where nothing is gathered."""
        numel = 0 if self._is_direct else max(numel, _LEAST_NUMEL)
        self._host = torch.empty(numel, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._buffer = torch.empty(numel, dtype=torch.int64, device=self._device)
        self._used = 0
