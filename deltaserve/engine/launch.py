"""Starts child processes: the engine for a Client, and the other ranks for an engine.

A job crosses as one line of JSON on stdin, which then is the child's lifeline (`engine.child`). All ranks of an
engine get the same job but for the rank, so their settings cannot differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from deltaserve.cache.layout import PoolSizes
from deltaserve.core.config import EngineConfig
from deltaserve.core.errors import ConfigError, EngineDeadError
from deltaserve.engine.settings import to_json

_PACKAGE_ROOT = Path(__file__).parents[2]
_WATCH_S = 0.2
# How long a compute thread spins for its next piece of work: about 0.2 ms, which bridges the gaps inside a step as well
# as the default (milliseconds) does, but leaves the core when the server or a client on this machine needs it.
_SPIN_COUNT = "10000"
_LONGEST_SOCKET_PATH = 100  # systems allow 104 to 108 bytes


@dataclass(frozen=True, slots=True)
class EngineJob:
    """For `engine.process`. `started_s` is the wall clock at launch."""

    config: EngineConfig
    directory: Path
    started_s: float


@dataclass(frozen=True, slots=True)
class RankJob:
    """For `engine.follower`."""

    config: EngineConfig
    directory: Path
    sizes: PoolSizes
    rank: int

    def digest(self) -> int:
        """Equal on ranks that were told the same."""
        text = to_json(replace(self, rank=0))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def make_private_directory() -> Path:
    """For sockets and rendezvous: only this user may enter it. Whoever makes it removes it."""
    directory = Path(tempfile.mkdtemp(prefix="deltaserve-"))
    if len(os.fsencode(directory)) + len("/requests") > _LONGEST_SOCKET_PATH:
        shutil.rmtree(directory)
        raise ConfigError(f"TMPDIR {directory.parent} is too long a path for sockets; set it to a shorter one")
    return directory


def start(module: str, job: EngineJob | RankJob) -> subprocess.Popen[bytes]:
    """Run `python -m module` on the package that is running now, and hand it the job."""
    path = os.pathsep.join(filter(None, (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
    environment = {"GOMP_SPINCOUNT": _SPIN_COUNT} | os.environ | {"PYTHONPATH": path}
    process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it is gone already, as its exit code will tell
        process.stdin.write(to_json(job).encode() + b"\n")
        process.stdin.flush()
    return process


def start_engine(config: EngineConfig, directory: Path) -> subprocess.Popen[bytes]:
    return start("deltaserve.engine.process", EngineJob(config, directory, time.time()))


def end(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    """Wait for a child that has been told to leave, then make it; its exit code."""
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
    code = process.wait()
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    return code


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    return f"was ended by {signal.Signals(-code).name}"


class Ranks:
    """The followers of rank 0: ranks 1, 2, ... of one engine.

    `on_failure` is called from a thread, once, with a sentence about the first one that is gone.
    """

    def __init__(self, job: RankJob, num_ranks: int, on_failure: Callable[[str], None] | None = None) -> None:
        self._is_ending = False
        self._processes = {
            rank: start("deltaserve.engine.follower", replace(job, rank=rank)) for rank in range(1, num_ranks)
        }
        if on_failure is not None:
            threading.Thread(target=self._watch, args=(on_failure,), name="ranks", daemon=True).start()

    def failure(self) -> str | None:
        """A sentence about a follower that is gone, or None while all are there."""
        for rank, process in self._processes.items():
            if (code := process.poll()) is not None:
                return f"rank {rank} {describe_exit(code)}"
        return None

    def check(self) -> None:
        """Raises EngineDeadError if a follower is gone."""
        if (failure := self.failure()) is not None:
            raise EngineDeadError(failure)

    def expect_end(self) -> None:
        """From now on a follower that leaves is no failure."""
        self._is_ending = True

    def end(self, timeout_s: float) -> None:
        self.expect_end()
        for process in self._processes.values():
            end(process, timeout_s)

    def _watch(self, on_failure: Callable[[str], None]) -> None:
        while not self._is_ending:
            failure = self.failure()
            if failure is not None and not self._is_ending:
                on_failure(failure)
                return
            time.sleep(_WATCH_S)
