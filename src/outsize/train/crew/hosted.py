"""Builds the crew for weights that stay on the host; each rank, a process with one device, loads its own
stages.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch import nn

from outsize.device.accelerators import CPU, current_device, is_accelerator
from outsize.device.streams import TorchStreams
from outsize.errors import WorldMismatch
from outsize.ir.plan import Plan
from outsize.run.host.copy_lane import CopyLane
from outsize.run.host.mmap import FileBackedMemory
from outsize.run.host.residency import Residency
from outsize.run.interpreter.in_process import SingleDevice
from outsize.run.moves.boundary_values import BoundaryValues
from outsize.run.moves.host import HostMoves
from outsize.schedules.offload import ROOM
from outsize.train.crew.crew import Crew, CrewOptions, LocalCrew, ProcessCrew, device_of
from outsize.train.crew.devices import in_process_ranks
from outsize.train.ranks.mesh import Mesh


def hosted_crew(
    model: nn.Module,
    plan: Plan,
    group: dist.ProcessGroup | None,
    places: tuple[str, ...] | None,
    folder: str | Path | None = None,
) -> Crew:
    """Returns a crew that brings each rank's stages to its device in turn; without a group, the stages of all
    ranks.

    What stays on the host is in files of `folder`, or in memory. Raises WorldMismatch for several devices of
    one process, or another number of processes.
    """
    if group is None:
        place = _one_place(plan, places)
        together = SingleDevice() if place == "cpu" else in_process_ranks((place,))
        return LocalCrew(plan, together, options=_options(model, plan, place, folder))
    device = device_of(plan)
    mesh = Mesh.of(plan.axes, group, device)
    return ProcessCrew(plan, mesh, device, _options(model, plan, str(device), folder))


def _options(model: nn.Module, plan: Plan, place: str, folder: str | Path | None) -> CrewOptions:
    files = None if folder is None else FileBackedMemory(Path(folder))
    streams = TorchStreams((place,))
    residency = Residency(model, streams, place, files, threaded=place != "cpu")
    policy = plan.weight_policy
    moves = HostMoves(residency, len(plan.stages) if policy.stays_loaded else ROOM)
    lane = CopyLane(streams, place, both=True) if policy.values_on_host else None
    return CrewOptions(moves, BoundaryValues(lane, residency.copy_weight_view))


def _one_place(plan: Plan, places: tuple[str, ...] | None) -> str:
    """Returns the one device of a process that runs all stages.

    Raises WorldMismatch for several devices.
    """
    distinct = set(places or ())
    if plan.axes.pp > 1 or len(distinct) > 1:
        raise WorldMismatch(
            "weights on the host come to one device of a process",
            numbers=f"one process, pp {plan.axes.pp}, devices {', '.join(sorted(distinct)) or 'unnamed'}",
            next_step=f"--nproc-per-node {plan.axes.pp} (outsize check --processes), without devices=",
        )
    return places[0] if places else _current_place(plan)


def _current_place(plan: Plan) -> str:
    """Returns the accelerator's device of this process, unless there is none or the plan is for a CPU."""
    return str(current_device()) if is_accelerator(plan.stages[0].device) else CPU
