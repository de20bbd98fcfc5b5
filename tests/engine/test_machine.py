"""Memory and cores under made-up control groups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deltaserve.engine import machine

MEMINFO = "MemTotal: 999 kB\nMemAvailable:    1000 kB\nBuffers: 1 kB\n"
HUGE = str(1 << 62)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in ({"proc/meminfo": MEMINFO} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


V2 = "sys/fs/cgroup"
V1 = "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1_024_000),
        (
            {"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/memory.max": "max\n", f"{V2}/a/b/memory.current": "5\n"},
            1_024_000,
        ),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/b/memory.max": "900\n", f"{V2}/a/b/memory.current": "300\n"}, 600),
        ({"proc/self/cgroup": "0::/a/b\n", f"{V2}/a/memory.max": "800\n", f"{V2}/a/memory.current": "300\n"}, 500),
        ({"proc/self/cgroup": "0::/elsewhere\n", f"{V2}/memory.max": "700", f"{V2}/memory.current": "300"}, 400),
        ({"proc/self/cgroup": "0::/\n", f"{V2}/memory.max": "700", f"{V2}/memory.current": "900"}, 0),
        (
            {
                "proc/self/cgroup": "0::/\n",
                f"{V2}/memory.max": "700",
                f"{V2}/memory.current": "300",
                f"{V2}/memory.stat": "anon 5\ninactive_file 150\n",
            },
            550,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/job/1\n0::/\n",
                f"{V1}/job/1/memory.limit_in_bytes": HUGE,
                f"{V1}/job/1/memory.usage_in_bytes": "10",
                f"{V1}/memory.limit_in_bytes": "1000",
                f"{V1}/memory.usage_in_bytes": "400",
                f"{V1}/memory.stat": "total_inactive_file 100",
            },
            700,
        ),
    ],
)
def test_memory_is_the_least_that_anything_leaves(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert machine.available_memory_bytes(write(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/a\n", f"{V2}/a/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/a\n", f"{V2}/a/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/a\n", f"{V2}/cpu.max": "50000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            8,
        ),
    ],
)
def test_cores_respect_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(machine, "_affinity", lambda: 8)
    assert machine.num_usable_cores(write(tmp_path, files)) == expected


def test_threads_come_from_the_flag_then_the_environment_then_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_usable_cores", lambda: 6)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert (machine.num_threads(5), machine.num_threads(None)) == (5, 3)
    for unusable in ("", "0", "4,2"):
        monkeypatch.setenv("OMP_NUM_THREADS", unusable)
        assert machine.num_threads(None) == 6


def test_this_machine_has_some_memory_and_a_core() -> None:
    assert machine.available_memory_bytes() > 1 << 20
    assert machine.num_usable_cores() >= 1


def test_freed_memory_is_kept_for_the_next_large_block() -> None:
    """In a process of its own: page faults of making and dropping 64 blocks of 256 KiB, twenty times."""
    script = (
        "import resource, sys\n"
        "from deltaserve.engine.machine import keep_freed_memory\n"
        "if sys.argv[1] == 'keep': keep_freed_memory()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(20): [bytearray(b'x') * (256 << 10) for _ in range(64)]\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    faults = {
        how: int(subprocess.run([sys.executable, "-c", script, how], capture_output=True, check=True).stdout)
        for how in ("keep", "default")
    }
    assert faults["keep"] < 10_000 < faults["default"], faults
