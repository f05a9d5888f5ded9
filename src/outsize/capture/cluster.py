"""The devices of this machine as a Cluster: `local` is every CUDA device, or one CPU process per core.

CPU processes share the machine's memory evenly. A GPU that the device table knows gets its
figures from there; an unknown one gets an RTX 3090's speed and its own memory, and says so.
"""

from __future__ import annotations

import re

import psutil
import torch

from outsize.ir.cluster import KINDS, Cluster, make_cluster, parse_cluster


def find_cluster(name: str) -> Cluster:
    """`local`, `2xcpu` with this machine's memory, or any name of `parse_cluster`."""
    if name == "local":
        return _cuda() if torch.cuda.is_available() else _cpus(name, psutil.cpu_count(logical=True) or 1)
    cluster = parse_cluster(name)
    if cluster.devices[0].kind == "cpu" and cluster.devices_per_node == len(cluster.devices):
        return _cpus(name, len(cluster.devices))
    return cluster


def _cpus(name: str, count: int) -> Cluster:
    return make_cluster(name, "cpu", 1, count, psutil.virtual_memory().total // count)


def _cuda() -> Cluster:
    count = torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    return make_cluster("local", _kind(properties.name), 1, count, properties.total_memory)


def _kind(name: str) -> str:
    """`NVIDIA H200` -> `h200-141gb`, by the first word that begins a known kind."""
    words = re.findall(r"[a-z]+\d+\w*", name.lower().replace("rtx ", "rtx"))
    found = [kind for word in words for kind in KINDS if kind.startswith(word)]
    return found[-1] if found else "rtx3090-24gb"
