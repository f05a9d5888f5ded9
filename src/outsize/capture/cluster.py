"""The devices of this machine as a Cluster: `local` is every CUDA device, or one CPU process per core.

CPU processes share the machine's memory evenly. A GPU that the device table knows gets its
figures from there; an unknown one gets an RTX 3090's speed and its own memory, and says so.
"""

from __future__ import annotations

import re

import psutil
import torch

from outsize.ir.cluster import Cluster, make_cluster, parse_cluster
from outsize.ir.cluster_file import load_cluster
from outsize.ir.devices import GIB, STAND_IN, kinds_like


def find_cluster(name: str) -> Cluster:
    """`local`, `2xcpu` with this machine's memory, a cluster file (`lab.json`), or a name of `parse_cluster`.

    A cluster from a file is called like the file: a plan that names it finds it again. Raises what
    `parse_cluster` and `load_cluster` raise.
    """
    if name == "local":
        return _cuda() if torch.cuda.is_available() else _cpus(name, psutil.cpu_count(logical=True) or 1)
    if name.endswith(".json"):
        return load_cluster(name).model_copy(update={"name": name})
    cluster = parse_cluster(name)
    if cluster.devices[0].kind == "cpu" and cluster.nodes == 1:
        return _cpus(name, len(cluster.devices))
    return cluster


def _cpus(name: str, count: int) -> Cluster:
    return make_cluster(name, "cpu", 1, count, psutil.virtual_memory().total // count)


def _cuda() -> Cluster:
    count = torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    kind = device_kind(properties.name, properties.total_memory)
    return make_cluster("local", kind, 1, count, properties.total_memory)


def device_kind(name: str, memory_bytes: int) -> str:
    """The row for what the driver calls a GPU: `NVIDIA A100-SXM4-40GB` -> `a100-40gb`.

    By the first word that names kinds of the table; of these the one with the right connector and the nearest
    memory. The stand-in when there is none.
    """
    low = name.lower().replace("rtx ", "rtx").replace("geforce ", "")
    words = re.findall(r"[a-z]+\d+[a-z]*", low)
    kinds = next((found for word in words if (found := kinds_like(word))), [])
    if not kinds:
        return STAND_IN
    pcie = "pcie" in low
    return min(
        kinds,
        key=lambda k: (abs(k.usable_gib - memory_bytes / GIB), k.name.endswith("-pcie") != pcie),
    ).name
