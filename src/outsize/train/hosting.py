"""Weights that the host keeps: a crew whose ranks, each a process with one device, bring their own stages."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from outsize.errors import WorldMismatch
from outsize.ir.plan import Plan
from outsize.run.host_moves import HostMoves
from outsize.run.landing import Landing
from outsize.run.lane import Lane
from outsize.run.on_disk import Folder
from outsize.run.residency import Residency
from outsize.run.streams import TorchStreams
from outsize.run.together import OnePlace
from outsize.run.values import Values
from outsize.schedules.offload import ROOM
from outsize.train.crew import Crew, LocalCrew, ProcessCrew, device_of
from outsize.train.devices import together_on
from outsize.train.mesh import Mesh


def hosted_crew(
    model: nn.Module,
    plan: Plan,
    group: dist.ProcessGroup | None,
    places: tuple[str, ...] | None,
    folder: str | Path | None = None,
) -> Crew:
    """Each rank's stages on its device, all ranks' without a group; what the host has of them in files of
    `folder`.

    Raises WorldMismatch for several devices of one process, or another number of processes.
    """
    crew, place = _alone(plan, places) if group is None else _one_of(plan, group)
    files = None if folder is None else Folder(Path(folder))
    streams = TorchStreams((place,))
    residency = Residency(model, streams, place, files)
    residency.landing = Landing(threaded=place != "cpu", room=residency.room, files=files)
    crew.moves = HostMoves(residency, len(plan.stages) if plan.weights == "host-optimizer" else ROOM)
    lane = Lane(streams, place, both=True) if plan.weights == "host-activations" else None
    crew.values = Values(lane, residency.apart)
    return crew


def _one_of(plan: Plan, group: dist.ProcessGroup) -> tuple[Crew, str]:
    device = device_of(plan)
    return ProcessCrew(plan, Mesh(plan.axes, group, device), device), str(device)


def _alone(plan: Plan, places: tuple[str, ...] | None) -> tuple[Crew, str]:
    found = set(places or ())
    if plan.axes.pp > 1 or len(found) > 1:
        raise WorldMismatch(
            "weights on the host come to one device of a process",
            numbers=f"one process, pp {plan.axes.pp}, devices {', '.join(sorted(found)) or 'unnamed'}",
            next_step=f"--nproc-per-node {plan.axes.pp} (outsize check --processes), without devices=",
        )
    place = places[0] if places else _here(plan)
    return LocalCrew(plan, OnePlace() if place == "cpu" else together_on((place,))), place


def _here(plan: Plan) -> str:
    """The GPU of this process, unless there is none or the plan is for a CPU."""
    if torch.cuda.is_available() and not plan.stages[0].device.startswith("cpu"):
        return f"cuda:{torch.cuda.current_device()}"
    return "cpu"
