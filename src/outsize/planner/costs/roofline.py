"""Predicts seconds of units that nobody measured: roofline by op family, with efficiency that depends on
size.

    op      max(FLOPs / (peak FLOP/s x share), bytes / (bytes/s x share)) + launch
    pass    the sum over its ops, which are given as Work: FLOPs, bytes and launches of a family
    step    at least as long as its host needs to launch it; the excess is spread over the units that wait

Peaks: matmul, attention and convolution have the device's peak of their dtype (tensor cores), all others that
of float32; a float32 convolution runs in TF32 where there is such a peak, as PyTorch does by default. A unit
of which only sums are known costs max(FLOPs / 0.5 peak, bytes / 0.7 bandwidth) + 8 us, and as much for each
gradient.

Source: Williams et al., CACM 52(4), 2009; efficiency.py has the shares. Deviations: ops of one family in one
pass count as equal. Complexity: O(works). Oracle: tests/unit/planner/costs/test_roofline.py computes the sums
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from outsize.ir.graph import ModelGraph, Unit, Work
from outsize.ir.hardware.devices import Device
from outsize.ir.profile import Profile, UnitCost
from outsize.planner.costs.efficiency import Efficiency, default_of

COMPUTE_EFFICIENCY = 0.5
MEMORY_EFFICIENCY = 0.7
LAUNCH_S = 8e-6
TENSOR_FAMILIES = ("matmul", "attention", "convolution")
Passes = tuple[float, float, float]


def seconds(work: Sequence[Work], device: Device, efficiency: Efficiency | None = None) -> float:
    """Returns the device's seconds for these works one after the other, without its host.

    `efficiency` defaults to the curves of the device's kind.
    """
    curves = efficiency or default_of(device)
    return sum(_work_s(op, device, curves) for op in work)


def roofline(graph: ModelGraph, device: Device) -> Profile:
    """Returns the profile of a graph, at its own batch size, on one kind of device."""
    curves, dtype = default_of(device), _dtype(graph)
    busy = [_busy(unit, device, dtype, curves) for unit in graph.units]
    host = [_host(unit, curves.host_s) for unit in graph.units]
    waiting = _waiting(busy, host)
    return Profile(
        fingerprint=graph.fingerprint,
        device=device.kind,
        microbatch_size=graph.batch_size,
        units=tuple(
            _cost(u, _waited(b, h, waiting)) for u, b, h in zip(graph.units, busy, host, strict=True)
        ),
    )


def _work_s(work: Work, device: Device, curves: Efficiency) -> float:
    flops_s = work.flops / _peak(work, device)
    bytes_s = work.moved_bytes / device.bytes_per_s
    compute_s = curves.compute[work.family].seconds(flops_s, work.launches)
    memory_s = curves.memory[work.family].seconds(bytes_s, work.launches)
    return max(compute_s, memory_s) + work.launches * curves.launch_s


def _peak(work: Work, device: Device) -> float:
    if work.family not in TENSOR_FAMILIES:
        return device.flops("float32")
    as_tf32 = work.family == "convolution" and work.dtype == "float32"
    return device.flops("tfloat32" if as_tf32 else work.dtype)


def _busy(unit: Unit, device: Device, dtype: str, curves: Efficiency) -> Passes:
    """Returns the seconds of forward, input gradient, weight gradient."""
    if unit.forward:
        passes = (unit.forward, unit.backward_input, unit.backward_weight)
        forward, backward_input, backward_weight = (seconds(p, device, curves) for p in passes)
        return forward, backward_input, backward_weight
    compute_s = unit.flops / (device.flops(dtype) * COMPUTE_EFFICIENCY)
    memory_s = unit.moved_bytes / (device.bytes_per_s * MEMORY_EFFICIENCY)
    forward_s = max(compute_s, memory_s) + LAUNCH_S
    return forward_s, forward_s, forward_s if unit.parameters else 0.0


def _host(unit: Unit, host_s: float) -> Passes:
    """Returns the host's seconds to launch each pass; zero where the launches of a unit are unknown."""
    forward, backward_input, backward_weight = (
        host_s * sum(work.launches for work in works)
        for works in (unit.forward, unit.backward_input, unit.backward_weight)
    )
    return forward, backward_input, backward_weight


def _waiting(busy: Iterable[Passes], host: Iterable[Passes]) -> float:
    """Returns the share of the time by which the host is late in single passes that the device really waits.

    A host that is late in one pass may have been early in another; over a step the device waits as long as
    the host needs more time than the device.
    """
    pairs = [(b, h) for bs, hs in zip(busy, host, strict=True) for b, h in zip(bs, hs, strict=True)]
    late_s = sum(max(0.0, h - b) for b, h in pairs)
    return max(0.0, sum(h - b for b, h in pairs)) / late_s if late_s else 0.0


def _waited(busy: Passes, host: Passes, waiting: float) -> Passes:
    forward, backward_input, backward_weight = (
        b + waiting * max(0.0, h - b) for b, h in zip(busy, host, strict=True)
    )
    return forward, backward_input, backward_weight


def _cost(unit: Unit, passes: Passes) -> UnitCost:
    forward_s, backward_input_s, backward_weight_s = passes
    return UnitCost(
        name=unit.name,
        forward_s=forward_s,
        backward_input_s=backward_input_s,
        backward_weight_s=backward_weight_s,
        saved_bytes=unit.saved_bytes,
        workspace_bytes=unit.workspace_bytes,
        flops=unit.flops,
        source="roofline",
    )


def _dtype(graph: ModelGraph) -> str:
    """Returns the dtype of most parameters."""
    counts: Counter[str] = Counter()
    for parameter in graph.parameters:
        counts[parameter.dtype] += parameter.numel
    return counts.most_common(1)[0][0] if counts else "float32"
