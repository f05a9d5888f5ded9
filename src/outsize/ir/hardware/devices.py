"""Lists memory, peaks and links of each kind of device, from the vendor's data sheet; `source` names it.

The numbers are in devices.json, each row with its origin. Peaks are dense (without structured sparsity)
TFLOP/s by dtype, at the boost clock. `float32` is the speed of ordinary cores; `tfloat32` that of tensor
cores with float32: PyTorch uses them for convolutions (`cudnn.allow_tf32`), not for matmuls. A dtype
without a column runs as fast as float32: bfloat16 on Volta and Turing is emulated, float16 on a P40
computes in float32.

    vendor_gb    the nominal memory
    usable_gib   what the driver leaves: `total_memory` of torch, "total capacity" in its out-of-memory errors
    context_mib  taken before the first tensor

A figure that nobody has measured on a kind (the share of its peak that products reach, its context) is that
of its family, then of the family that it is most like, then that of kinds of which nothing is known.
`source_of` says whose figure it is.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple, final

from pydantic import Field, field_validator

from outsize.ir.base import Bytes, DeviceName, Record, Speed
from outsize.ir.hardware.constants import DataFile
from outsize.ir.hardware.links import LINKS, Link
from outsize.ir.hardware.memory_share import split_share

GIB: Final = 1024**3
MIB: Final = 1024**2


_WIDER: Final = {"float4": "float8", "float8": "bfloat16", "float16_fp16acc": "float16"}
"""Maps a type of products to the one in which devices without a column for it compute."""


@final
class Device(Record):
    """Describes one accelerator or CPU process.

    `memory_bytes` is all that a process can get, of which `context_bytes` are used before the first tensor
    and `matmul_bytes` by cuBLAS from the first backward on. `price_per_hour` is what a user says that it
    costs, in any currency, or None. `host_s` is what this machine's host needs to launch an op of a training
    loop, or None where `outsize doctor --gpu` has not measured it. `attention_share` is the share of the peak
    that the attention of a stack of kernels reaches, `product_share` that of products of one that computes
    without pause, at the device's limit of power; None for torch's.
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
    attention_share: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)
    product_share: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False)

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
        return round(figure_of("cudnn_mib", self.kind) * MIB)

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

        Four bits without a column run as eight, eight as bfloat16, and float16 that is added up in float16
        (`float16_fp16acc`) as float16.
        """
        name = next((short for short in _WIDER if dtype.startswith(short)), dtype)
        while name not in self.flops_per_s and name in _WIDER:
            name = _WIDER[name]
        return self.flops_per_s.get(name, self.flops_per_s["float32"])


FigureName = Literal[
    "context_mib",
    "cudnn_mib",
    "cublas_workspace_mib",
    "matmul",
    "narrow_matmul",
    "four_bit_matmul",
    "sustained_matmul",
    "attention",
    "library_attention",
    "operand_orders",
    "host_us",
    "instructions_per_flop",
    "host_memory_gb_per_s",
    "host_copy_share",
    "host_tflops",
]


@final
class DeviceKind(Record):
    """Is a row of the table: a Device without a name, and the links that such machines are sold with.

    `nvlink_domain` are the devices that switches join beyond a node, where they do; `torch_device` is the
    type in torch's names.
    """

    name: str
    family: str
    vendor_gb: float
    usable_gib: float
    flops_per_s: dict[str, float]
    bytes_per_s: float
    inner: str
    network: str
    context_mib: int
    source: str
    torch_device: str = "cuda"
    nvlink_domain: int | None = None

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
        return 2 * round(figure_of("cublas_workspace_mib", self.name) * MIB)

    @property
    def link(self) -> Link:
        """Returns the link between two devices of one node."""
        return LINKS[self.inner]


_PLACE: Final = re.compile(r"cpu|[a-z]+:\d+")


@final
class _KindRow(NamedTuple):
    """Is a kind of device. Peaks are in TFLOP/s by dtype, `memory_gb_per_s` in 1e9 bytes; `host_link` is the
    interconnect to the host's memory that the data sheet names (PCIe, 16 lanes), `link` that between devices.
    """

    name: str
    family: str
    vendor_gb: float
    usable_gib: float
    tflops: dict[str, float]
    memory_gb_per_s: float
    link: str
    network: str
    origin: str
    host_link: str | None = None
    torch_device: str = "cuda"
    nvlink_domain: int | None = None


@final
class _FamilyRow(NamedTuple):
    """Is an architecture, and the one that it is most like."""

    name: str
    title: str
    origin: str
    like: str | None = None


@final
class _Figure(NamedTuple):
    """Is a number of some kinds, by the word before the first dash of their names, of families, or of all
    kinds that have no number of their own.
    """

    name: FigureName
    kinds: list[str]
    value: float
    origin: str


_FILE: Final = DataFile.beside(__file__)
_KINDS: Final = _FILE.rows("kinds", _KindRow)
_FAMILIES: Final = {row.name: row for row in _FILE.rows("families", _FamilyRow)}
_FAMILY_OF: Final = {row.name.split("-")[0]: row.family for row in _KINDS}
_FIGURES: Final = {
    (row.name, word): row.value for row in _FILE.rows("figures", _Figure) for word in row.kinds or ("",)
}


def families_of(kind: str) -> tuple[str, ...]:
    """Returns the family of a kind of device and those that it is like, the nearest first; none of a kind
    that is not known.
    """
    found, name = list[str](), _FAMILY_OF.get(kind.split("-")[0])
    while name is not None:
        found.append(name)
        name = _FAMILIES[name].like
    return tuple(found)


def figure_of(name: FigureName, kind: str) -> float:
    """Returns a number of a kind of device, of the nearest family that has one, or that of kinds of which
    nothing is known.
    """
    return _FIGURES[name, _place_of(name, kind)]


def _place_of(name: FigureName, kind: str) -> str:
    """Returns the kind, the family or (empty) the default that has the number."""
    places = (kind.split("-")[0], *families_of(kind))
    return next((place for place in places if (name, place) in _FIGURES), "")


def source_of(name: FigureName, kind: str) -> str:
    """Returns where that number is from, as `source (device, date)`, and of which family it is where the kind
    has none of its own.
    """
    place = _place_of(name, kind)
    rows = (row for row in _FILE.rows("figures", _Figure) if row.name == name)
    source = str(_FILE.origins[next(row for row in rows if place in (row.kinds or ("",))).origin])
    return f"{source}, of the family {_FAMILIES[place].title}" if place in _FAMILIES else source


def _kind(row: _KindRow) -> DeviceKind:
    return DeviceKind(
        name=row.name,
        family=row.family,
        torch_device="cpu" if row.family == "cpu" else row.torch_device,
        nvlink_domain=row.nvlink_domain,
        vendor_gb=row.vendor_gb,
        usable_gib=row.usable_gib,
        flops_per_s={dtype: tera * 1e12 for dtype, tera in row.tflops.items()},
        bytes_per_s=row.memory_gb_per_s * 1e9,
        inner=row.link,
        network=row.network,
        context_mib=round(figure_of("context_mib", row.name)),
        source=_FILE.origins[row.origin].source,
    )


TABLE: Final = {row.name: _kind(row) for row in _KINDS}
"""The table holds every known kind of device by name; of kinds with a common prefix the usual one comes
first.
"""
_HOST_LINKS: Final = {row.name.split("-")[0]: row.host_link for row in _KINDS}
_SLOWEST_HOST_LINK: Final = "pcie3"


@final
class Reached(Record):
    """Holds the shares of a device's peak that the best products and fused attention reach, what products in
    eight bits and in four reach of theirs over what those in bfloat16 do, what a host of its time needs to
    launch an op of a training loop, and how many instructions its processors issue in the time of a FLOP at
    the peak of ordinary float32; 0 where kernels are not known to be bound by them.
    """

    matmul: float = Field(gt=0, le=1)
    narrow_matmul: float = Field(gt=0, le=2)
    four_bit_matmul: float = Field(gt=0, le=2)
    attention: float = Field(gt=0, le=1)
    host_s: float = Field(gt=0, le=1)
    instructions_per_flop: float = Field(ge=0, le=1)


def reached_by(kind: str) -> Reached:
    """Returns the shares of a kind of device; those of an A100 where nobody has published any."""
    return Reached(
        matmul=figure_of("matmul", kind),
        narrow_matmul=figure_of("narrow_matmul", kind),
        four_bit_matmul=figure_of("four_bit_matmul", kind),
        attention=figure_of("attention", kind),
        host_s=figure_of("host_us", kind) / 1e6,
        instructions_per_flop=figure_of("instructions_per_flop", kind),
    )


USUAL: Final = reached_by("")
"""Holds what a kind of device reaches that has no figures of its own: those of an A100."""


def host_bytes_per_s(kind: str) -> float:
    """Returns what copies reach of the memory's bandwidth of a host of such devices, which they share."""
    return figure_of("host_copy_share", kind) * (figure_of("host_memory_gb_per_s", kind) * 1e9)


def host_flops_per_s(kind: str) -> float:
    """Returns what torch's products reach on the processors of a host of such devices, which they share."""
    return figure_of("host_tflops", kind) * 1e12


STAND_IN: Final = "rtx3090-24gb"
"""The speed of this kind is used for a device of which only the memory is known."""


def kind_named(text: str) -> DeviceKind | None:
    """Returns the kind of that name, or the first that begins with it (`a100` is `a100-80gb`) or has all of
    its words (`h100-nvl` is `h100-94gb-nvl`).
    """
    low = text.lower()
    if low in TABLE:
        return TABLE[low]
    words = low.split("-")
    begins = [name for name in TABLE if name.startswith(low + "-")]
    has_words = [
        name for name in TABLE if name.split("-")[0] == words[0] and set(words) <= set(name.split("-"))
    ]
    return next((TABLE[name] for name in (*begins, *has_words)), None)


def host_link(device: Device) -> Link | None:
    """Returns the link to the memory of the device's host: the slowest for unknown kinds, None for a CPU."""
    word = device.kind.split("-")[0]
    return None if word == "cpu" else LINKS[_HOST_LINKS.get(word) or _SLOWEST_HOST_LINK]


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
