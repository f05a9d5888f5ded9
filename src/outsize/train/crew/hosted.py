"""Lets weights stay on the host: each rank, a process with one device, loads its own stages; or the host
computes some stages of a rank, and their weights never move.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from outsize.device.accelerators import CPU, current_device, is_accelerator
from outsize.device.streams import TorchStreams
from outsize.errors import WorldMismatch
from outsize.ir.plan import Plan
from outsize.run.host.copy_lane import CopyLane
from outsize.run.host.mmap import FileBackedMemory
from outsize.run.host.residency import Residency
from outsize.run.interpreter.in_process import InProcessRanks, SingleDevice
from outsize.run.moves.boundary_values import BoundaryValues
from outsize.run.moves.host import HostMoves
from outsize.run.moves.host_stages import HostSide
from outsize.schedules.offload import ROOM
from outsize.train.context.run_context import RunContext
from outsize.train.crew.devices import in_process_ranks


def hosted(run: RunContext, folder: str | Path | None = None) -> RunContext:
    """Returns a run that brings the stages of this process to its device in turn.

    What stays on the host is in files of `folder`, or in memory.
    """
    place = _place(run)
    files = None if folder is None else FileBackedMemory(Path(folder))
    streams = TorchStreams((place,))
    residency = Residency(run.whole, streams, place, files, threaded=place != "cpu")
    policy = run.plan.weight_policy
    lane = CopyLane(streams, place, both=True) if policy.values_on_host else None
    return replace(
        run,
        moves=HostMoves(residency, len(run.plan.stages) if policy.stays_loaded else ROOM),
        values=BoundaryValues(lane, residency.copy_weight_view),
    )


def with_host_stages(run: RunContext) -> RunContext:
    """Returns a run that computes some stages on the host of their devices."""
    ranks = {stage: run.plan.ranks[stage] for stage in run.stages}
    devices = {stage: run.device or run.together.device(rank) for stage, rank in ranks.items()}
    places = {stage: str(device or CPU) for stage, device in devices.items()}
    return replace(run, values=HostSide(run.plan.host_stages, places))


def ranks_beside_host(plan: Plan, places: tuple[str, ...] | None) -> InProcessRanks:
    """Returns the runner of a process that has all ranks, on these devices or all on the current one."""
    return in_process_ranks(places or (_current_place(plan),) * plan.axes.pp)


def _place(run: RunContext) -> str:
    """Returns the name of the one device of this process."""
    return str(run.device or run.together.device(0) or CPU)


def ranks_on_one_device(plan: Plan, places: tuple[str, ...] | None) -> InProcessRanks:
    """Returns the runner of a process that has the stages of all ranks on one device.

    Raises WorldMismatch for several devices.
    """
    place = _one_place(plan, places)
    return SingleDevice() if place == "cpu" else in_process_ranks((place,))


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
