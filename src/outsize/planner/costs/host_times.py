"""Predicts seconds of units that the host computes: a roofline of its products and of its memory.

    work    max(FLOPs / f, bytes / b)        f: FLOP/s that its products reach, b: bytes/s of its memory
    pass    the sum over its works           a host launches nothing, and waits for nobody
    share   f / n and b / n                  n ranks of a machine compute at the same time

A step of training routes thousands of tokens to experts, so each expert has some, and what is read of a
stack is all of it, as the works of the capture say. f and b are what a user says of the cluster
(`host_flops_per_s`, `host_bytes_per_s`), or the figures of devices.json with their sources. Weights in few
bits are read as codes, and their values written and read, which their works count
(capture/costs/stored_products.py).

Complexity: O(distinct works). Oracle: tests/unit/planner/costs/test_host_times.py adds a unit up by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, final

from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph, Unit, Work
from outsize.ir.hardware.devices import host_bytes_per_s, host_flops_per_s
from outsize.planner.costs.roofline import distinct_passes
from outsize.planner.costs.unit_times import UnitSeconds


@final
@dataclass(frozen=True, slots=True)
class HostSpeed:
    """Holds what the processors of a machine reach: FLOP/s of products, and bytes/s of memory."""

    flops_per_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, cluster: Cluster, ranks: int) -> Self:
        """Returns the share of one of so many ranks, which compute on their machines at the same time."""
        kinds = [device.kind for device in cluster.devices]
        nodes = [part.devices_per_node for part in cluster.parts] or [cluster.devices_per_node]
        sharing = min(ranks, max(nodes))
        flops_per_s = cluster.host_flops_per_s or min(map(host_flops_per_s, kinds))
        bytes_per_s = cluster.host_bytes_per_s or min(map(host_bytes_per_s, kinds))
        return cls(flops_per_s / sharing, bytes_per_s / sharing)

    def seconds(self, works: Iterable[Work]) -> float:
        """Returns the seconds of these works one after the other."""
        return sum(max(work.flops / self.flops_per_s, work.moved_bytes / self.bytes_per_s) for work in works)

    def unit_seconds(self, graph: ModelGraph) -> UnitSeconds:
        """Returns the seconds of each unit."""
        passes, pass_of = distinct_passes(graph)
        known = [tuple(map(self.seconds, each)) for each in passes]
        rows = [
            known[at] if unit.forward else self._by_sums(unit)
            for unit, at in zip(graph.units, pass_of.tolist(), strict=True)
        ]
        return UnitSeconds.from_rows(rows)

    def _by_sums(self, unit: Unit) -> tuple[float, float, float]:
        """Returns the seconds of a unit of which only sums are known, as much for each gradient."""
        forward_s = max(unit.flops / self.flops_per_s, unit.moved_bytes / self.bytes_per_s)
        return forward_s, forward_s, forward_s if unit.parameters else 0.0
