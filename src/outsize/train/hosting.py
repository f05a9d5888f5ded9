"""A crew of one device whose weights the host keeps."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from outsize.errors import WorldMismatch
from outsize.ir.plan import Plan
from outsize.run.host_moves import HostMoves
from outsize.run.hosted import Hosted
from outsize.run.on_disk import Folder
from outsize.run.residency import Residency
from outsize.run.streams import TorchStreams
from outsize.run.together import OnePlace
from outsize.schedules.offload import ROOM
from outsize.train.crew import LocalCrew
from outsize.train.devices import together_on


def hosted_crew(
    model: nn.Module,
    plan: Plan,
    world_size: int,
    places: tuple[str, ...] | None,
    folder: str | Path | None = None,
) -> LocalCrew:
    """All stages on one device of this process; what the host has of them in files of `folder`.

    Raises WorldMismatch for several processes or devices.
    """
    found = set(places or ())
    if world_size > 1 or len(found) > 1:
        raise WorldMismatch(
            "weights on the host are for one process with one device",
            numbers=f"{world_size} processes, devices {', '.join(sorted(found)) or 'unnamed'}",
            next_step="--nproc-per-node 1, or a plan whose weights the devices hold",
        )
    place = places[0] if places else _here(plan)
    inner = OnePlace() if place == "cpu" else together_on((place,))
    files = None if folder is None else Folder(Path(folder))
    residency = Residency(model, TorchStreams((place,)), place, files)
    hosted = Hosted(inner, residency, None if files is None else files.keep)
    crew = LocalCrew(plan, hosted)
    room = ROOM if plan.weights == "host" else len(plan.stages)
    crew.moves, crew.landing = HostMoves(residency, room), hosted.landing
    return crew


def _here(plan: Plan) -> str:
    """The GPU of this process, unless there is none or the plan is for a CPU."""
    if torch.cuda.is_available() and not plan.stages[0].device.startswith("cpu"):
        return f"cuda:{torch.cuda.current_device()}"
    return "cpu"
