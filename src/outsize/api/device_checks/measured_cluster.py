"""Makes the cluster of a device report: the devices of this machine, with their measured rates and links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from outsize.api.device_checks.machine import DTYPES
from outsize.capture.measure.local_cluster import find_cluster
from outsize.ir.answers.device_report import CheckResult
from outsize.ir.cluster import Cluster
from outsize.ir.hardware.links import Link


def measured_cluster(name: str, results: Iterable[CheckResult]) -> Cluster | None:
    """Returns the devices that torch sees here; None where their rates were not measured."""
    figures = {result.name: result.figures for result in results if result.outcome == "measured"}
    if "rates" not in figures:
        return None
    where, rates = find_cluster("local"), figures["rates"]
    measured = {dtype: rates[f"{dtype}_flops_per_s"] for dtype in DTYPES}
    change = {
        "flops_per_s": measured,
        "bytes_per_s": rates["memory_bytes_per_s"],
        "source": "measured by outsize doctor",
    }
    devices = tuple(device.model_copy(update=change) for device in where.devices)
    link = _link(figures.get("links", {})) or where.inner
    return where.model_copy(update={"name": name, "devices": devices, "inner": link, "outer": link})


def _link(figures: Mapping[str, float]) -> Link | None:
    if "p2p_latency_s" not in figures:
        return None
    return Link(
        name="measured-p2p",
        latency_s=figures["p2p_latency_s"],
        bytes_per_s=figures["p2p_bytes_per_s"],
        source="measured by outsize doctor",
    )
