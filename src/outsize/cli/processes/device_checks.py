"""Runs the checks of `outsize doctor --gpu` one by one, each in processes of its own with a time limit.

A check that crashes, hangs or takes all memory ends alone: its whole process group is killed, and the report
has its last lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from outsize.cli.processes.device_check_worker import CheckJob, CheckOutcome
from outsize.cli.processes.job import JobFolder
from outsize.cli.processes.limited import run_limited
from outsize.ir.answers.device_report import CheckResult

if TYPE_CHECKING:
    from outsize.ops.doctor.table import DeviceCheck

_LAST_CHARACTERS: Final = 600


def run_checks(
    checks: Sequence[DeviceCheck], processes: int, width: int, progress: Callable[[int, int], None]
) -> Iterator[CheckResult]:
    """Yields the result of each check as it ends; joint checks run over `processes` processes, a device for
    each.
    """
    for number, check in enumerate(checks):
        progress(number, len(checks))
        yield _run_check(check, processes if check.is_joint else 1, width)
    progress(len(checks), len(checks))


def _run_check(check: DeviceCheck, processes: int, width: int) -> CheckResult:
    result = CheckResult(name=check.name, question=check.question, outcome="skipped", processes=processes)
    if check.is_joint and processes < 2:
        return result.model_copy(update={"detail": "a second device"})
    job = CheckJob(check=check.name, processes=processes, width=width, is_launcher=check.is_joint)
    start = time.monotonic()
    with JobFolder.temporary() as folder:
        folder.job.write_text(job.to_json(), encoding="utf-8")
        problem = _ended(folder, check.limit_s)
        seconds = round(time.monotonic() - start, 1)
        if problem is not None:
            return result.model_copy(update={"outcome": "fails", "detail": problem, "seconds": seconds})
        finding = CheckOutcome.model_validate_json(folder.outcome.read_text(encoding="utf-8"))
    return result.model_copy(update={**_judged(finding), "seconds": seconds})


def _judged(finding: CheckOutcome) -> dict[str, object]:
    if finding.missing is not None:
        return {"outcome": "skipped", "detail": finding.missing}
    outcome = "measured" if finding.wrong is None else "fails" if finding.wrong else "holds"
    return {"outcome": outcome, "figures": finding.figures, "detail": "; ".join(finding.wrong or ())}


def _ended(folder: JobFolder, limit_s: float) -> str | None:
    """Runs the worker to its end or to the limit; returns what went wrong, None where nothing did."""
    code, output = run_limited("device_check_worker", folder, limit_s)
    said = output[-_LAST_CHARACTERS:]
    if code is None:
        return f"not over after {limit_s:.0f} s" + (f": {said}" if said else "")
    return f"exit code {code}: {said}" if code or not folder.outcome.exists() else None
