"""Seconds of a unit that nobody measured: the larger of compute time and memory time, plus a launch cost.

    forward = max(flops / (peak FLOP/s x efficiency), bytes / (bytes/s x efficiency)) + launch
    the input gradient and the weight gradient (if the unit has parameters) each cost what the forward costs

Roofline: Williams et al., CACM 52(4), 2009. The factor of two for the backward of layers with weights is
the usual count (arXiv 2104.04473, appendix). Deviations: one efficiency for all ops and sizes.
Complexity: O(units). Oracle: tests/unit/planner/test_roofline.py redoes the sums by hand.
"""

from __future__ import annotations

from collections import Counter

from outsize.ir.cluster import Device
from outsize.ir.graph import ModelGraph, Unit
from outsize.ir.profile import Profile, UnitCost

COMPUTE_EFFICIENCY = 0.5
MEMORY_EFFICIENCY = 0.7
LAUNCH_S = 8e-6


def roofline(graph: ModelGraph, device: Device) -> Profile:
    """The profile of a graph, at its own batch size, on one kind of device."""
    dtype = _dtype(graph)
    return Profile(
        fingerprint=graph.fingerprint,
        device=device.kind,
        microbatch_size=graph.batch_size,
        units=tuple(_cost(unit, device, dtype) for unit in graph.units),
    )


def _cost(unit: Unit, device: Device, dtype: str) -> UnitCost:
    compute_s = unit.flops / (device.flops(dtype) * COMPUTE_EFFICIENCY)
    memory_s = unit.moved_bytes / (device.bytes_per_s * MEMORY_EFFICIENCY)
    forward_s = max(compute_s, memory_s) + LAUNCH_S
    return UnitCost(
        name=unit.name,
        forward_s=forward_s,
        backward_input_s=forward_s,
        backward_weight_s=forward_s if unit.parameters else 0.0,
        saved_bytes=unit.saved_bytes,
        workspace_bytes=0,
        flops=unit.flops,
        source="roofline",
    )


def _dtype(graph: ModelGraph) -> str:
    """The dtype that holds most parameters."""
    counts: Counter[str] = Counter()
    for parameter in graph.parameters:
        counts[parameter.dtype] += parameter.numel
    return counts.most_common(1)[0][0] if counts else "float32"
