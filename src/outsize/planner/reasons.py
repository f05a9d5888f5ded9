"""Why a plan is as it is, in short sentences with numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from outsize.ir.cluster import Cluster, Device
from outsize.ir.graph import ModelGraph
from outsize.ir.names import compress
from outsize.ir.plan import Axes
from outsize.ir.text import byte_unit, bytes_text, percent_text, seconds_text
from outsize.planner.memory import StageMemory
from outsize.planner.simulate import StageCost

NAMES_SHOWN = 3
# More stages of a kind than that are counted, not named.
MANY_STAGES = 8


def pace_reason(graph: ModelGraph, bounds: Sequence[int], costs: Sequence[StageCost]) -> str:
    """Which stage is the bottleneck, and how much of the work it has."""
    seconds = [c.forward_s + c.backward_s for c in costs]
    slowest = seconds.index(max(seconds))
    names = compress([u.name for u in graph.units], bounds[slowest], bounds[slowest + 1] - 1)
    shown = ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
    share = seconds[slowest] / sum(seconds) if sum(seconds) else 0.0
    return (
        f"stage {slowest} ({shown}) sets the pace: {seconds_text(seconds[slowest])} of forward and backward "
        f"per microbatch, {percent_text(share)} of all; an even share is {percent_text(1 / len(costs))}"
    )


def fullest_reason(
    memories: Sequence[StageMemory], devices: Sequence[Device], ranks: Sequence[int], group: int = 1
) -> str:
    """Which device is closest to its limit, and which units hold most there.

    Stage s is on rank `ranks[s]`, a group of so many devices like `devices[s]`.
    """
    held = [0] * (max(ranks) + 1)
    for rank, memory in zip(ranks, memories, strict=True):
        held[rank] += memory.peak_bytes
    shares = [held[rank] / device.memory_bytes for rank, device in zip(ranks, devices, strict=True)]
    fullest = shares.index(max(shares))
    rank, device = ranks[fullest], devices[fullest]
    here = [m for at, m in zip(ranks, memories, strict=True) if at == rank]
    flying = microbatches_text(sum(m.in_flight for m in here))
    most = sorted((unit for m in here for unit in m.largest), key=lambda unit: -unit[1])[:NAMES_SHOWN]
    units = ", ".join(f"{name} {bytes_text(size)}" for name, size in most)
    alike = f" (and {group - 1} like it)" if group > 1 else ""
    return (
        f"{device.name}{alike} is the fullest device: {bytes_text(held[rank])} of "
        f"{bytes_text(device.memory_bytes)} with {flying} in flight; most in {units}"
    )


def kind_reasons(
    graph: ModelGraph, bounds: Sequence[int], devices: Sequence[Device], cluster: Cluster, group: int
) -> Iterator[str]:
    """Of unequal devices: which stages each kind has, and of the work; which are idle.

    `devices` are the first of each stage's group.
    """
    if not cluster.unequal:
        return
    work = [sum(u.flops for u in graph.units[a:b]) for a, b in pairwise(bounds)]
    for kind, number in Counter(device.kind for device in cluster.devices).items():
        mine = [stage for stage, device in enumerate(devices) if device.kind == kind]
        busy = group * len({devices[stage].name for stage in mine})
        idle = f"; {number - busy} idle" if number > busy else ""
        if not mine:
            yield f"{kind}: all {number} stay idle: no order with them was faster"
            continue
        share = percent_text(sum(work[stage] for stage in mine) / max(sum(work), 1))
        stages = stages_text(mine) if len(mine) <= MANY_STAGES else f"{len(mine)} stages"
        yield f"{kind}: {stages} on {busy} of {number} devices, {share} of the FLOPs{idle}"


def over_memory(memories: Sequence[StageMemory], devices: Sequence[Device]) -> tuple[str, ...]:
    """One sentence for each stage that does not fit its device, whose memory is what a peak may take."""
    return tuple(
        needs_text(stage, memory, device)
        for stage, (memory, device) in enumerate(zip(memories, devices, strict=True))
        if memory.peak_bytes > device.memory_bytes
    )


def needs_text(stage: int, memory: StageMemory, device: Device) -> str:
    """`stage 2 needs 31.4 GiB, cpu:1 has room for 23.8`; as many digits as it takes to tell the two apart.

    `device` has the memory that a peak may take (margin.py).
    """
    name, unit = byte_unit(memory.peak_bytes)
    needs, has = memory.peak_bytes / unit, device.memory_bytes / unit
    digits = next((d for d in (1, 3, 6) if f"{needs:.{d}f}" != f"{has:.{d}f}"), 9)
    return f"stage {stage} needs {needs:.{digits}f} {name}, {device.name} has room for {has:.{digits}f}"


def parts_text(memory: StageMemory) -> str:
    """`weights 3.1 + gradients 3.1 + optimizer 6.2 + activations 18.7 GiB`; zeros left out."""
    name, unit = byte_unit(memory.peak_bytes)
    parts = (
        ("weights", memory.weights_bytes),
        ("gradients", memory.gradients_bytes),
        ("optimizer", memory.optimizer_bytes),
        ("activations", memory.activations_bytes),
        ("boundary", memory.boundary_bytes),
    )
    return " + ".join(f"{part} {size / unit:.1f}" for part, size in parts if size / unit >= 0.05) + f" {name}"


def fullest(memories: Sequence[StageMemory], devices: Sequence[Device]) -> int:
    """The stage with the largest peak relative to its device; the first of equals."""
    shares = [m.peak_bytes / d.memory_bytes for m, d in zip(memories, devices, strict=True)]
    return shares.index(max(shares))


def axes_text(axes: Axes) -> str:
    """`pp 4 x tp 2`; a single device is `one device`."""
    sizes = ((name, size) for name, size in axes.model_dump().items() if size > 1)
    return " x ".join(f"{name} {size}" for name, size in sizes) or "one device"


def microbatches_text(count: int) -> str:
    """`1 microbatch`, `8 microbatches`."""
    return f"{count} microbatch{'' if count == 1 else 'es'}"


def stages_text(stages: Sequence[int]) -> str:
    """`stage 3`, `stages 0-2, 5`; ascending."""
    runs: list[list[int]] = []
    for stage in stages:
        if runs and runs[-1][-1] == stage - 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    named = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"stage{'' if len(stages) == 1 else 's'} {named}"
