"""What this process may use of the machine: bytes of memory and CPU cores, limits of its control groups included.

A container's limit is not visible in the machine's own figures, so the control group of the process and each of its
parents is asked too (both versions of the interface). Files that do not exist set no limit.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that can be taken now without swapping: the least of what the machine and each control group has left."""
    left = [_left_in_group(group) for group in _groups(root, "memory")]
    return max(min([_free_on_machine(root), *(size for size in left if size is not None)]), 0)


def num_usable_cores(root: Path = Path("/")) -> int:
    """Cores this process may keep busy: its affinity, or less if a control group has a smaller quota."""
    quotas = [_quota(group) for group in _groups(root, "cpu")]
    return max(1, min([_affinity(), *(int(quota) for quota in quotas if quota is not None)]))


def num_threads(asked: int | None) -> int:
    """Threads for all ranks together: what was asked for, or OMP_NUM_THREADS, or one for each usable core."""
    environment = os.environ.get("OMP_NUM_THREADS", "")
    return asked or (int(environment) if environment.isdigit() else 0) or num_usable_cores()


def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed, where there is a glibc; for the whole process.

    By default a block of 128 KiB or more comes from the kernel and goes back to it, so that every larger intermediate
    tensor is mapped and faulted in anew: copying such tensors runs at 1.7 GB/s instead of 9 (LOG.md, 2026-11-30).
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc allows
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _free_on_machine(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The directories, from the process's own group up to the root group, under both layouts of the file system."""
    base = root / _CGROUPS.relative_to("/")
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        top = base if number == "0" else base / controller
        own = top / path.lstrip("/")
        yield own
        yield from (parent for parent in own.parents if parent == top or top in parent.parents)


def _left_in_group(group: Path) -> int | None:
    """Limit less use; file cache that can be dropped counts as free."""
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for limit_name, used_name in names:
        limit, used = _read(group / limit_name).strip(), _read(group / used_name).strip()
        if limit.isdigit() and used.isdigit():
            return int(limit) - int(used) + _droppable(group)
    return None


def _droppable(group: Path) -> int:
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines() if len(line.split()) == 2)
    return int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))


def _quota(group: Path) -> float | None:
    """Cores' worth of time per period, at least one."""
    quota, _, period = _read(group / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip()
    if not (quota.isdigit() and period.isdigit()):
        return None
    return max(1.0, int(quota) / int(period))


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""
