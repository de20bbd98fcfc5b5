"""Write figures down so that they can be repeated: hardware, shape, commit and command beside each.

A result file is a list of rows {name, value, unit, shape, hardware, commit, command}. Writing replaces rows of the
same name and shape and keeps the others, so that several commands can fill one file.
"""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deltaserve.engine.machine import num_usable_cores

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    value: float
    unit: str
    shape: str
    hardware: str
    commit: str
    command: str


def describe_hardware(num_threads: int) -> str:
    """Processor, threads used and memory, and the versions whose speed is measured with ours."""
    memory_gib = _meminfo_kib("MemTotal") / 2**20
    processor = f"{_processor()}, {num_threads} of {num_usable_cores()} cores, {memory_gib:.0f} GiB"
    return f"{processor}, Python {platform.python_version()}, torch {version('torch')}"


def announce(model: Path, num_threads: int, console: Console) -> str:
    """Prints what is measured on what, and how busy that is; gives the hardware."""
    hardware = describe_hardware(num_threads)
    console.print(f"{model.name}: {hardware}, load {load_average():.1f}")
    return hardware


def describe_commit() -> str:
    """The short hash, with `-dirty` where tracked files differ from it; `unknown` outside a repository."""
    head = _git("rev-parse", "--short", "HEAD")
    if not head:
        return "unknown"
    return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")


def describe_command(arguments: Sequence[str] | None = None) -> str:
    """What was typed after `scripts/bench` or `deltaserve bench`; of an absolute path only the name."""
    words = sys.argv[2:] if arguments is None else arguments
    return shlex.join(["scripts/bench", *(Path(word).name if Path(word).is_absolute() else word for word in words)])


def result_path(name: str) -> Path:
    """bench/results/<date>-<name>.json in a checkout, else in the current directory."""
    file = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}-{name}.json"
    if not (ROOT / "pyproject.toml").is_file():
        return Path(file)
    results = ROOT / "bench" / "results"
    results.mkdir(parents=True, exist_ok=True)
    return results / file


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    replaced = {(row.name, row.shape) for row in rows}
    old = json.loads(path.read_text("utf-8")) if path.exists() else []
    kept = [row for row in old if (row["name"], row["shape"]) not in replaced]
    path.write_text(json.dumps(kept + [asdict(row) for row in rows], indent=1) + "\n", "utf-8")


def write_figures(
    path: Path, figures: Sequence[tuple[str, float, str, str]], hardware: str, model: Path, console: Console
) -> None:
    """`figures` are (name, value, unit, shape): printed as a table and written with commit and command."""
    commit, command = describe_commit(), describe_command()
    table = Table("figure", "value", "unit", "shape")
    for name, value, unit, shape in figures:
        table.add_row(name, f"{value:,.3f}" if abs(value) < 10 else f"{value:,.1f}", unit, shape)
    shapes = ((name, round(value, 4), unit, f"{model.name}, {shape}") for name, value, unit, shape in figures)
    write_rows(path, [Row(*columns, hardware, commit, command) for columns in shapes])
    console.print(table)
    console.print(f"commit {commit}, {command}; written to {path.name}")


def load_average() -> float:
    """Runnable processes over the last minute; above the number of cores, figures are worth little."""
    return float(Path("/proc/loadavg").read_text().split()[0]) if Path("/proc/loadavg").exists() else 0.0


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _meminfo_kib(key: str) -> int:
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(key + ":")), 0)


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return ""
