"""Makes the cluster of a device report: the devices of this machine, as measured, with hosts and links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from outsize.capture.measure.local_cluster import find_cluster
from outsize.ir.answers.device_report import CheckResult
from outsize.ir.cluster import Cluster
from outsize.ir.hardware.devices import Device
from outsize.ir.hardware.links import Link
from outsize.ops.doctor.machine import DTYPES
from outsize.planner.costs.efficiency import default_of


def measured_cluster(name: str, results: Iterable[CheckResult]) -> Cluster | None:
    """Returns the devices that torch sees here; None where their rates were not measured."""
    figures = {result.name: result.figures for result in results if result.outcome == "measured"}
    if "rates" not in figures:
        return None
    where, rates = find_cluster("local"), figures["rates"]
    host_s = figures.get("host", {}).get("op_s")
    devices = tuple(_as_measured(device, rates, host_s) for device in where.devices)
    link = _link(figures.get("links", {})) or where.inner
    return where.model_copy(update={"name": name, "devices": devices, "inner": link, "outer": link})


def _as_measured(device: Device, rates: Mapping[str, float], host_s: float | None) -> Device:
    """Returns the device with the peaks at which the product and the addition take what they took here.

    A peak is never reached: prices divide by it and by the share that an op of some size reaches.
    """
    curves, flops, moved = default_of(device), rates["product_flops"], rates["addition_bytes"]
    measured = {
        dtype: curves.compute["matmul"].peak_per_s(flops, flops / rates[f"{dtype}_flops_per_s"])
        for dtype in DTYPES
    }
    taken_s = moved / rates["memory_bytes_per_s"]
    change = {
        "flops_per_s": {**device.flops_per_s, **measured},
        "bytes_per_s": curves.memory["elementwise"].peak_per_s(moved, taken_s),
        "host_s": host_s,
        "source": "measured by outsize doctor",
    }
    return device.model_copy(update=change)


def _link(figures: Mapping[str, float]) -> Link | None:
    if "p2p_latency_s" not in figures:
        return None
    return Link(
        name="measured-p2p",
        latency_s=figures["p2p_latency_s"],
        bytes_per_s=figures["p2p_bytes_per_s"],
        source="measured by outsize doctor",
    )
