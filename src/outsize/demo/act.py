"""One act: plan with measured unit times, check, train over two processes, show what was measured."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import final

from torch import nn

import outsize
from outsize import api
from outsize.capture.cluster import find_cluster
from outsize.demo.job import Job
from outsize.demo.outcome import Outcome
from outsize.demo.screen import Screen
from outsize.errors import RankFailed
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.timeline import Timeline
from outsize.ir.verdict import Verdict
from outsize.planner.hindsight import expected_timeline
from outsize.planner.utilisation import utilisation
from outsize.report.tables import check_table, plan_table, run_table
from outsize.train.launch import run_script

PROCESSES = 2
CLUSTER = f"{PROCESSES}xcpu"
CHECKED_STEPS = 3


@final
class Act:
    """A job on the screen, with its folder."""

    def __init__(self, job: Job, screen: Screen, folder: Path, *, quick: bool) -> None:
        self._job, self._screen, self._folder, self._quick = job, screen, folder, quick

    def perform(self) -> Outcome:
        """All of it. Raises RankFailed when a process fails."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._screen.working(f"building {self._job.title}"):
            model = self._job.model()
        plan, graph = self._plan(model)
        self._screen.show(plan_table(plan, graph))
        verdict = self._check(model, plan)
        self._screen.show(check_table(verdict))
        losses, steps_s, measured = self._train(plan)
        predicted = expected_timeline(plan, graph, find_cluster(plan.cluster))
        outcome = Outcome(self._job, plan, graph, verdict, losses, steps_s, predicted, measured)
        used = utilisation(measured, plan, [stage.device for stage in plan.stages])
        self._screen.show(run_table(plan, measured, losses, used), outcome.pace())
        return outcome

    def _plan(self, model: nn.Module) -> tuple[Plan, ModelGraph]:
        batch = self._job.batch(0)
        loss = {"loss_fn": self._job.loss_fn, "target": batch.target}
        with self._screen.working("timing every unit of the model and planning"):
            plan = outsize.plan(
                model,
                batch.args,
                batch.kwargs,
                cluster=CLUSTER,
                stages=PROCESSES,
                microbatches=self._job.microbatches,
                measured=True,
                **loss,
            )
            _, graph, _ = api.price(plan, model, batch.args, batch.kwargs, **loss)
        plan.save(self._folder / "plan.json")
        return plan, graph

    def _check(self, model: nn.Module, plan: Plan) -> Verdict:
        batch = self._job.batch(0)
        with self._screen.working(f"checking {CHECKED_STEPS} steps against the plain loop, bit by bit"):
            return outsize.check(
                model,
                batch.args,
                batch.kwargs,
                loss_fn=self._job.loss_fn,
                target=batch.target,
                plan=plan,
                steps=CHECKED_STEPS,
                processes=self._job.checked_over_processes,
            )

    def _train(self, plan: Plan) -> tuple[tuple[float, ...], tuple[float, ...], Timeline]:
        """Losses and seconds of all steps, and the timeline of one of the last."""
        size = "quick" if self._quick else "full"
        script = ["outsize.demo.training", size, self._job.name, str(self._folder)]
        code = run_script(script, len(plan.stages), module=True)
        if code:
            raise RankFailed(
                f"training {self._job.title} failed",
                numbers=f"exit code {code}",
                next_step="see the traceback above",
            )
        with (self._folder / "losses.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        measured = Timeline.model_validate_json((self._folder / "measured.json").read_text())
        return tuple(float(r["loss"]) for r in rows), tuple(float(r["step_s"]) for r in rows), measured
