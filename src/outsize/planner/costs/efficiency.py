"""Predicts which share of a device's peak an op reaches, by family of ops and by size of the op.

    share(x) = peak x / (x + half),   x = seconds that the op would take at the device's peak

It is a saturating curve: an op of length `half_s` reaches half of `peak`, a long one all of it. Written out,
an op costs (x + half_s) / peak seconds: filling and draining the device costs half_s / peak, whatever its
size. Stated in seconds, one curve serves devices of any speed: a faster one needs a larger op.

The numbers are in efficiency.json, each with its device, date and source: of GPUs, which are those of an
A100, of Hopper where it has its own, and of a CPU. Kinds of GPUs reach more or less of their peaks
(ir/hardware/devices.json): products as much of the best that they reach as an A100 of its own best,
attention as much as FlashAttention-2 reaches there. The mechanisms:

A kernel leaves the device idle for some time beside its work, and so does a collective. While a collective
runs, computing is slower: both use the same processors and the same memory. A block of threads waits for its
loads from memory, so a normalisation of few channels can take no less. The host needs its time for each op of
a training loop in Python, with modules, autograd and the loop's own work. A host that is late catches up
within a block, such as a layer of a transformer, not over the whole model: published steps are the sum of
layers that wait for the host and of a head that does not. Neither hides the other wholly, and n ranks that
meet in a collective lose as much as the mean of the latest of n exponential delays (H. A. David, H. N.
Nagaraja, Order Statistics, 2003). The optimizer's step streams its bytes at the rate of additions.

On a CPU collectives move and add bytes on the core of their rank. Against units measured on the same, busy
machine its curves give 0.96 of the seconds for a GPT-2 of 4 layers and 0.69 for ResNet-18, whose max-pooling
takes twenty times what they say.
Oracle: tests/unit/planner/costs/test_roofline.py.
"""

from __future__ import annotations

from functools import cache
from typing import Final, Literal, NamedTuple, final

from pydantic import Field

from outsize.ir.base import Record
from outsize.ir.graph import OpFamily
from outsize.ir.hardware.constants import DataFile
from outsize.ir.hardware.devices import USUAL, Device, families_of, reached_by


@final
class EfficiencyCurve(Record):
    """`peak` is the share that the longest ops reach; `half_s` is the length of an op that reaches half of
    it.
    """

    peak: float = Field(gt=0)
    half_s: float = Field(default=0.0, ge=0)

    def seconds(self, ideal_s: float, launches: int) -> float:
        """Returns the seconds of `launches` equal ops that would take `ideal_s` in all at the
        device's peak.
        """
        return (ideal_s + launches * self.half_s) / self.peak if ideal_s > 0 else 0.0

    def peak_per_s(self, work: float, taken_s: float) -> float:
        """Returns the device's peak at which one op of so many FLOPs or bytes takes so many seconds."""
        return work / max(taken_s * self.peak - self.half_s, taken_s * self.peak / 2)


_EVEN: Final = (1.0, 1.0)


@final
class Efficiency(Record):
    """Holds curves by family for FLOPs and for bytes; `launch_s` is added per op, `host_s` is its launch on
    the host. `late` is the share of the shorter of a host's and its device's seconds that is lost where both
    need equally long. `update` is the share of bandwidth that an optimizer's step reaches; None leaves its
    seconds out. `element_s` is what one element takes in a block of threads that waits for memory, and
    `narrow_element` how many times as much one of two bytes. `crowded` is by how much longer an op takes
    while a collective runs. With `sums_whole` a reduce-scatter is an all-reduce, from which each rank copies
    its part. `instructions_per_flop` are issued by threads in the time of a FLOP at the peak of ordinary
    float32; 0 where kernels are not bound by them. With `copies_tf32` convolutions in TF32 copy their
    images, as those of two bytes do. `host_shares` are the host's seconds for an op of a family, forward and
    for a gradient, over `host_s`; families that are not in it need the mean. `narrow_products` is how much
    of their peak products in few bits reach, by the beginning of their type, over what those in more reach
    of theirs. `split_s` is what a backward in two halves takes more for each unit whose weights wait.

    A device that runs ahead of its host waits for it: a pass takes the longer of both. On a CPU the host is
    the device, so `host_s` is 0 and `launch_s` is all.
    """

    compute: dict[OpFamily, EfficiencyCurve]
    memory: dict[OpFamily, EfficiencyCurve]
    launch_s: float = Field(ge=0)
    host_s: float = Field(default=0.0, ge=0)
    host_shares: dict[OpFamily, tuple[float, float]] = Field(default_factory=dict)
    late: float = Field(default=0.0, ge=0)
    crowded: float = Field(default=0.0, ge=0)
    element_s: float = Field(default=0.0, ge=0)
    narrow_element: float = Field(default=1.0, ge=1)
    sums_whole: bool = False
    copies_tf32: bool = False
    instructions_per_flop: float = Field(default=0.0, ge=0)
    update: float | None = Field(default=None, gt=0)
    narrow_products: dict[str, float] = Field(default_factory=dict)
    split_s: float = Field(default=0.0, ge=0)

    def host_share(self, family: OpFamily, passed: int) -> float:
        """Returns the host's seconds for an op of a family in a pass (0 is the forward) over those of a mean
        op.
        """
        return self.host_shares.get(family, _EVEN)[passed > 0]

    def narrow_share(self, dtype: str) -> float:
        """Returns what products in a type reach of their peak over what those in bfloat16 reach of theirs."""
        return next((share for few, share in self.narrow_products.items() if dtype.startswith(few)), 1.0)

    def lateness(self, ranks: int) -> float:
        """Returns `late` for so many ranks that wait for each other.

        The mean of the latest of n exponential delays is 1 + 1/2 + ... + 1/n times that of one.
        """
        return self.late * sum(1 / rank for rank in range(1, ranks + 1))

    def beside_s(self, compute_s: float, links_s: float) -> float:
        """Returns the seconds of computing beside collectives, which slow it down while they run."""
        return compute_s + self.crowded * min(compute_s, links_s)

    def seen_s(self, links_s: float, compute_s: float) -> float:
        """Returns by how much collectives of `links_s` make computing longer that begins with them and has to
        wait for them in its end.
        """
        return max(links_s, self.beside_s(compute_s, links_s)) - compute_s

    def copied_s(self, size_bytes: float, device: Device) -> float:
        """Returns the seconds in which the device reads so many bytes and writes them elsewhere."""
        return 2 * size_bytes / (device.bytes_per_s * self.memory["elementwise"].peak)

    def update_s(self, moved_bytes: float, device: Device) -> float:
        """Returns the seconds of an optimizer's step that reads and writes so many bytes of the device."""
        return moved_bytes / (device.bytes_per_s * self.update) if self.update else 0.0


Devices = Literal["gpu", "hopper", "cpu", "any"]
"""Names the devices that a row is about. `hopper` are the GPUs of that family and of those that are like it,
which have the rows of `gpu` where they lack one of their own; `any` are all devices, for units whose ops are
not known."""


@final
class _CurveRow(NamedTuple):
    devices: Devices
    bound: Literal["compute", "memory"]
    family: OpFamily
    peak: float
    origin: str
    half_us: float = 0.0


@final
class _HostOpRow(NamedTuple):
    """Is what a host needs for an op of a family, and for one of its gradients."""

    devices: Devices
    family: OpFamily
    forward_us: float
    gradient_us: float
    origin: str


@final
class _ConstantRow(NamedTuple):
    devices: Devices
    name: str
    value: float
    origin: str


_FILE: Final = DataFile.beside(__file__)
_CURVES: Final = _FILE.rows("curves", _CurveRow)
_HOST_OPS: Final = _FILE.rows("host_ops", _HostOpRow)
_CONSTANTS: Final = _FILE.rows("constants", _ConstantRow)


def constants_of(devices: Devices) -> dict[str, float]:
    """Returns the numbers of some devices by name."""
    return {row.name: row.value for row in _CONSTANTS if row.devices == devices}


def rows_of(device: Device) -> tuple[Devices, ...]:
    """Returns whose rows a device has, its own first."""
    if device.kind == "cpu":
        return ("cpu",)
    return ("hopper", "gpu") if "hopper" in families_of(device.kind) else ("gpu",)


def source_of_curve(bound: Literal["compute", "memory"], family: OpFamily, device: Device) -> str | None:
    """Returns where a curve is from, as `source (device, date)`."""
    found = (_FILE.source_of("curves", devices=d, bound=bound, family=family) for d in rows_of(device))
    return next(filter(None, found), None)


def source_of_constant(name: str, device: Device) -> str | None:
    """Returns where a number is from that a device has, as `source (device, date)`."""
    found = (_FILE.source_of("constants", devices=d, name=name) for d in rows_of(device))
    return next(filter(None, found), None)


def _curves(devices: Devices, bound: Literal["compute", "memory"]) -> dict[OpFamily, EfficiencyCurve]:
    rows = (row for row in _CURVES if (row.devices, row.bound) == (devices, bound))
    return {row.family: EfficiencyCurve(peak=row.peak, half_s=row.half_us / 1e6) for row in rows}


def _gpu(known: dict[str, float]) -> Efficiency:
    return Efficiency(
        compute=_curves("gpu", "compute"),
        memory=_curves("gpu", "memory"),
        launch_s=known["launch_us"] / 1e6,
        host_s=USUAL.host_s,
        late=known["late"],
        crowded=known["crowded"],
        element_s=known["load_us"] / 1e6 / known["loads_in_flight"],
        narrow_element=known["narrow_element"],
        update=known["update"],
    )


def _cpu(known: dict[str, float]) -> Efficiency:
    return Efficiency(
        compute=_curves("cpu", "compute"),
        memory=_curves("cpu", "memory"),
        launch_s=known["launch_us"] / 1e6,
        crowded=known["crowded"],
        sums_whole=True,
        split_s=known["split_us"] / 1e6,
    )


def _hopper(known: dict[str, float]) -> Efficiency:
    mean_us = known["host_mean_us"]
    return GPU.model_copy(
        update={
            "compute": GPU.compute | _curves("hopper", "compute"),
            "memory": GPU.memory | _curves("hopper", "memory"),
            "launch_s": known["launch_us"] / 1e6,
            "host_shares": {
                row.family: (row.forward_us / mean_us, row.gradient_us / mean_us) for row in _HOST_OPS
            },
            "copies_tf32": True,
        }
    )


GPU: Final = _gpu(constants_of("gpu"))
CPU: Final = _cpu(constants_of("cpu"))
HOPPER: Final = _hopper(constants_of("hopper"))


def default_of(device: Device) -> Efficiency:
    """Returns the curves of a known kind of device, with its own host where that was measured."""
    if device.kind == "cpu":
        return CPU
    return _of_kind(device.kind, device.host_s, device.attention_share, device.product_share)


@cache
def _of_kind(kind: str, host_s: float | None, attention: float | None, products: float | None) -> Efficiency:
    base = HOPPER if "hopper" in families_of(kind) else GPU
    reached = reached_by(kind)
    product = (products or reached.matmul) / USUAL.matmul
    narrow = {"float8": reached.narrow_matmul, "float4": reached.four_bit_matmul}
    fractions: dict[OpFamily, float] = {
        "matmul": product,
        "unaligned_matmul": product,
        "attention": (attention or reached.attention) / USUAL.attention,
    }
    scaled = {
        family: base.compute[family].model_copy(update={"peak": base.compute[family].peak * fraction})
        for family, fraction in fractions.items()
    }
    return base.model_copy(
        update={
            "compute": base.compute | scaled,
            "host_s": reached.host_s if host_s is None else host_s,
            "instructions_per_flop": reached.instructions_per_flop,
            "narrow_products": {dtype: share for dtype, share in narrow.items() if share != 1},
        }
    )
