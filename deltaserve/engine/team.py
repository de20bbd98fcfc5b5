"""Several ranks as one runner: rank 0 leads, the others follow.

    rank 0      Team.lead(runner).execute(plan): the runner sends the plan as one flat array, then does its own part
    others      follow(job): receive an array, do the part, and again; an empty array means leave

The followers import and load while rank 0 does, and all meet once more before the first step. A rank that dies
breaks the exchange that the others wait in, so each of them fails within moments; rank 0 then says who it was.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from deltaserve.cache.layout import PoolSizes
from deltaserve.core.config import EngineConfig
from deltaserve.core.errors import ConfigError, EngineDeadError
from deltaserve.core.plan import StepOutput, StepPlan
from deltaserve.engine.launch import RankJob, Ranks, make_private_directory
from deltaserve.engine.loop import Runner
from deltaserve.engine.machine import keep_freed_memory
from deltaserve.model.config import ModelConfig
from deltaserve.parallel.group import agree, join, leave, receive_array, send_array
from deltaserve.parallel.mesh import Mesh
from deltaserve.runner.build import load_runner

JOIN_TIMEOUT_S = 120.0
_LEAVE_TIMEOUT_S = 5.0
_BLAME_TIMEOUT_S = 1.0
_LEAVE = np.zeros(0, dtype=np.int32)


class Team:
    """Rank 0's hold on the other ranks. End it with `close`, or with `abandon` when they may be past listening."""

    def __init__(
        self,
        config: EngineConfig,
        sizes: PoolSizes,
        directory: Path | None = None,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self._own_directory = make_private_directory() if directory is None else None
        meeting_place = directory or self._own_directory
        assert meeting_place is not None
        self._job = RankJob(config, meeting_place, sizes, rank=0)
        self.is_in_step = False
        self.ranks = Ranks(self._job, config.tensor_parallel_size, on_failure)
        try:
            self.mesh = join(meeting_place, 0, config.tensor_parallel_size, JOIN_TIMEOUT_S, self.ranks.check)
        except BaseException:
            self.abandon()
            raise

    def lead(self, runner: Runner) -> Runner:
        """The runner of all ranks together; returns when all of them have loaded."""
        with _Blame(self.ranks):
            _meet(self.mesh, self._job)
        return _LeadRunner(runner, self)

    def close(self) -> None:
        """Dismiss the followers and wait until they are gone; by force if they may be stuck in half a step."""
        self.ranks.expect_end()
        if self.is_in_step or self.ranks.failure() is not None:
            return self.abandon()
        send_array(self.mesh, _LEAVE)
        return self.abandon(_LEAVE_TIMEOUT_S)

    def abandon(self, timeout_s: float = 0.0) -> None:
        """End the followers, by force after `timeout_s`."""
        self.ranks.end(timeout_s)
        leave()
        if self._own_directory is not None:
            shutil.rmtree(self._own_directory, ignore_errors=True)


class _LeadRunner:
    """Rank 0's runner, whose exchanges fail when another rank is gone."""

    def __init__(self, runner: Runner, team: Team) -> None:
        self._runner = runner
        self._team = team

    def execute(self, plan: StepPlan) -> StepOutput:
        self._team.is_in_step = True
        with _Blame(self._team.ranks):
            output = self._runner.execute(plan)
        self._team.is_in_step = False
        return output


class _Blame:
    """Turns the error of a broken exchange into an EngineDeadError that names the rank that broke it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if not isinstance(error, RuntimeError):
            return
        deadline_s = time.monotonic() + _BLAME_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if (failure := self._ranks.failure()) is not None:
                raise EngineDeadError(failure) from error
            time.sleep(0.02)


def _meet(mesh: Mesh, job: RankJob) -> None:
    """Once all have loaded. Raises ConfigError where a rank was told something else than the others."""
    if not agree(mesh, job.digest()):
        raise ConfigError(
            "the ranks of this engine were given different settings or pool sizes; start all of them with the same ones"
        )


def follow(job: RankJob) -> None:
    """The life of ranks 1, 2, ...; returns when rank 0 dismisses them."""
    model_config = ModelConfig.from_directory(job.config.model)
    mesh = join(job.directory, job.rank, job.config.tensor_parallel_size, JOIN_TIMEOUT_S)
    keep_freed_memory()
    runner, _ = load_runner(job.config, model_config, job.sizes, mesh, None)
    _meet(mesh, job)
    while len(plan := receive_array(mesh)):
        runner.follow(plan)
    leave()
