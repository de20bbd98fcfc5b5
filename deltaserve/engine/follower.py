"""Entry of a follower process, `python -m deltaserve.engine.follower`: rank 1, 2, ... of an engine."""

from __future__ import annotations

from deltaserve.engine import child
from deltaserve.engine.launch import RankJob
from deltaserve.engine.team import follow


def main() -> None:
    job = child.read_job(RankJob)
    child.follow_parent()
    try:
        follow(job)
    except Exception as error:  # noqa: BLE001 - whatever it is, rank 0 must hear of it
        child.report_failure(job.directory, error, prefix=f"rank {job.rank}: ")
        child.leave(child.FAILED)
    child.leave(0)


if __name__ == "__main__":
    main()
