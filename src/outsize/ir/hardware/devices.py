"""Lists memory, peaks and links of each kind of device, from the vendor's data sheet; `source` names it.

Peaks are dense (without structured sparsity) FLOP/s by dtype, at the boost clock. `float32` is the speed of
ordinary cores; `tfloat32` that of tensor cores with float32: PyTorch uses them for convolutions
(`cudnn.allow_tf32`), not for matmuls. A dtype without a column runs as fast as float32: bfloat16 on Volta and
Turing is emulated, float16 on a P40 computes in float32.

    vendor_gb    the nominal memory
    usable_gib   what the driver leaves: `total_memory` of torch, "total capacity" in its out-of-memory errors
    context_mib  taken before the first tensor (nvidia-smi after a first kernel); order of magnitude, but of
                 Hopper: an H100 holds 767 MiB beyond torch's segments in the first of 27 models' steps, and
                 620 before it (driver 580, CUDA 13.0, docs/gpu-runs.md); a B200 is taken to hold as much

A CPU's row is measured: one core of a 2025 server, one thread, torch 2.13, 2026-11. oneDNN's convolutions
reach 226 GFLOP/s in float32, large bfloat16 matmuls 425; additions 28 to 60 GB/s from memory, 110 from cache.
"""

from __future__ import annotations

import re
from typing import Final, final

from pydantic import Field, field_validator

from outsize.ir.base import Bytes, DeviceName, Record, Speed
from outsize.ir.hardware.links import LINKS, Link
from outsize.ir.hardware.memory_share import split_share

GIB: Final = 1024**3
MIB: Final = 1024**2


@final
class Device(Record):
    """Describes one accelerator or CPU process.

    `memory_bytes` is all that a process can get, of which `context_bytes` are used before the first tensor
    and `matmul_bytes` by cuBLAS from the first backward on. `price_per_hour` is what a user says that it
    costs, in any currency, or None. `host_s` is what this machine's host needs to launch an op of a training
    loop, or None where `outsize doctor --gpu` has not measured it.
    """

    name: DeviceName
    kind: str
    memory_bytes: int = Field(gt=0, le=2**62)
    flops_per_s: dict[str, Speed]
    bytes_per_s: Speed
    source: str
    context_bytes: Bytes = 0
    matmul_bytes: Bytes = 0
    price_per_hour: float | None = Field(default=None, ge=0, le=1e12, allow_inf_nan=False)
    host_s: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)

    @property
    def fixed_bytes(self) -> int:
        """Returns what a process uses of the device whatever it computes."""
        return self.context_bytes + self.matmul_bytes

    @field_validator("flops_per_s")
    @classmethod
    def _positive(cls, speeds: dict[str, float]) -> dict[str, float]:
        if "float32" not in speeds:
            raise ValueError("needs float32")
        return speeds

    @property
    def library_bytes(self) -> int:
        """Returns what cuDNN's code takes beside the context; none where both were measured together."""
        return 0 if self.kind.split("-")[0] in _HOPPER_ON else CUDNN_BYTES

    @property
    def is_accelerator(self) -> bool:
        """Returns whether the device has kernels and a memory of its own beside its host's."""
        return self.kind != "cpu"

    def has_tensor_cores(self, dtype: str) -> bool:
        """Returns whether products of the dtype run on tensor cores; float32's convolutions do as TF32."""
        return "tfloat32" in self.flops_per_s or self.flops(dtype) > 4 * self.flops("float32")

    def flops(self, dtype: str) -> float:
        """Returns peak FLOP/s in `dtype` (`float8_e4m3fn` is float8); float32's where the table lacks the
        column.

        Eight bits without a column run as bfloat16.
        """
        if dtype.startswith("float8"):
            dtype = "float8" if "float8" in self.flops_per_s else "bfloat16"
        return self.flops_per_s.get(dtype, self.flops_per_s["float32"])


@final
class DeviceKind(Record):
    """Is a row of the table: a Device without a name, and the links that such machines are sold with."""

    name: str
    vendor_gb: float
    usable_gib: float
    flops_per_s: dict[str, float]
    bytes_per_s: float
    inner: str
    network: str
    context_mib: int
    source: str

    def device(self, name: str, memory_bytes: int | None = None) -> Device:
        """Returns a device of this kind; `memory_bytes` overrides the table's memory."""
        memory = int(self.usable_gib * GIB) if memory_bytes is None else memory_bytes
        return Device(
            name=name,
            kind=self.name,
            memory_bytes=memory,
            flops_per_s=self.flops_per_s,
            bytes_per_s=self.bytes_per_s,
            source=self.source,
            context_bytes=self.context_mib * MIB,
            matmul_bytes=self.matmul_bytes,
        )

    @property
    def matmul_bytes(self) -> int:
        """Returns the workspaces of cuBLAS, one for the thread of the forward and one for autograd's."""
        if self.family == "cpu":
            return 0
        return 2 * (LARGE_WORKSPACE if self.name.split("-")[0] in _HOPPER_ON else SMALL_WORKSPACE)

    @property
    def link(self) -> Link:
        """Returns the link between two devices of one node."""
        return LINKS[self.inner]

    @property
    def family(self) -> str:
        """Returns the type in torch's names of devices: cpu or cuda."""
        return "cpu" if self.name == "cpu" else "cuda"


def _tera(
    fp64: float,
    fp32: float,
    tf32: float | None,
    fp16: float | None,
    bf16: bool = True,
    fp8: float | None = None,
) -> dict[str, float]:
    """Returns FLOP/s by dtype from a data sheet's TFLOP/s."""
    columns = {
        "float64": fp64,
        "float32": fp32,
        "tfloat32": tf32,
        "float16": fp16,
        "bfloat16": fp16 if bf16 else None,
        "float8": fp8,
    }
    return {dtype: value * 1e12 for dtype, value in columns.items() if value is not None}


_PLACE: Final = re.compile(r"cpu|[a-z]+:\d+")
_CPU = {"float64": 120e9, "float32": 240e9, "bfloat16": 480e9}
_P100, _P100_PCIE = _tera(5.3, 10.6, None, 21.2, bf16=False), _tera(4.7, 9.3, None, 18.7, bf16=False)
_P40 = _tera(0.37, 11.8, None, None)
_V100, _V100_PCIE = _tera(7.8, 15.7, None, 125, bf16=False), _tera(7.0, 14.0, None, 112, bf16=False)
_T4 = _tera(0.25, 8.1, None, 65, bf16=False)
_A100 = _tera(19.5, 19.5, 156, 312)
_A10G = _tera(0.98, 31.5, 35, 70)
_RTX3090 = _tera(0.56, 35.6, 35.6, 71.2)
_L4, _L40S = _tera(0.47, 30.3, 60, 121, fp8=242), _tera(1.43, 91.6, 183, 362, fp8=733)
_RTX4090 = _tera(1.29, 82.6, 82.6, 165.2, fp8=330)
_H100, _H100_PCIE = _tera(67, 67, 494, 989, fp8=1979), _tera(51, 51, 378, 756, fp8=1513)
_H800 = _tera(1, 67, 494, 989, fp8=1979)
_B200 = _tera(37, 75, 1100, 2250, fp8=4500)

# The columns are kind, GB, usable GiB, peaks, GB/s of memory, link, network between nodes, context in MiB,
# source.
_ROWS: tuple[tuple[str, float, float, dict[str, float], float, str, str, int, str], ...] = (
    ("cpu", 24, 24, _CPU, 60, "loopback", "eth25", 0, "measured on one core, 2026-11"),
    ("p40-24gb", 24, 22.38, _P40, 346, "pcie3", "eth25", 200, "NVIDIA Tesla P40 data sheet"),
    ("p100-16gb", 16, 15.89, _P100, 732, "nvlink1", "ib100", 250, "NVIDIA P100 data sheet (SXM2)"),
    ("p100-16gb-pcie", 16, 15.89, _P100_PCIE, 732, "pcie3", "eth25", 250, "NVIDIA P100 data sheet (PCIe)"),
    ("v100-32gb", 32, 31.73, _V100, 900, "nvlink2", "ib100", 310, "NVIDIA V100 data sheet (SXM2)"),
    ("v100-16gb", 16, 15.77, _V100, 900, "nvlink2", "ib100", 310, "NVIDIA V100 data sheet (SXM2)"),
    ("v100-32gb-pcie", 32, 31.73, _V100_PCIE, 900, "pcie3", "eth25", 310, "NVIDIA V100 data sheet (PCIe)"),
    ("v100-16gb-pcie", 16, 15.77, _V100_PCIE, 900, "pcie3", "eth25", 310, "NVIDIA V100 data sheet (PCIe)"),
    ("t4-16gb", 16, 14.56, _T4, 320, "pcie3", "eth25", 250, "NVIDIA T4 data sheet"),
    ("a100-80gb", 80, 79.15, _A100, 2039, "nvlink3", "ib200", 420, "NVIDIA A100 data sheet (SXM4)"),
    ("a100-40gb", 40, 39.39, _A100, 1555, "nvlink3", "ib200", 420, "NVIDIA A100 data sheet (SXM4)"),
    ("a100-80gb-pcie", 80, 79.15, _A100, 1935, "pcie4", "eth100", 420, "NVIDIA A100 data sheet (PCIe)"),
    ("a100-40gb-pcie", 40, 39.39, _A100, 1555, "pcie4", "eth100", 420, "NVIDIA A100 data sheet (PCIe)"),
    ("a800-80gb", 80, 79.15, _A100, 2039, "nvlink3-8", "ib200", 420, "NVIDIA A800 data sheet (SXM4)"),
    ("a10g-24gb", 24, 22.03, _A10G, 600, "pcie4", "eth25", 350, "NVIDIA A10G data sheet (AWS G5)"),
    ("rtx3090-24gb", 24, 23.57, _RTX3090, 936, "pcie4", "eth10", 350, "NVIDIA GA102 whitepaper"),
    ("l4-24gb", 24, 22.03, _L4, 300, "pcie4", "eth25", 350, "NVIDIA L4 data sheet"),
    ("l40s-48gb", 48, 44.39, _L40S, 864, "pcie4", "eth100", 400, "NVIDIA L40S data sheet"),
    ("rtx4090-24gb", 24, 23.52, _RTX4090, 1008, "pcie4", "eth10", 400, "NVIDIA AD102 whitepaper"),
    ("h100-80gb", 80, 79.1, _H100, 3350, "nvlink4", "ib400", 768, "NVIDIA H100 data sheet (SXM5)"),
    ("h100-80gb-pcie", 80, 79.1, _H100_PCIE, 2000, "pcie5", "eth100", 768, "NVIDIA H100 data sheet (PCIe)"),
    ("h800-80gb", 80, 79.1, _H800, 3350, "nvlink4-8", "ib400", 768, "NVIDIA H800 data sheet (SXM5)"),
    ("h200-141gb", 141, 139.7, _H100, 4800, "nvlink4", "ib400", 768, "NVIDIA H200 data sheet"),
    ("b200-180gb", 180, 178.3, _B200, 8000, "nvlink5", "ib400", 768, "NVIDIA HGX B200 data sheet, per GPU"),
)


def _kind(row: tuple[str, float, float, dict[str, float], float, str, str, int, str]) -> DeviceKind:
    name, gb, gib, speeds, bandwidth, inner, network, context, source = row
    return DeviceKind(
        name=name,
        vendor_gb=gb,
        usable_gib=gib,
        flops_per_s=speeds,
        bytes_per_s=bandwidth * 1e9,
        inner=inner,
        network=network,
        context_mib=context,
        source=source,
    )


TABLE: Final = {row[0]: _kind(row) for row in _ROWS}
"""The table holds every known kind of device by name; of kinds with a common prefix the usual one comes
first.
"""

_HOPPER_ON: Final = ("h100", "h800", "h200", "b200")
CUDNN_BYTES: Final = 1_800 * MIB
"""Issue 18 tells of 24 image models on an A100 that the median P95 (then 1.115 peaks, 22 MiB and 420 MiB) was
26 %, about 2 GiB, below the device's memory in use: a peak of 4.7 GiB with a largest tensor of 0.2 GiB, of
which three are kept. An H100 holds 767 MiB beside torch's segments in the step of a ResNet as in any other.
"""
SMALL_WORKSPACE: Final = 2 * 4 * MIB + 8 * 16 * 1024
LARGE_WORKSPACE: Final = 32 * MIB
"""torch gives cuBLAS these by default: `:4096:2:16:8`, and 32 MiB from Hopper on (parseChosenWorkspaceSize in
ATen/cuda/CublasHandlePool.cpp).
"""

_HOSTS: Final = {
    "pcie3": "p40 p100 v100 t4",
    "pcie4": "a100 a800 a10g rtx3090 l4 l40s rtx4090",
    "pcie5": "h100 h800 h200 b200",
}
"""Each row's data sheet names this interconnect: PCIe, 16 lanes to the memory of the host."""

USUAL_MATMUL: Final = 0.869
USUAL_ATTENTION: Final = 0.6
USUAL_HOST_S: Final = 57e-6
# The columns are kinds (the word before the first dash), shares of the bfloat16 peak, seconds of a host, and
# instructions for a FLOP of ordinary float32.
_REACHED: Final = (
    ("a100 a800", 0.869, 0.6, USUAL_HOST_S, 0.0),
    ("h100 h800 h200", 0.803, 0.35, 37e-6, 0.5),
    ("b200", 0.776, 0.35, 37e-6, 0.5),
)
HOPPER: Final = ("h100", "h800", "h200")


@final
class Reached(Record):
    """Holds the shares of a device's peak that the best products and fused attention reach, what a host of
    its time needs to launch an op of a training loop, and how many instructions its processors issue in the
    time of a FLOP at the peak of ordinary float32.

    Products are the best of all shapes: "Maximum Achievable Matmul FLOPS" in S. Bekman, Machine Learning
    Engineering, compute/accelerator. Newer devices run into their limit of power. Attention is that of
    FlashAttention-2, which torch runs: 50 to 73 % of an A100's peak (arXiv 2307.08691, sec. 4), and 35 % of
    an H100's, whose own instructions it does not use (arXiv 2407.08608, sec. 1); on a B200 no more.

    Hosts: published trainings on A100 of 2021 and 2022 need 57 us (planner/costs/efficiency.py). The host of
    an H100 with Python 3.12 needs 37: `outsize doctor --gpu` measured it, with blocks of its own. Hosts are
    1.2 times as fast since (Zen 2 beside an A100, then Zen 3, whose one thread Sapphire Rapids equals), and
    Python is 1.25 times ("What's New In Python 3.11").

    Instructions: a processor of an H100 issues four for 32 threads in a cycle, and has ordinary cores for as
    many, whose peak counts two FLOPs for each (NVIDIA, H100 whitepaper); a B200 is taken to be alike. Zero
    for older kinds, where such kernels have not been measured.
    """

    matmul: float = Field(gt=0, le=1)
    attention: float = Field(gt=0, le=1)
    host_s: float = Field(gt=0, le=1)
    instructions_per_flop: float = Field(ge=0, le=1)


def reached_by(kind: str) -> Reached:
    """Returns the shares of a kind of device; those of an A100 where nobody has published any."""
    word = kind.split("-")[0]
    known = (shares for words, *shares in _REACHED if word in words.split())
    usual = USUAL_MATMUL, USUAL_ATTENTION, USUAL_HOST_S, 0.0
    matmul, attention, host_s, instructions = next(known, usual)
    return Reached(matmul=matmul, attention=attention, host_s=host_s, instructions_per_flop=instructions)


HOST_BYTES_PER_S: Final = 0.8 * 204.8e9
"""The devices of a node share its memory's bandwidth.

It is assumed, since the host is not named: one socket, eight channels of DDR4-3200 (AMD EPYC 7003 data
sheet), of which copies reach 80 %.
"""

STAND_IN: Final = "rtx3090-24gb"
"""The speed of this kind is used for a device of which only the memory is known."""


def kind_named(text: str) -> DeviceKind | None:
    """Returns the kind of that name, or the first that begins with it: `a100` is `a100-80gb`."""
    low = text.lower()
    matches = [name for name in TABLE if name == low or name.startswith(low + "-")]
    return TABLE[low] if low in TABLE else TABLE[matches[0]] if matches else None


def host_link(device: Device) -> Link | None:
    """Returns the link to the memory of the device's host: the slowest for unknown kinds, None for a CPU."""
    row = device.kind.split("-")[0]
    known = (name for name, rows in _HOSTS.items() if row in rows.split())
    return None if row == "cpu" else LINKS[next(known, "pcie3")]


def kinds_like(word: str) -> list[DeviceKind]:
    """Returns all kinds whose name begins with a word, as a driver would say it: `h200` -> h200-141gb."""
    return [kind for name, kind in TABLE.items() if name.split("-")[0] == word.lower()]


def places_in(cluster: str) -> tuple[str, ...]:
    """Returns the devices of one process that a cluster's name lists (`cuda:0,cpu`); empty for any other
    name.
    """
    cluster, _ = split_share(cluster)
    places = tuple(cluster.split(","))
    return places if cluster != "cpu" and all(map(_PLACE.fullmatch, places)) else ()
