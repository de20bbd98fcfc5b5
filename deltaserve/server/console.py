"""What a person sees at start: a progress line while the engine loads, then a summary."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from deltaserve.engine.info import EngineInfo


class LoadProgress:
    """A bar on a terminal, nothing elsewhere. Call it with a stage and the share of it that is done."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task: TaskID | None = None

    def __call__(self, stage: str, fraction: float) -> None:
        if self._task is None:
            self._task = self._progress.add_task(stage, total=1.0)
        self._progress.update(self._task, description=stage, completed=fraction)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def print_summary(console: Console, names: tuple[str, ...], info: EngineInfo, url: str, start_s: float) -> None:
    table = Table.grid(padding=(0, 2))
    rows = {
        "model": f"{', '.join(names)} ({info.model_type})",
        "context": f"{info.max_model_len:,} tokens",
        "at once": f"{info.num_rows} requests, {info.num_pages:,} pages of 64 tokens, {info.num_slots:,} state slots",
        "prefix cache": _prefix_cache(info),
        "drafts": _drafts(info),
        "machine": _machine(info),
        "ready": f"after {start_s:.1f} s",
        "chat": url,
        "API": f"{url}/v1, described at {url}/docs",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table, highlight=False, soft_wrap=True)


def _machine(info: EngineInfo) -> str:
    num_threads = max(info.num_threads, info.num_ranks)  # every rank has one at least
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    return threads if info.num_ranks == 1 else f"{info.num_ranks} ranks, {threads} together"


def _prefix_cache(info: EngineInfo) -> str:
    if not info.has_prefix_cache:
        return "off (--no-enable-prefix-caching)"
    device = f"{info.num_snapshots:,} snapshots"
    if not info.num_host_pages and not info.num_host_slots:
        return f"{device}; no host tier (--host-cache-bytes)"
    return f"{device}; on the host {info.num_host_slots:,} more and {info.num_host_pages:,} pages"


def _drafts(info: EngineInfo) -> str:
    if not info.num_drafts:
        return "none (--speculative-config)"
    drafts = f"up to {info.num_drafts} a step"
    if info.synthetic_acceptance is None:
        return drafts
    return f"{drafts}, SYNTHETIC acceptance of {info.synthetic_acceptance:g} tokens a step: texts mean nothing"
