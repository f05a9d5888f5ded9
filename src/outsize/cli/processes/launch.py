"""Starts the processes of a MODEL run and reads the outcome of rank 0, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import typer
from pydantic import TypeAdapter

from outsize.cli.processes.job import FinishedRun, JobFolder, RunJob, RunOutcome
from outsize.cli.screen import Screen, error_document
from outsize.errors import BadOption, RankFailed, WorldMismatch
from outsize.ir.answers.request import PlanRequest
from outsize.ir.base import Record
from outsize.ir.formatting import whole_number
from outsize.ir.hardware.devices import places_in
from outsize.ops.launch.launch import launch, processes_for
from outsize.ops.launch.spec import LaunchOptions, LaunchSpec

PROCESSES = 2
_OUTCOME: TypeAdapter[RunOutcome | FinishedRun] = TypeAdapter(RunOutcome | FinishedRun)


@final
@dataclass(frozen=True)
class LaunchPlace:
    """Holds the processes on this machine, torchrun's options by name, and the other options of a launch."""

    nproc_per_node: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    how: LaunchOptions = field(default_factory=LaunchOptions)

    @property
    def nnodes(self) -> int:
        """Returns the number of machines; for MIN:MAX the least."""
        return whole_number(str(self.options.get("nnodes", "1")).split(":")[0]) or 1

    @property
    def restarts(self) -> int:
        """Returns how often the run may start again; 0 for what torchrun's parser will refuse."""
        return whole_number(str(self.options.get("max_restarts", ""))) or 0

    @property
    def most_nproc(self) -> str | None:
        """Returns the processes on this machine as they are given; of MIN:MAX the most."""
        return None if self.nproc_per_node is None else self.nproc_per_node.rpartition(":")[2]

    @property
    def least_nproc(self) -> str | None:
        """Returns MIN of MIN:MAX processes on this machine; None where one number is given."""
        least, colon, _ = (self.nproc_per_node or "").partition(":")
        return least if colon else None

    @property
    def is_elastic(self) -> bool:
        """Tells whether the number of ranks may change during the run."""
        least, colon, most = str(self.options.get("nnodes", "1")).partition(":")
        return self.least_nproc is not None or (bool(colon) and least != most)

    @property
    def flags(self) -> tuple[str, ...]:
        """Returns the options as torchrun spells them."""
        spelled = ((f"--{name.replace('_', '-')}", value) for name, value in self.options.items())
        return tuple(text for flag, value in spelled for text in _flag(flag, value))

    def launch(self, argv: list[str], nproc_per_node: int, *, module: bool, shown_as: str = "") -> int:
        """Runs the processes of this machine and returns their exit code. Raises BadOption."""
        least = self.least_nproc
        spec = LaunchSpec(
            tuple(argv),
            nproc_per_node,
            self.flags,
            module=module,
            shown_as=shown_as,
            how=self.how,
            least_nproc=None if least is None else processes_for(least),
        )
        return launch(spec)


def _flag(flag: str, value: Any) -> tuple[str, ...]:
    return (flag,) if value is True else (f"{flag}={value}",)


def run_job(job: RunJob, place: LaunchPlace, screen: Screen) -> RunOutcome | FinishedRun | None:
    """Returns the outcome, on the machine of rank 0 (None on others), a FinishedRun where no step was left to
    take; typer.Exit with the run's code if it failed.

    Raises WorldMismatch (before anything starts), BadOption.
    """
    outcome_text = run_worker("run_worker", job, _processes(job, place), place, screen, shown_as=job.model)
    return None if outcome_text is None else _OUTCOME.validate_json(outcome_text)


def run_worker(
    worker: str, job: Record, processes: int, place: LaunchPlace, screen: Screen, *, shown_as: str
) -> str | None:
    """Returns the outcome that rank 0 of `outsize.cli.processes.<worker>` left, or None on another machine.

    typer.Exit with the run's code if it failed.
    """
    with JobFolder.temporary() as folder:
        folder.job.write_text(job.to_json(), encoding="utf-8")
        argv = [f"outsize.cli.processes.{worker}", str(folder.path)]
        code = place.launch(argv, processes, module=True, shown_as=shown_as)
        if code:
            screen.emit({"error": _error(folder, code)})
            raise typer.Exit(code)
        return folder.outcome.read_text(encoding="utf-8") if folder.outcome.exists() else None


def _processes(job: RunJob, place: LaunchPlace) -> int:
    """Returns the processes on this machine: as asked, else one per stage, else two; one for devices of
    one.
    """
    wanted = job.plan.axes.world_size if job.plan is not None else _asked_for(job.request)
    if job.devices or (job.plan is not None and places_in(job.plan.cluster)):
        return _one_process(place)
    if place.most_nproc is None:
        return max(1, (wanted or PROCESSES) // place.nnodes)
    processes = processes_for(place.most_nproc)
    if wanted not in (None, processes * place.nnodes) and not place.is_elastic:
        raise WorldMismatch(
            f"the plan needs {wanted} processes, this run has {processes * place.nnodes}",
            numbers=f"--nnodes {place.nnodes}, {processes} processes on each",
            next_step=f"--nproc-per-node {wanted // place.nnodes or 1}, or plan for {processes} devices",
        )
    return processes


def _asked_for(request: PlanRequest) -> int | None:
    """Returns the processes of the stages and axes that are given; None where none are."""
    group = request.mesh(1).group_size
    return request.stages * group if request.stages is not None else None if group == 1 else group


def _one_process(place: LaunchPlace) -> int:
    """Returns 1, for devices of one process. Raises BadOption when several processes are asked for."""
    if place.nproc_per_node not in (None, "1") or place.nnodes > 1:
        raise BadOption(
            "devices are used by one process, and this run has several",
            numbers=f"--nnodes {place.nnodes}, --nproc-per-node {place.nproc_per_node or 1}",
            next_step="leave these out, or plan for a cluster of processes, --cluster local",
        )
    return 1


def _error(folder: JobFolder, code: int) -> object:
    """Returns what --json says: the error that a rank has written, else that the run ended with this code."""
    if folder.error.exists():
        return json.loads(folder.error.read_text(encoding="utf-8"))
    failed = RankFailed("a process of the run failed", numbers=f"exit code {code}", next_step="see stderr")
    return error_document(failed) | {"exit_code": code}
