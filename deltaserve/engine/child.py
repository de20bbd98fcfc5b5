"""How a child process lives and dies: it reads its job from stdin, and ends when its parent does.

Stdin is the lifeline. The parent writes one line, the job, and keeps the pipe open; when the pipe closes, the parent
is gone, and the child leaves at once, whatever it is doing. So no orphans, on any system, without polling.

A child ignores SIGINT and SIGTERM, which service managers and terminals send to whole groups of processes: its parent
decides whether requests may finish first.

A child that fails writes one sentence to a file in the private directory and exits non-zero. The first failure wins:
when one rank falls, the others fall over it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from deltaserve.core.errors import CheckpointError, ConfigError, DeltaserveError, EngineDeadError
from deltaserve.engine.settings import from_json

T = TypeVar("T")

ORPHANED = 3  # exit code
FAILED = 1
_FAILURE_FILE = "failure.json"
_KINDS: dict[str, type[DeltaserveError]] = {
    kind.__name__: kind for kind in (CheckpointError, ConfigError, EngineDeadError)
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a child ended: the name of an error class, and its sentence."""

    kind: str
    sentence: str

    def to_error(self) -> DeltaserveError:
        return _KINDS[self.kind](self.sentence)


def read_job(kind: type[T]) -> T:
    """The first line of stdin; to be called before `follow_parent`."""
    return from_json(kind, sys.stdin.buffer.readline().decode())


def follow_parent(directory: Path | None = None) -> None:
    """From now on leave when the parent is gone, removing `directory` on the way out."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, args=(directory,), name="lifeline", daemon=True).start()


def report_failure(directory: Path, error: BaseException, prefix: str = "") -> None:
    """Print the error and write it down for the parent, unless another process was first."""
    kind = type(error).__name__ if type(error).__name__ in _KINDS else EngineDeadError.__name__
    is_plain = isinstance(error, ConfigError)
    if not is_plain:
        traceback.print_exception(error)
    sentence = prefix + (str(error) if isinstance(error, DeltaserveError) else f"{type(error).__name__}: {error}")
    write_failure(directory, Failure(kind, sentence))


def write_failure(directory: Path, failure: Failure) -> None:
    try:
        with (directory / _FAILURE_FILE).open("x", encoding="utf-8") as file:
            json.dump({"kind": failure.kind, "sentence": failure.sentence}, file)
    except OSError:  # the first failure is there already, or the directory went with the parent
        return


def read_failure(directory: Path) -> Failure | None:
    """What the first child that failed has to say, if any had the time."""
    try:
        return from_json(Failure, (directory / _FAILURE_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def leave(code: int) -> None:
    """Exit without waiting for threads that may never return, such as one in an exchange with a dead rank."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave_with_parent(directory: Path | None) -> None:
    while os.read(0, 4096):
        pass
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
    os._exit(ORPHANED)
