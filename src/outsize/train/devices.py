"""The devices of one process: what the user names, and where each rank of a plan goes.

    devices=["cuda:0", "cuda:1"]     one rank on each
    devices=["cuda:0", "cuda:0"]     both on one: nothing is copied
    devices=["cuda:0", "cpu"]        unequal ones: values are staged in page-locked memory

A plan that was made for such devices names them (`cuda:0`, `cpu`; `cuda:0/1` is its second rank on cuda:0).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from outsize.errors import BadOption, UnknownDevice, WorldMismatch
from outsize.ir.devices import places_in
from outsize.ir.plan import Plan
from outsize.run.device_transport import Places
from outsize.run.host_moves import HostMoves
from outsize.run.sharded import Sharded
from outsize.run.streams import TorchStreams
from outsize.run.together import OnePlace, Together
from outsize.train.crew import Crew


def places_of(devices: Sequence[str | torch.device]) -> tuple[str, ...]:
    """Their names in full: `cuda:0`, `cpu`. Raises UnknownDevice, and BadOption for none or doubled ones."""
    if isinstance(devices, str | torch.device) or not devices:
        raise BadOption(
            f"devices is {devices!r}; it must be a list with a device for each rank",
            next_step='devices=["cuda:0", "cuda:1"]',
        )
    found = tuple(_place(device) for device in devices)
    doubled = next((place for place in found if found.count(place) > 1), None)
    if doubled is not None and len(set(found)) > 1:
        raise BadOption(
            f"devices names {doubled} {found.count(doubled)} times beside others",
            numbers=f"{', '.join(found)}",
            next_step="name each once; schedule='interleaved' puts several stages on each",
        )
    return found


def cluster_of(places: tuple[str, ...], stages: int | None) -> str:
    """By name, for the planner; one device serves any number of stages."""
    if len(set(places)) == 1:
        places = places[:1] * max(len(places), stages or 1)
    return f"{len(places)}xcpu" if set(places) == {"cpu"} else ",".join(places)


def places_for(plan: Plan, devices: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The place of each rank: of the given devices, or as the plan's stages say; None: where the model is.

    Replicas have devices of their own where there are as many (rank p of replica r of n is number p * n + r);
    one device alone runs them one after the other. Raises WorldMismatch for another number.
    """
    ranks = plan.axes.pp * replicas_beside(plan)
    if devices is None:
        return _named(plan)
    if len(devices) == ranks:
        return devices
    if len(set(devices)) == 1:
        return devices[:1] * plan.axes.pp
    raise WorldMismatch(
        f"the plan wants {ranks} devices, devices names {len(devices)}",
        numbers=f"{len(plan.stages)} stages on {ranks} ranks; {', '.join(devices)}",
        next_step=f"name {ranks} devices, or leave out plan= so that one is made for these",
    )


def replicas_beside(plan: Plan) -> int:
    """How many pipelines of the plan can run side by side in one process."""
    alone = plan.form == "modules" or plan.axes.used_besides({"pp", "dp_replicate"})
    return 1 if alone else plan.axes.dp_replicate


def together_on(places: tuple[str, ...] | None, replicas: int = 1) -> Together:
    """The ranks of one process there; None: where the model is."""
    return OnePlace() if places is None else Places(TorchStreams(places), places, replicas)


def insist_on_one_device(crew: Crew, stages: int) -> None:
    """Raise BadOption where a model's own Python cannot run: one process has stages on several devices, or
    replicas share the weights.
    """
    if isinstance(crew.moves, Sharded):
        raise BadOption(
            "generate runs the model's own Python, which wants whole weights, and replicas share them here",
            numbers=f"of each weight this rank has a part; {len(crew.stages)} of {stages} stages",
            next_step="full_state_dict(to=...), and load the folder with from_pretrained",
        )
    found = dict.fromkeys(str(crew.device_of(stage)) for stage in range(stages))
    if isinstance(crew.moves, HostMoves) and set(found) - {"None", "cpu"}:
        raise BadOption(
            "generate runs the model's own Python, whose weights are on the host and buffers on the device",
            numbers=f"{', '.join(found)}",
            next_step="save with full_state_dict(to=...) and load where there is room for them",
        )
    if crew.world_size == 1 and len(found) > 1:
        raise BadOption(
            "generate runs the model's own Python, whose modules are on several devices of this process",
            numbers=f"{', '.join(found)}",
            next_step="a process per device (outsize run), or save with full_state_dict(to=...) and load",
        )


def _named(plan: Plan) -> tuple[str, ...] | None:
    """The devices of the plan's ranks where it was made for those of one process and all of them are here."""
    first = {rank: stage.device for stage, rank in reversed(list(zip(plan.stages, plan.ranks, strict=True)))}
    names = tuple(first[rank] for rank in range(plan.axes.pp))
    listed = tuple(map(_place, places_in(plan.cluster)))
    if listed:
        return tuple(
            chain.from_iterable(_beside(_place(name.partition("/")[0]), listed, plan) for name in names)
        )
    try:
        found = tuple(_place(name.partition("/")[0]) for name in names)
    except UnknownDevice:
        return None  # a plan for other machines, tried here
    return found if len(set(found)) > 1 else None


def _beside(first: str, listed: tuple[str, ...], plan: Plan) -> tuple[str, ...]:
    """The devices of all replicas of a rank, from that of the first on. One that is named twice is all."""
    at = listed.index(first)
    return listed[at : at + replicas_beside(plan)]


def _place(device: str | torch.device) -> str:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise UnknownDevice(
            f"devices names {device!r}, which is no device", next_step='devices=["cuda:0", "cpu"]'
        ) from None
    if found.type == "cpu":
        return "cpu"
    count = torch.cuda.device_count() if found.type == "cuda" else 0
    if found.type != "cuda":
        raise UnknownDevice(
            f"devices names {device}, and stages run on cuda and cpu", next_step='devices=["cuda:0", "cpu"]'
        )
    index = torch.cuda.current_device() if found.index is None and count else found.index or 0
    if index >= count:
        raise UnknownDevice(
            f"devices names {device}, which is not here",
            numbers=f"torch sees {count} CUDA device{'' if count == 1 else 's'}",
            next_step=f'devices=["cuda:{count - 1}"] * 2 puts two ranks on one'
            if count
            else "outsize doctor",
        )
    return f"cuda:{index}"
