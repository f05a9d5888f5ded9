"""Predicts seconds of units that nobody measured: roofline by op family, with efficiency that depends on
size.

    op      max(FLOPs / (peak FLOP/s x share), bytes / (bytes/s x share), elements of a block, instructions
            of all threads) + launch
    pass    the sum over its ops, which are given as Work: FLOPs, bytes and launches of a family
    step    at least as long as its host needs to launch it; the excess is spread over the units that wait,
            and neither of both hides the other wholly (unit_times.py)

Peaks: matmul, attention and convolution have the device's peak of their dtype (tensor cores), all others that
of float32; a float32 convolution runs in TF32 where there is such a peak, as PyTorch does by default. Copies
into the order of channels that tensor cores read (`layout_copy`) are made where there are tensor cores, in
TF32 on Hopper, where they were seen. A host needs longer for a product than for an op by elements, where both
are known. A unit of which only sums are known costs max(FLOPs / 0.5 peak, bytes / 0.7 bandwidth) + 8 us, and
as much for each gradient.

Source: Williams et al., CACM 52(4), 2009; efficiency.py has the shares. Deviations: ops of one family in one
pass count as equal. Complexity: O(works). Oracle: tests/unit/planner/costs/test_roofline.py computes the sums
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.graph import CONVOLUTIONS, MATMULS, ModelGraph, Unit, Work
from outsize.ir.hardware.devices import Device
from outsize.ir.profile import Profile, UnitCost
from outsize.ir.units.recompute_segments import numbered
from outsize.planner.costs.efficiency import Efficiency, constants_of, default_of
from outsize.planner.costs.unit_times import UnitSeconds

_WITHOUT_OPS: Final = constants_of("any")
COMPUTE_EFFICIENCY: Final = _WITHOUT_OPS["compute"]
MEMORY_EFFICIENCY: Final = _WITHOUT_OPS["memory"]
LAUNCH_S: Final = _WITHOUT_OPS["launch_us"] / 1e6
NARROW = ("bfloat16", "float16")
TENSOR_FAMILIES = (*MATMULS, *CONVOLUTIONS, "attention")
Passes = tuple[float, float, float]
WorkPasses = tuple[tuple[Work, ...], tuple[Work, ...], tuple[Work, ...]]


def seconds(work: Sequence[Work], device: Device, efficiency: Efficiency | None = None) -> float:
    """Returns the device's seconds for these works one after the other, without its host.

    `efficiency` defaults to the curves of the device's kind.
    """
    curves = efficiency or default_of(device)
    return sum(_work_s(op, device, curves) for op in work)


def roofline(graph: ModelGraph, device: Device) -> Profile:
    """Returns the profile of a graph, at its own batch size, on one kind of device."""
    return Profile(
        fingerprint=graph.fingerprint,
        device=device.kind,
        microbatch_size=graph.batch_size,
        units=tuple(map(_cost, graph.units, roofline_seconds(graph, device).rows())),
    )


def roofline_seconds(graph: ModelGraph, device: Device) -> UnitSeconds:
    """Returns the seconds of each unit of a graph on one kind of device."""
    curves, dtype = default_of(device), _dtype(graph)
    trains = any(parameter.trainable for parameter in graph.parameters)
    passes, pass_of = distinct_passes(graph)
    known = [tuple(seconds(works, device, curves) for works in each) for each in passes]
    rows = [
        known[at] if unit.forward else _without_works(unit, device, dtype)
        for unit, at in zip(graph.units, pass_of.tolist(), strict=True)
    ]
    busy = UnitSeconds.from_rows(rows if trains else [(forward_s, 0.0, 0.0) for forward_s, *_ in rows])
    launching = host_seconds(passes, device).taken(pass_of)
    return busy.behind_host(launching, host_blocks(graph), curves.lateness(1))


def distinct_passes(graph: ModelGraph) -> tuple[tuple[WorkPasses, ...], NDArray[np.int64]]:
    """Returns the distinct passes of all units, and which of them each unit has: blocks repeat, so there are
    few.
    """
    place: dict[WorkPasses, int] = {}
    pass_of = [place.setdefault(passes_of(unit), len(place)) for unit in graph.units]
    return tuple(place), np.array(pass_of, np.int64)


def passes_of(unit: Unit) -> WorkPasses:
    """Returns the work of forward, input gradient and weight gradient."""
    return unit.forward, unit.backward_input, unit.backward_weight


def attention_shares(graph: ModelGraph, device: Device, *, backward: bool = False) -> NDArray[np.float64]:
    """Returns the share of each unit's forward, or of its backward, in which attention computes."""
    passes, pass_of = distinct_passes(graph)
    shares = list[float]()
    for forward, *gradients in passes:
        works = [work for each in gradients for work in each] if backward else forward
        attention = [work for work in works if work.family == "attention"]
        whole_s = seconds(works, device)
        shares.append(seconds(attention, device) / whole_s if attention and whole_s else 0.0)
    return np.array(shares, np.float64)[pass_of]


def late_seconds(
    graph: ModelGraph, of_slice: UnitSeconds, device: Device, slices: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns by how much the forward and the backward of the last of so many slices are longer than a mean
    one's, whose graph and seconds these are: attention of slice k of n reads the rows of k + 1, half of its
    own.
    """
    more, waits = 1 - 1 / slices, of_slice.waits or (0.0, 0.0)
    forward = attention_shares(graph, device) * (of_slice.forward - waits[0])
    backward = attention_shares(graph, device, backward=True) * (of_slice.backward - waits[1])
    return more * forward, more * backward


def mean_ops(graph: ModelGraph, device: Device) -> float:
    """Returns the host's work for the forward and the backward of one microbatch, in ops of mean length."""
    curves = default_of(device)
    return sum(
        _mean_ops(works, curves, number) for u in graph.units for number, works in enumerate(passes_of(u))
    )


def host_seconds(units: Iterable[WorkPasses], device: Device) -> UnitSeconds:
    """Returns the host's seconds to launch each pass; zero where the launches of a unit are unknown."""
    curves = default_of(device)
    rows = [
        tuple(curves.host_s * _mean_ops(works, curves, number) for number, works in enumerate(passes))
        for passes in units
    ]
    return UnitSeconds.from_rows(rows)


def host_blocks(graph: ModelGraph) -> tuple[int, ...]:
    """Returns the first unit of each block in which a host that is early may be late again.

    That is the innermost numbered module, such as a layer of a transformer, or what is between two of them.
    """
    modules = numbered([unit.name for unit in graph.units])
    return tuple(i for i, module in enumerate(modules) if i == 0 or module != modules[i - 1])


def _mean_ops(works: Iterable[Work], curves: Efficiency, passed: int) -> float:
    return sum(work.launches * curves.host_share(work.family, passed) for work in works)


def _work_s(work: Work, device: Device, curves: Efficiency) -> float:
    if work.family == "layout_copy" and not _copies(work, device, curves):
        return 0.0
    peak = _peak(work, device) * curves.narrow_share(work.dtype)
    flops_s = work.flops / peak
    bytes_s = work.moved_bytes / device.bytes_per_s
    compute_s = curves.compute[work.family].seconds(flops_s, work.launches)
    memory_s = curves.memory[work.family].seconds(bytes_s, work.launches)
    block_s = curves.element_s * work.block_elements
    if work.dtype in NARROW:
        block_s *= curves.narrow_element
    issued_s = 0.0
    if work.instructions and curves.instructions_per_flop:
        issued_s = work.instructions / (device.flops("float32") * curves.instructions_per_flop)
    return max(compute_s, memory_s, block_s, issued_s) + work.launches * curves.launch_s


def _copies(work: Work, device: Device, curves: Efficiency) -> bool:
    """Returns whether what is around a convolution is a kernel of its own on the device."""
    if work.dtype == "float32":
        return curves.copies_tf32
    return device.has_tensor_cores(work.dtype)


def _peak(work: Work, device: Device) -> float:
    if work.family not in TENSOR_FAMILIES:
        return device.flops("float32")
    if work.family in CONVOLUTIONS and work.dtype == "float32":
        return device.flops("tfloat32")
    return device.flops(work.dtype)


def _without_works(unit: Unit, device: Device, dtype: str) -> Passes:
    """Returns the seconds of forward, input gradient, weight gradient of a unit of which only sums are
    known.
    """
    compute_s = unit.flops / (device.flops(dtype) * COMPUTE_EFFICIENCY)
    memory_s = unit.moved_bytes / (device.bytes_per_s * MEMORY_EFFICIENCY)
    forward_s = max(compute_s, memory_s) + LAUNCH_S
    return forward_s, forward_s, forward_s if unit.parameters else 0.0


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
