"""A run as people and programs read it: a table on the terminal, and a JSON file with every case."""

from __future__ import annotations

import datetime
import json
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deltaserve.bench.record import describe_commit, describe_hardware
from deltaserve.core.errors import ConfigError
from deltaserve.core.version import VERSION
from deltaserve.engine.machine import num_threads
from deltaserve.verify.book import Book, Case, Status
from deltaserve.verify.gates import GATES
from deltaserve.verify.lab import Lab
from deltaserve.verify.run import Outcome

COLOURS = {Status.PASSED: "green", Status.FAILED: "bold red", Status.SKIPPED: "yellow"}
MOST_SHOWN = 3
PACKAGES = ("torch", "numpy", "tokenizers")


def print_header(console: Console, lab: Lab) -> None:
    about = lab.target.about
    drafts = about.num_drafts if lab.options.num_drafts is None else lab.options.num_drafts
    drafts_text = f", {drafts} drafts" if about.is_engine and drafts else ""
    line = f"verifying {escape(about.name)}: model {escape(about.model)}, level {lab.level}{drafts_text}"
    console.print(line, highlight=False, soft_wrap=True)


def print_book(console: Console, book: Book) -> None:
    """One line when a gate has ended."""
    colour = COLOURS[book.status]
    why = f"  {escape(book.reason)}" if book.reason else ""
    line = f"[{colour}]{book.status:8}[/] {book.gate:10} {_passes(book):>9}  {book.wall_s:6.1f} s{why}"
    console.print(line, highlight=False, soft_wrap=True)


def print_summary(console: Console, outcome: Outcome) -> None:
    """The table, then what did not pass and what was skipped, then the verdict."""
    table = Table("gate", "", "cases", "what happened", title_justify="left")
    for book in outcome.books:
        status = f"[{COLOURS[book.status]}]{book.status}[/]"
        table.add_row(book.gate, status, _passes(book), escape(_happened(book)))
    console.print(table)
    for book in outcome.books:
        _print_details(console, book)
    console.print(_verdict(outcome), highlight=False, soft_wrap=True)


def write_json(path: Path, lab: Lab, outcome: Outcome) -> None:
    """Raises ConfigError where the file cannot be written."""
    _write(path, json.dumps(as_json(lab, outcome), indent=1) + "\n")


def check_writable(path: Path) -> None:
    """Makes the file: what cannot be written is better known before the run. Raises ConfigError."""
    _write(path, "")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"--json: {path} cannot be written: {error.strerror}; choose another") from error


def as_json(lab: Lab, outcome: Outcome) -> dict[str, Any]:
    """Configuration, versions, hardware, and every case of every gate."""
    about = lab.target.about
    return {
        "passed": outcome.passed,
        "interrupted": outcome.interrupted,
        "target_gone": outcome.gone,
        "started": f"{_started(outcome):%Y-%m-%dT%H:%M:%SZ}",
        "wall_s": round(outcome.wall_s, 1),
        "level": str(lab.level),
        "target": asdict(about),
        "options": asdict(lab.options),
        "versions": {"deltaserve": VERSION, "commit": describe_commit(), "python": platform.python_version()}
        | _packages(),
        "hardware": describe_hardware(num_threads(None)) + ("" if about.is_engine else " (the client's)"),
        "gates": [_gate_json(book) for book in outcome.books],
    }


def _started(outcome: Outcome) -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=outcome.wall_s)


def _gate_json(book: Book) -> dict[str, Any]:
    return {
        "gate": book.gate,
        "claim": next((gate.claim for gate in GATES if gate.name == book.gate), ""),
        "status": book.status,
        "reason": book.reason,
        "num_cases": len(book.cases),
        "num_failed": book.num_failed,
        "num_splits": book.num_splits,
        "largest_logprob_difference": book.largest_difference,
        "events": {event.name: event.count for event in book.events},
        "notes": book.notes,
        "skipped_parts": book.skipped_parts,
        "wall_s": round(book.wall_s, 2),
        "cases": [asdict(case) for case in book.cases],
    }


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _passes(book: Book) -> str:
    return f"{len(book.cases) - book.num_failed}/{len(book.cases)}" if book.cases else ""


def _happened(book: Book) -> str:
    if book.status is Status.SKIPPED:
        return book.reason
    found = [*(str(event) for event in book.events), *book.notes]
    if book.num_compared:
        found.append(f"largest logprob difference {book.largest_difference:.1g}")
    return "; ".join(found)


def _print_details(console: Console, book: Book) -> None:
    failed = [case for case in book.cases if not case.passed]
    if book.status is Status.FAILED:
        console.print(f"[bold red]{book.gate} failed[/]: {escape(book.reason)}", highlight=False, soft_wrap=True)
        for case in failed[:MOST_SHOWN]:
            console.print(f"  {escape(_case_line(case))}", highlight=False, soft_wrap=True)
        if len(failed) > MOST_SHOWN:
            console.print(f"  and {len(failed) - MOST_SHOWN} more (all of them: --json FILE)", highlight=False)
    for part in book.skipped_parts:
        console.print(f"[yellow]{book.gate} left out[/] {escape(part)}", highlight=False, soft_wrap=True)


def _case_line(case: Case) -> str:
    return f"{case.name}: {case.detail}"


def _verdict(outcome: Outcome) -> str:
    counts = {status: sum(book.status is status for book in outcome.books) for status in Status}
    text = f"{counts[Status.PASSED]} passed, {counts[Status.FAILED]} failed, {counts[Status.SKIPPED]} skipped"
    if outcome.interrupted:
        text += "; interrupted, the rest did not run"
    if outcome.gone:
        text += f"; the rest did not run: {outcome.gone}"
    if not outcome.passed and not counts[Status.FAILED]:
        text += "; nothing was verified"
    colour = "green" if outcome.passed else "bold red"
    return f"[{colour}]{'passed' if outcome.passed else 'failed'}[/]: {escape(text)}, {outcome.wall_s:.0f} s"
