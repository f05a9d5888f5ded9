"""Says where the constants are from that price what a step spends its seconds on: rows of data files."""

from __future__ import annotations

from typing import Final

from outsize.ir.answers.utilisation import Spent
from outsize.ir.cluster import Cluster, Device
from outsize.ir.graph import OpFamily
from outsize.ir.hardware import devices
from outsize.ir.plan import Kernels
from outsize.ir.profile import Profile
from outsize.planner.costs import efficiency
from outsize.planner.costs.kernel_stacks import EAGER, source_of_host

FAMILIES: Final[dict[Spent, tuple[OpFamily, ...]]] = {
    "products": ("matmul", "unaligned_matmul"),
    "attention": ("attention",),
    "convolutions": ("convolution", "direct_convolution"),
    "normalisations": ("normalisation",),
    "elementwise": ("elementwise",),
}
BOUND_BY_BYTES: Final[tuple[Spent, ...]] = ("normalisations", "elementwise")
MEASURED: Final = "units as they were measured"
MEASURED_HOST: Final = "outsize doctor --gpu, on this machine"
LINKED: Final[tuple[Spent, ...]] = ("weights", "messages", "within-layers")


def sources_of(
    spent: Spent, device: Device, profile: Profile, cluster: Cluster, kernels: Kernels
) -> tuple[str, ...]:
    """Returns `source (device, date)` of each constant, without repetitions."""
    measured = all(unit.source == "measured" for unit in profile.units)
    found: list[str | None] = []
    if spent in LINKED:
        links = [cluster.inner, *([cluster.outer] if cluster.nodes > 1 else [])]
        found = [f"{link.name}: {link.source}" for link in links if link.source]
    elif spent in FAMILIES and measured:
        found = [MEASURED]
    elif spent in FAMILIES:
        found = [f"{device.source} ({device.kind})", *_of_families(spent, device)]
    elif spent == "optimizer":
        found = [efficiency.source_of_constant("update", device)]
    elif spent == "launching":
        found = _of_hosts(device, kernels)
    return tuple(dict.fromkeys(source for source in found if source))


def _of_families(spent: Spent, device: Device) -> list[str | None]:
    families = FAMILIES[spent]
    attention: devices.FigureName = "library_attention" if device.attention_share else "attention"
    figures: dict[OpFamily, devices.FigureName] = {"matmul": "matmul", "attention": attention}
    reached = [devices.source_of(name, device.kind) for family, name in figures.items() if family in families]
    if device.product_share and "matmul" in families:
        reached.append(devices.source_of("sustained_matmul", device.kind))
    bound = "memory" if spent in BOUND_BY_BYTES else "compute"
    return [*reached, *(efficiency.source_of_curve(bound, family, device) for family in families)]


def _of_hosts(device: Device, kernels: Kernels) -> list[str | None]:
    """Returns where a host's seconds for an op are from, and the share that a stack of kernels leaves."""
    if kernels == EAGER:
        return [MEASURED_HOST if device.host_s else devices.source_of("host_us", device.kind)]
    return [devices.source_of("host_us", device.kind), source_of_host(kernels)]
