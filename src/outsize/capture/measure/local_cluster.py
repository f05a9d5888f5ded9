"""Describes the devices of this machine as a Cluster.

`local` is every accelerator here, or one CPU process per core; `cuda:0,cpu` are the devices of one process.

CPU processes share the machine's memory evenly. A GPU that the device table knows gets its
figures from there; an unknown one gets an RTX 3090's speed and its own memory, and says so.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

import psutil
import torch

from outsize.device.accelerators import (
    CPU,
    accelerator_type,
    all_devices,
    device_count,
    device_type,
    properties,
    spoken,
    type_of,
)
from outsize.errors import UnknownDevice
from outsize.ir.cluster import Cluster, make_cluster, parse_cluster
from outsize.ir.cluster_file import load_cluster
from outsize.ir.hardware.devices import (
    GIB,
    STAND_IN,
    TABLE,
    Device,
    DeviceKind,
    host_link,
    kinds_like,
    places_in,
)
from outsize.ir.hardware.links import Link
from outsize.ir.hardware.memory_share import split_share

_CONNECTORS: Final = frozenset({"pcie", "nvl"})
"""How boards are called that are not on a baseboard; names of kinds have it, too."""


def find_cluster(name: str) -> Cluster:
    """Finds `local`, `cuda:0,cpu`, `2xcpu` with this machine's memory, `lab.json`, or what `parse_cluster`
    knows; each may have a share of its memory, `local:50%`.

    A cluster from a file is called like the file, so that a plan that names it finds it again. Raises what
    `parse_cluster` and `load_cluster` raise.
    """
    plain, share = split_share(name)
    cluster = _found(plain)
    return cluster if share is None else cluster.shared(share, name)


def _found(name: str) -> Cluster:
    if name == "local":
        return _accelerators() if accelerator_type() else _cpus(name, psutil.cpu_count(logical=True) or 1)
    places = places_in(name)
    if places:
        return _of_places(name, places)
    if name.endswith(".json"):
        return load_cluster(name).model_copy(update={"name": name})
    cluster = parse_cluster(name)
    if cluster.devices[0].kind == "cpu" and cluster.nodes == 1:
        return _cpus(name, len(cluster.devices))
    return cluster


def cluster_of_run(kind_of_devices: str, machines: Sequence[int]) -> Cluster:
    """Returns the devices of a run: one for each process, of which each machine has so many.

    All accelerators are taken to be like the first one here. One machine with all its devices is `local`.
    """
    if kind_of_devices == CPU:
        return find_cluster(f"{sum(machines)}xcpu")
    local = find_cluster("local")
    if tuple(machines) == (len(local.devices),):
        return local
    kind, memory_bytes = local.devices[0].kind, local.devices[0].memory_bytes
    equal = f"{len(machines)}x{machines[0]}x{kind}" if len(machines) > 1 else f"{machines[0]}x{kind}"
    name = equal if len(set(machines)) == 1 else "+".join(f"{count}x{kind}" for count in machines)
    cluster = parse_cluster(name)
    devices = tuple(d.model_copy(update={"memory_bytes": memory_bytes}) for d in cluster.devices)
    return _called(kind_of_devices, cluster.model_copy(update={"devices": devices}))


def _called(kind: str, cluster: Cluster) -> Cluster:
    """Returns the cluster with torch's names of its devices: `xpu:0` for the catalogue's `cuda:0`."""
    named = (d.model_copy(update={"name": f"{kind}:{d.name.partition(':')[2]}"}) for d in cluster.devices)
    return cluster.model_copy(update={"devices": tuple(named)})


def _cpus(name: str, count: int) -> Cluster:
    return make_cluster(name, "cpu", 1, count, psutil.virtual_memory().total // count)


def _of_places(name: str, places: Sequence[str]) -> Cluster:
    """Returns the devices of one process; one that is named several times shares its memory among them."""
    if set(places) == {"cpu"}:
        return _cpus(name, len(places))
    total, met = Counter(places), Counter[str]()
    devices: list[Device] = []
    for place in places:
        kind, memory = _kind_and_memory(place)
        label = f"{place}/{met[place]}" if met[place] else place
        devices.append(TABLE[kind].device(label, memory // total[place]))
        met[place] += 1
    links = [link for device in devices if (link := _link(device, "cpu" in total)) is not None]
    slowest = min(links, key=lambda link: link.bytes_per_s)
    return Cluster(
        name=name, devices=tuple(devices), devices_per_node=len(devices), inner=slowest, outer=slowest
    )


def _link(device: Device, to_host: bool) -> Link | None:
    return host_link(device) if to_host or device.kind == "cpu" else TABLE[device.kind].link


def _kind_and_memory(place: str) -> tuple[str, int]:
    if place == "cpu":
        return "cpu", psutil.virtual_memory().total
    index, count = int(place.partition(":")[2]), device_count()
    if index >= count:
        raise UnknownDevice(
            f"{place} is not here",
            numbers=f"torch sees {count} {spoken(type_of(place))} device{'' if count == 1 else 's'}",
            next_step="--cluster 2xh100, or another cluster that need not be here",
        )
    known = properties(torch.device(place))
    return device_kind(known.name, known.memory_bytes), known.memory_bytes


def _accelerators() -> Cluster:
    known = properties(all_devices()[0])
    kind = device_kind(known.name, known.memory_bytes)
    return _called(device_type(), make_cluster("local", kind, 1, device_count(), known.memory_bytes))


def device_kind(name: str, memory_bytes: int) -> str:
    """Returns the kind in the device table for a driver's GPU name: `NVIDIA A100-SXM4-40GB` -> `a100-40gb`.

    The longest run of words that names kinds of the table selects them (`RTX PRO 6000` is `rtxpro6000`); of
    these the one with the right connector and the nearest memory is taken. Without any the kind is STAND_IN.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    runs = ("".join(words[at : at + size]) for size in (3, 2, 1) for at in range(len(words) - size + 1))
    kinds = next((matching for run in runs if (matching := kinds_like(run))), [])
    if not kinds:
        return STAND_IN

    def unlike(kind: DeviceKind) -> tuple[float, int]:
        connectors = _CONNECTORS.intersection(kind.name.split("-"))
        return abs(kind.usable_gib - memory_bytes / GIB), len(connectors ^ _CONNECTORS.intersection(words))

    return min(kinds, key=unlike).name
