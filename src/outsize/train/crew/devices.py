"""Chooses the devices of one process: the devices that the user names, and the device of each rank of a plan.

    devices=["cuda:0", "cuda:1"]     one rank on each
    devices=["cuda:0", "cuda:0"]     both ranks on one: nothing is copied
    devices=["cuda:0", "cpu"]        unequal devices: values are staged in page-locked memory

A plan that was made for such devices names them (`cuda:0`, `cpu`; `cuda:0/1` is its second rank on cuda:0).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import torch

from outsize.device.accelerators import (
    CPU,
    accelerator_type,
    current_device,
    device_count,
    is_accelerator,
    spoken,
)
from outsize.device.streams import TorchStreams
from outsize.errors import BadOption, UnknownDevice, WorldMismatch
from outsize.ir.hardware.devices import places_in
from outsize.ir.plan import Plan
from outsize.run.interpreter.in_process import InProcessRanks, SingleDevice
from outsize.run.interpreter.multi_device import MultiDevice
from outsize.run.moves.host import HostMoves
from outsize.train.crew.crew import Crew


def places_of(devices: Sequence[str | torch.device]) -> tuple[str, ...]:
    """Returns the full names of the devices: `cuda:0`, `cpu`.

    Raises UnknownDevice, and BadOption for an empty list or a device that is named twice.
    """
    if isinstance(devices, str | torch.device) or not isinstance(devices, Iterable) or not devices:
        raise BadOption(
            f"devices is {devices!r}; it must be a list with a device for each rank",
            next_step='devices=["cuda:0", "cuda:1"]',
        )
    names = tuple(_place(device) for device in devices)
    repeated = next((place for place in names if names.count(place) > 1), None)
    if repeated is not None and len(set(names)) > 1:
        raise BadOption(
            f"devices names {repeated} {names.count(repeated)} times beside others",
            numbers=f"{', '.join(names)}",
            next_step="name each once; schedule='interleaved' puts several stages on each",
        )
    return names


def cluster_of(places: tuple[str, ...], stages: int | None) -> str:
    """Returns the cluster of these devices by name, for the planner; one device can hold any number of
    stages.
    """
    if len(set(places)) == 1:
        places = places[:1] * max(len(places), stages or 1)
    return f"{len(places)}xcpu" if set(places) == {"cpu"} else ",".join(places)


def places_for(plan: Plan, devices: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Returns the device of each rank: one of `devices`, or the one that the plan names; None: the model's
    own.

    Replicas have devices of their own where there are enough (rank p of replica r of n has number p * n + r);
    a single device runs them one after the other. Raises WorldMismatch for another number of devices.
    """
    ranks = plan.axes.pp * concurrent_replicas(plan)
    if devices is None:
        return _devices_in_plan(plan)
    if len(devices) == ranks:
        return devices
    if len(set(devices)) == 1:
        return devices[:1] * plan.axes.pp
    raise WorldMismatch(
        f"the plan needs {ranks} devices, devices names {len(devices)}",
        numbers=f"{len(plan.stages)} stages on {ranks} ranks; {', '.join(devices)}",
        next_step=f"name {ranks} devices, or leave out plan= so that one is made for these",
    )


def concurrent_replicas(plan: Plan) -> int:
    """Returns how many pipelines of the plan can run at the same time in one process."""
    is_single = plan.form == "modules" or plan.axes.has_parts
    return 1 if is_single else plan.axes.copies


def in_process_ranks(places: tuple[str, ...] | None, replicas: int = 1) -> InProcessRanks:
    """Returns the runner of one process's ranks on these devices; None: all on the model's own device."""
    return SingleDevice() if places is None else MultiDevice(TorchStreams(places), places, replicas)


def insist_on_one_device(crew: Crew, stages: int, what: str) -> None:
    """Raises BadOption where a model's own Python cannot run; `what` runs it.

    That is where one process has stages on several devices.
    """
    device_names = dict.fromkeys(str(crew.device_of(stage)) for stage in range(stages))
    if isinstance(crew.moves, HostMoves) and set(device_names) - {"None", "cpu"}:
        raise BadOption(
            f"{what} runs the model's own Python, whose weights are on the host and buffers on the device",
            numbers=f"{', '.join(device_names)}",
            next_step="save with full_state_dict(to=...) and load where there is room for them",
        )
    if crew.world_size == 1 and len(device_names) > 1:
        raise BadOption(
            f"{what} runs the model's own Python, whose modules are on several devices of this process",
            numbers=f"{', '.join(device_names)}",
            next_step="a process per device (outsize run), or save with full_state_dict(to=...) and load",
        )


def _devices_in_plan(plan: Plan) -> tuple[str, ...] | None:
    """Returns the devices that the plan names for its ranks, if it was made for this process's devices."""
    first_device = {
        rank: stage.device for stage, rank in reversed(list(zip(plan.stages, plan.ranks, strict=True)))
    }
    names = tuple(first_device[rank] for rank in range(plan.axes.pp))
    listed = tuple(map(_place, places_in(plan.cluster)))
    if listed:
        return tuple(
            chain.from_iterable(
                _replica_devices(_place(name.partition("/")[0]), listed, plan) for name in names
            )
        )
    try:
        devices = tuple(_place(name.partition("/")[0]) for name in names)
    except UnknownDevice:
        return None  # the plan was made for other machines and is tried on this one
    return devices if len(set(devices)) > 1 else None


def _replica_devices(first: str, listed: tuple[str, ...], plan: Plan) -> tuple[str, ...]:
    """Returns the devices of all replicas of a rank; `first` is the first replica's."""
    position = listed.index(first)
    return listed[position : position + concurrent_replicas(plan)]


def _place(device: str | torch.device) -> str:
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise UnknownDevice(
            f"devices names {device!r}, which is no device", next_step='devices=["cuda:0", "cpu"]'
        ) from None
    if parsed.type == CPU:
        return CPU
    kind = accelerator_type()
    if not is_accelerator(parsed) or (kind is not None and parsed.type != kind):
        here = CPU if kind is None else f"{kind} and {CPU}"
        raise UnknownDevice(
            f"devices names {device}, and stages run on {here}", next_step='devices=["cuda:0", "cpu"]'
        )
    count = device_count()
    index = current_device().index if parsed.index is None and count else parsed.index or 0
    if index >= count:
        raise UnknownDevice(
            f"devices names {device}, which is not here",
            numbers=f"torch sees {count} {spoken(parsed.type)} device{'' if count == 1 else 's'}",
            next_step=f'devices=["{parsed.type}:{count - 1}"] * 2 puts two ranks on one'
            if count
            else "outsize doctor",
        )
    return f"{parsed.type}:{index}"
