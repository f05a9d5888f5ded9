"""Start the processes of a MODEL run and bring back what rank 0 found. Needs no torch itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import typer

from outsize.cli.job import Folder, Job, Outcome
from outsize.cli.screen import Screen, error_document
from outsize.errors import BadOption, RankFailed, WorldMismatch
from outsize.ir.base import Record
from outsize.ir.devices import places_in
from outsize.train.launch import processes_for, run_script

PROCESSES = 2


@final
@dataclass(frozen=True)
class Place:
    """How many processes on this machine, and torchrun's other options as they were given, by name."""

    nproc_per_node: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def nnodes(self) -> int:
        """Machines; of MIN:MAX the least."""
        least = str(self.options.get("nnodes", "1")).split(":")[0]
        return int(least) if least.isdigit() and int(least) else 1

    @property
    def flags(self) -> tuple[str, ...]:
        """The options as torchrun spells them."""
        spelled = ((f"--{name.replace('_', '-')}", value) for name, value in self.options.items())
        return tuple(text for flag, value in spelled for text in _flag(flag, value))

    def launch(self, argv: list[str], nproc_per_node: int, *, module: bool, shown_as: str = "") -> int:
        """Run the processes of this machine and return their exit code."""
        return run_script(argv, nproc_per_node, options=self.flags, module=module, shown_as=shown_as)


def _flag(flag: str, value: Any) -> tuple[str, ...]:
    return (flag,) if value is True else (f"{flag}={value}",)


def run_job(job: Job, place: Place, screen: Screen) -> Outcome | None:
    """The outcome, on the machine of rank 0 (None on others); typer.Exit with the run's code if it failed.

    Raises: WorldMismatch (before anything starts), BadOption.
    """
    found = run_worker("worker", job, _processes(job, place), place, screen, shown_as=job.model)
    return None if found is None else Outcome.model_validate_json(found)


def run_worker(
    worker: str, job: Record, processes: int, place: Place, screen: Screen, *, shown_as: str
) -> str | None:
    """What rank 0 of so many `outsize.cli.<worker>` left as its outcome for the job, if it is here.

    typer.Exit with the run's code if it failed.
    """
    with Folder.temporary() as folder:
        folder.job.write_text(job.to_json(), encoding="utf-8")
        argv = [f"outsize.cli.{worker}", str(folder.path)]
        code = place.launch(argv, processes, module=True, shown_as=shown_as)
        if code:
            screen.emit({"error": _error(folder, code)})
            raise typer.Exit(code)
        return folder.outcome.read_text(encoding="utf-8") if folder.outcome.exists() else None


def _processes(job: Job, place: Place) -> int:
    """Processes on this machine: as asked, else one per stage, else two; one for devices of one."""
    wanted = job.plan.axes.world_size if job.plan is not None else job.stages
    if job.devices or (job.plan is not None and places_in(job.plan.cluster)):
        return _one_process(place)
    if place.nproc_per_node is None:
        return max(1, (wanted or PROCESSES) // place.nnodes)
    processes = processes_for(place.nproc_per_node)
    if wanted not in (None, processes * place.nnodes):
        raise WorldMismatch(
            f"the plan wants {wanted} processes, this run has {processes * place.nnodes}",
            numbers=f"--nnodes {place.nnodes}, {processes} processes on each",
            next_step=f"--nproc-per-node {wanted // place.nnodes or 1}, or plan for {processes} devices",
        )
    return processes


def _one_process(place: Place) -> int:
    """Of a plan for the devices of one."""
    if place.nproc_per_node not in (None, "1") or place.nnodes > 1:
        raise BadOption(
            "the devices are of one process",
            numbers=f"--nnodes {place.nnodes}, --nproc-per-node {place.nproc_per_node or 1}",
            next_step="leave these out, or plan for a cluster of processes, --cluster local",
        )
    return 1


def _error(folder: Folder, code: int) -> object:
    """What --json says: the error that a rank has left, else that the run ended with this code."""
    if folder.error.exists():
        return json.loads(folder.error.read_text(encoding="utf-8"))
    failed = RankFailed("a process of the run failed", numbers=f"exit code {code}", next_step="see stderr")
    return error_document(failed) | {"exit_code": code}
