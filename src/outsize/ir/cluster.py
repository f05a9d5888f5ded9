"""Cluster: devices with memory and speed, links with latency and bandwidth; parsed from a short name.

Grammar: `[NODESx]COUNTxDEVICE`. `2xcpu`, `8xh100-80gb`, `2x8xh100-80gb` (two nodes of eight), `2x12GB`
(two devices of 12 GB whose speed nobody knows; the figures of an RTX 3090 stand in).
Speeds are vendor peaks of dense matrix multiplication; `Device.source` says where they are from.
"""

from __future__ import annotations

import difflib
import re
from typing import final

from outsize.errors import BadOption, UnknownDevice
from outsize.ir.base import Record

GIB = 1024**3


@final
class Device(Record):
    """One accelerator or CPU process."""

    name: str
    kind: str
    memory_bytes: int
    flops_per_s: dict[str, float]
    bytes_per_s: float
    source: str

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s in `dtype`; fp32's when the table has no such column."""
        return self.flops_per_s.get(dtype, self.flops_per_s["float32"])


@final
class Link(Record):
    """Point-to-point cost model: latency_s + bytes / bytes_per_s (Hockney, 1994)."""

    name: str
    latency_s: float
    bytes_per_s: float

    def seconds(self, size_bytes: int) -> float:
        """Seconds to move `size_bytes` in one message; zero bytes cost nothing."""
        return self.latency_s + size_bytes / self.bytes_per_s if size_bytes else 0.0


@final
class Cluster(Record):
    """Devices in rank order; `devices_per_node` neighbours share the inner link."""

    name: str
    devices: tuple[Device, ...]
    devices_per_node: int
    inner: Link
    outer: Link

    def link(self, rank_a: int, rank_b: int) -> Link:
        """The link between two ranks."""
        same_node = rank_a // self.devices_per_node == rank_b // self.devices_per_node
        return self.inner if same_node else self.outer


LOOPBACK = Link(name="loopback", latency_s=60e-6, bytes_per_s=1.5e9)
PCIE4 = Link(name="pcie4-x16", latency_s=10e-6, bytes_per_s=24e9)
NVLINK3 = Link(name="nvlink3", latency_s=6e-6, bytes_per_s=250e9)
NVLINK4 = Link(name="nvlink4", latency_s=6e-6, bytes_per_s=380e9)
INFINIBAND = Link(name="infiniband-400", latency_s=12e-6, bytes_per_s=45e9)
ETHERNET = Link(name="ethernet-25", latency_s=40e-6, bytes_per_s=2.5e9)


def _speeds(fp32: float, half: float) -> dict[str, float]:
    return {"float32": fp32, "bfloat16": half, "float16": half, "float64": fp32 / 2}


# kind -> (GiB, FLOP/s, memory bytes/s, inner link, source)
_TABLE: dict[str, tuple[float, dict[str, float], float, Link, str]] = {
    "cpu": (24, _speeds(60e9, 30e9), 10e9, LOOPBACK, "one AVX-512 server core, order of magnitude"),
    "v100-32gb": (32, _speeds(15.7e12, 125e12), 900e9, NVLINK3, "NVIDIA V100 datasheet"),
    "a100-40gb": (40, _speeds(19.5e12, 312e12), 1555e9, NVLINK3, "NVIDIA A100 datasheet"),
    "a100-80gb": (80, _speeds(19.5e12, 312e12), 2039e9, NVLINK3, "NVIDIA A100 datasheet"),
    "h100-80gb": (80, _speeds(67e12, 989e12), 3350e9, NVLINK4, "NVIDIA H100 SXM datasheet"),
    "h200-141gb": (141, _speeds(67e12, 989e12), 4800e9, NVLINK4, "NVIDIA H200 datasheet"),
    "l4-24gb": (24, _speeds(30.3e12, 121e12), 300e9, PCIE4, "NVIDIA L4 datasheet"),
    "l40s-48gb": (48, _speeds(91.6e12, 362e12), 864e9, PCIE4, "NVIDIA L40S datasheet"),
    "rtx3090-24gb": (24, _speeds(35.6e12, 71e12), 936e9, PCIE4, "NVIDIA GA102 whitepaper"),
    "rtx4090-24gb": (24, _speeds(82.6e12, 165e12), 1008e9, PCIE4, "NVIDIA AD102 whitepaper"),
}
KINDS = tuple(_TABLE)
_SPEC = re.compile(r"^(?:(\d+)x)?(\d+)x([a-z0-9.\-]+)$")
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)gb$")


def parse_cluster(text: str) -> Cluster:
    """`2xcpu`, `8xh100-80gb`, `2x8xa100-80gb`, `2x12GB` -> Cluster.

    Raises UnknownDevice when the device is not in the table, BadOption when a count is zero.
    """
    match = _SPEC.match(text.strip().lower())
    if match is None:
        raise _unknown(text)
    nodes, count = int(match[1] or 1), int(match[2])
    if nodes < 1 or count < 1:
        raise BadOption(f"cluster {text!r} has no device", next_step="--cluster 2xcpu")
    kind, memory = _kind_and_memory(match[3], text)
    return make_cluster(text, kind, nodes, count, memory)


def make_cluster(name: str, kind: str, nodes: int, count: int, memory_bytes: int | None = None) -> Cluster:
    """A cluster of `nodes` x `count` equal devices of a known kind; memory overrides the table's."""
    gib, speeds, bandwidth, inner, source = _TABLE[kind]
    memory = memory_bytes if memory_bytes is not None else int(gib * GIB)
    devices = tuple(
        Device(
            name=f"{_family(kind)}:{rank}",
            kind=kind,
            memory_bytes=memory,
            flops_per_s=speeds,
            bytes_per_s=bandwidth,
            source=source,
        )
        for rank in range(nodes * count)
    )
    outer = ETHERNET if kind == "cpu" else INFINIBAND
    return Cluster(name=name, devices=devices, devices_per_node=count, inner=inner, outer=outer)


def _family(kind: str) -> str:
    return "cpu" if kind == "cpu" else "cuda"


def _kind_and_memory(device: str, text: str) -> tuple[str, int | None]:
    size = _SIZE.match(device)
    if size is not None:
        return "rtx3090-24gb", int(float(size[1]) * 1e9)
    matches = [kind for kind in KINDS if device == kind or kind.startswith(device + "-")]
    if not matches:
        raise _unknown(text)
    return matches[-1], None


def _unknown(text: str) -> UnknownDevice:
    near = difflib.get_close_matches(text.split("x")[-1].lower(), KINDS, n=1, cutoff=0.4)
    return UnknownDevice(
        f"cluster {text!r} is not known",
        numbers=f"known devices: {', '.join(KINDS)}, a size such as 12GB, or local",
        next_step=f"--cluster 2x{near[0] if near else 'cpu'}",
    )
