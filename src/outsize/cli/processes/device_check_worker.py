"""Runs one check of the devices in this process, as one rank of it, and leaves what it found in a folder.

doctor --process with a limit--> device_check_worker FOLDER --ranks, where a check is joint--> itself
doctor <-- FOLDER/outcome.json                                                          from rank 0
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import final

from outsize.cli.processes.job import JobFolder
from outsize.cli.processes.limited import end_with_caller
from outsize.ir.base import Record


@final
class CheckJob(Record):
    """Says which check runs, over how many processes, and how wide its models are."""

    check: str
    processes: int
    width: int
    is_launcher: bool = False


@final
class CheckOutcome(Record):
    """Holds what rank 0 found (ops/doctor/check_place.py)."""

    figures: dict[str, float]
    wrong: tuple[str, ...] | None
    missing: str | None


def main(folder: JobFolder) -> int:
    """Runs the check, or starts its ranks; returns the exit code."""
    job = CheckJob.model_validate_json(folder.job.read_text(encoding="utf-8"))
    if job.is_launcher or job.processes == 1:
        end_with_caller()
    if job.is_launcher:
        from outsize.cli.processes.launch import LaunchPlace

        folder.job.write_text(job.model_copy(update={"is_launcher": False}).to_json(), encoding="utf-8")
        argv = ["outsize.cli.processes.device_check_worker", str(folder.path)]
        return LaunchPlace().launch(argv, job.processes, module=True, shown_as=job.check)
    _run(job, folder)
    return 0


def _run(job: CheckJob, folder: JobFolder) -> None:
    from outsize.device.accelerators import REPEATABLE, device_type

    os.environ.update(REPEATABLE)
    from outsize.ops.doctor.check_place import CheckPlace
    from outsize.ops.doctor.table import CHECKS
    from outsize.train.world.join import join
    from outsize.train.world.world import leave

    world = join(device_type())
    check = next(check for check in CHECKS if check.name == job.check)
    found = check.run(CheckPlace.here(world, job.width))
    if world.rank == 0:
        finding = CheckOutcome(figures=dict(found.figures), wrong=found.wrong, missing=found.missing)
        folder.outcome.write_text(finding.to_json(), encoding="utf-8")
    leave(world)


if __name__ == "__main__":
    sys.exit(main(JobFolder(path=Path(sys.argv[1]))))
