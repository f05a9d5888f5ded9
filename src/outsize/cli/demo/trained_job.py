"""Plans a job with measured unit times, checks it, trains it over two processes, and writes its report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import final

from torch import nn

import outsize
from outsize import api
from outsize.cli.demo.job import DemoJob
from outsize.cli.demo.screen import DemoScreen
from outsize.errors import RankFailed
from outsize.ir.answers.runs.recorded_run import RecordedRun
from outsize.ir.answers.verdict import Verdict
from outsize.ir.formatting import seconds_text
from outsize.ir.plan import Plan
from outsize.ir.timeline import Timeline
from outsize.ops.launch.launch import run_script
from outsize.planner.advice.overview import Outlook
from outsize.planner.advice.utilisation import utilisation
from outsize.report import plots
from outsize.report.html import page
from outsize.report.tables.plan_tables import check_table, plan_table, run_table
from outsize.report.trace import perfetto

PROCESSES = 2
CHECKED_STEPS = 3
# Single batches scatter, so the loss at the end is the mean of at most this many last steps.
LAST_STEPS = 10
FILES = ("report.html", "plan.json", "trace.json", "timeline.png", "memory.png", "loss.png")


@final
@dataclass(frozen=True, eq=False)
class TrainedJob:
    """Holds what is known of a job after its training.

    `outlook` has the plan and its predicted timeline, from one simulation. The seconds in `history` are with
    data and optimizer, `measured` is without.
    """

    job: DemoJob
    outlook: Outlook
    verdict: Verdict
    history: RecordedRun
    measured: Timeline

    @property
    def losses(self) -> tuple[float, ...]:
        """The loss of each step; NaN where it is no finite number."""
        return tuple(math.nan if step.loss is None else step.loss for step in self.history.steps)

    @property
    def end_loss(self) -> float:
        """The mean loss of the last steps."""
        return fmean(self.losses[-min(LAST_STEPS, max(1, len(self.losses) // 2)) :])

    @property
    def learned(self) -> bool:
        """Whether the end loss is below the job's goal, or below the first loss when it has no goal."""
        return self.end_loss < (self.losses[0] if self.job.goal is None else self.job.goal)

    @property
    def passed(self) -> bool:
        """Whether the run is bit-equal to one process and the model learned."""
        return self.verdict.bit_equal and self.learned

    def write(self, folder: Path) -> Sequence[Path]:
        """Writes the report, the trace and the pictures next to the plan; returns all files."""
        seen = self.outlook
        html = page.render(
            page.PageFacts(
                plan=seen.plan,
                graph=seen.graph,
                profile=seen.profile,
                predicted=seen.timeline,
                measured=self.measured,
                history=self.history,
                verdict=self.verdict,
                advice=seen.advice,
                curves=seen.curves,
                commands=["outsize demo"],
            )
        )
        (folder / "report.html").write_text(html, encoding="utf-8")
        (folder / "trace.json").write_text(json.dumps(perfetto(seen.timeline, self.measured)))
        plots.timeline_png(seen.timeline, self.measured, folder / "timeline.png")
        plots.memory_png(seen.plan, folder / "memory.png")
        plots.loss_png(self.losses, folder / "loss.png")
        return [folder / name for name in FILES]


def plan_check_and_train(job: DemoJob, screen: DemoScreen, folder: Path, *, quick: bool) -> TrainedJob:
    """Does all of it and shows a table for each part. Raises RankFailed when a process fails."""
    folder.mkdir(parents=True, exist_ok=True)
    with screen.working(f"building {job.title}"):
        model = job.model()
    with screen.working("timing every unit of the model and planning"):
        seen = planned_job(job, model)
    plan = seen.plan
    plan.save(folder / "plan.json")
    screen.show(plan_table(plan, seen.graph))
    with screen.working(f"checking {CHECKED_STEPS} steps against the plain loop, bit by bit"):
        verdict = _check(job, model, plan)
    screen.show(check_table(verdict))
    screen.begin(f"training {job.recipe.steps} steps over {plan.axes.world_size} processes")
    history, measured = _train(job, plan, folder, quick=quick)
    used = utilisation(measured, plan, [stage.device for stage in plan.stages])
    whole_s = median(step.step_s for step in history.steps)
    whole = f"A whole step, with data and optimizer, takes {seconds_text(whole_s)}."
    screen.show(run_table(plan, measured, history, used), whole)
    return TrainedJob(job, seen, verdict, history, measured)


def planned_job(job: DemoJob, model: nn.Module) -> Outlook:
    """Returns the plan for two CPU processes with the timeline that its expected figures are of."""
    batch = job.batch(0)
    return api.outlook(
        model,
        batch.args,
        batch.kwargs,
        cluster=f"{PROCESSES}xcpu",
        stages=PROCESSES,
        microbatches=job.microbatches,
        measured=True,
        curves=True,
        loss_fn=job.loss_fn,
        target=batch.target,
    )


def _check(job: DemoJob, model: nn.Module, plan: Plan) -> Verdict:
    batch = job.batch(0)
    return outsize.check(
        model,
        batch.args,
        batch.kwargs,
        loss_fn=job.loss_fn,
        target=batch.target,
        plan=plan,
        steps=CHECKED_STEPS,
        processes=job.checked_over_processes,
    )


def _train(job: DemoJob, plan: Plan, folder: Path, *, quick: bool) -> tuple[RecordedRun, Timeline]:
    """Returns what was recorded of all steps, and the timeline of one of the last."""
    script = ["outsize.cli.demo.training", "quick" if quick else "full", job.name, str(folder)]
    code = run_script(script, plan.axes.world_size, module=True)
    if code:
        raise RankFailed(
            f"training {job.title} failed",
            numbers=f"exit code {code}",
            next_step="see the traceback above",
        )
    measured = Timeline.model_validate_json((folder / "measured.json").read_text())
    return RecordedRun.model_validate_json((folder / "history.json").read_text()), measured
