"""An engine process, or a follower, whose last rank raises in its third step. Run by test_client."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import numpy.typing as npt

from deltaserve.core.plan import StepOutput, StepPlan
from deltaserve.engine import launch, process
from deltaserve.runner.runner import ModelRunner

NUM_GOOD_STEPS = 2


class BrokenRunner(ModelRunner):
    """Executes and follows NUM_GOOD_STEPS times."""

    num_steps = 0

    def execute(self, plan: StepPlan) -> StepOutput:
        if self._mesh.size == 1:
            self.count()
        return super().execute(plan)

    def follow(self, flat: npt.NDArray[np.int32]) -> None:
        self.count()
        super().follow(flat)

    def count(self) -> None:
        self.num_steps += 1
        if self.num_steps > NUM_GOOD_STEPS:
            raise ValueError("broken on purpose")


def start_broken(module: str, job: launch.EngineJob | launch.RankJob) -> subprocess.Popen[bytes]:
    assert module == "deltaserve.engine.follower"
    return start("tests.engine.broken_follower", job)


if __name__ == "__main__":
    sys.modules["deltaserve.runner.build"].ModelRunner = BrokenRunner  # type: ignore[attr-defined]
    start = launch.start
    launch.start = start_broken
    process.main()
