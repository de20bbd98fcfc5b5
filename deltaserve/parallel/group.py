"""Joins the ranks of one host into a gloo group, and moves arrays of any length from rank 0 to the others.

The ranks find each other through a file in a directory that only their user can read, and talk over the loopback
device on ports the system picks: nothing is reachable from outside, and any number of groups fit on one host.

A rank that waits in an exchange does not spin, waits for as long as it takes, and fails at once when the process at
the other end is gone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from deltaserve.parallel.mesh import Mesh

_FOREVER = timedelta(days=365)
_POLL_S = 0.02
_INLINE = 1022  # numbers that travel with the length, so that a decode step needs one message


def join(directory: Path, rank: int, size: int, timeout_s: float, check: Callable[[], None] = lambda: None) -> Mesh:
    """Meet the other ranks through `directory`; RuntimeError if they are not all there after `timeout_s`.

    `check` is called while waiting and may raise, when it knows that a rank will not come.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    marks = [directory / f"rank-{other}" for other in range(size)]
    marks[rank].touch()
    deadline_s = time.monotonic() + timeout_s
    while not all(mark.exists() for mark in marks):
        check()
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"rank {rank} waited {timeout_s:g} s for the other {size - 1} ranks")
        time.sleep(_POLL_S)
    meeting = f"file://{directory / 'ranks'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=_FOREVER)
    return Mesh(rank, size, dist.group.WORLD)


def leave() -> None:
    """Dissolve what `join` made, if it did."""
    if dist.is_initialized():
        dist.destroy_process_group()


def send_array(mesh: Mesh, array: npt.NDArray[np.int32]) -> None:
    """Rank 0's side: [n] int32 to every other rank."""
    head = torch.zeros(1 + _INLINE, dtype=torch.int32)
    flat = torch.from_numpy(array)
    head[0] = len(flat)
    head[1 : 1 + min(len(flat), _INLINE)] = flat[:_INLINE]
    mesh.broadcast(head)
    if len(flat) > _INLINE:
        mesh.broadcast(flat[_INLINE:].contiguous())


def receive_array(mesh: Mesh) -> npt.NDArray[np.int32]:
    """The other ranks' side: the array that rank 0 sent. Waits for it."""
    head = mesh.broadcast(torch.empty(1 + _INLINE, dtype=torch.int32))
    length = int(head[0])
    if length <= _INLINE:
        return head[1 : 1 + length].numpy()
    rest = mesh.broadcast(torch.empty(length - _INLINE, dtype=torch.int32))
    return torch.cat([head[1:], rest]).numpy()


def agree(mesh: Mesh, number: int) -> bool:
    """Whether every rank came with the same number; returns on all of them, or on none."""
    numbers = mesh.all_gather(torch.tensor([number], dtype=torch.int64))
    return bool((numbers == number).all())
