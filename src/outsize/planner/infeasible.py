"""What to say when nothing fits: who lacks how much, and the nearest that would fit, found by trying."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, final

from outsize.errors import NoFeasiblePlan
from outsize.ir.cluster import Cluster
from outsize.ir.offload import weights_text
from outsize.ir.plan import Recompute, ScheduleName
from outsize.ir.text import bytes_text
from outsize.planner.edges import edges_between
from outsize.planner.estimate import lower_along
from outsize.planner.lean import fits, leanest
from outsize.planner.memory import Alive, StageMemory, account_ranges, peak_table
from outsize.planner.reasons import axes_text, fullest, microbatches_text, needs_text, parts_text
from outsize.planner.split import Case, Pipeline
from outsize.schedules.builders import build

OTHERS = "outsize plan MODEL --axes all, which looks beyond pipelines"
MORE_STAGES = 8
MOST_STAGES = 64
_COUNTS = re.compile(r"^(?:\d+x)+")
ANEW: Final[dict[Recompute, str]] = {
    "none": "",
    "full": ", all recomputed",
    "selective": ", all recomputed block by block",
    "offload": ", activations on the host",
}


@final
@dataclass(frozen=True, slots=True, eq=False)
class Lean:
    """The cut of one attempt that fills its fullest device least."""

    case: Case
    schedule: ScheduleName
    stages: int
    stage: int
    memory: StageMemory
    share: float


def rejections(tried: Iterable[Pipeline]) -> Iterator[str]:
    """Why attempts do not fit, in a sentence for those that do not for the same reason."""
    names: dict[str, list[str]] = {}
    for pipeline in tried:
        layout = pipeline.layout
        chunks = f" ({layout.chunks} stages a device)" if layout.chunks > 1 else ""
        where = f" on {axes_text(layout.axes)}" if layout.group > 1 else ""
        where += f", {weights_text(layout.weights)}" if layout.weights != "resident" else ""
        why = f"with {microbatches_text(layout.microbatches)}{where}: {_lack(pipeline)}"
        names.setdefault(why, []).append(layout.schedule + chunks)
    for why, schedules in names.items():
        yield f"not {', '.join(schedules)} {why}"


def _lack(tried: Pipeline) -> str:
    """What the least full cut lacks; of stages that share a device no cut is shown."""
    layout = tried.layout
    if layout.chunks > 1:
        return "no balanced cut fits"
    lean = _lean(tried.ways[0][-1], layout.schedule, layout.stages, tried.room)
    return f"at best {needs_text(lean.stage, lean.memory, tried.room.devices[lean.stage])}"


def no_feasible_plan(
    asked: Sequence[Case],
    spare: Sequence[Case],
    schedules: Sequence[ScheduleName],
    stages: int,
    cluster: Cluster,
    others: bool = False,
) -> NoFeasiblePlan:
    """The error. The `asked` cases do not fit in any of the schedules; `spare` ones may help.

    `others`: there are axes that nobody has looked at.
    """
    tried = [_lean(case, name, stages, cluster) for case in asked for name in schedules]
    closest = min(tried, key=lambda lean: lean.share)
    near = next(_fitting((*asked, *spare), schedules, stages, cluster), None)
    steps = _larger_devices(closest) if near is None else _steps(near, asked, schedules, closest, cluster)
    return NoFeasiblePlan(
        needs_text(closest.stage, closest.memory, cluster.devices[closest.stage]),
        numbers=f"{parts_text(closest.memory)}; {_near_text(near, closest)}",
        next_step=steps + (f"; or {OTHERS}" if others else ""),
    )


def _fitting(
    cases: Sequence[Case], schedules: Sequence[ScheduleName], stages: int, cluster: Cluster
) -> Iterator[Lean]:
    """What fits, nearest first: fewer stages, then schedules, then cases; naive, being slow, last of all."""
    memory_bytes = max(d.memory_bytes for d in cluster.devices)
    hopeful = [case for case in cases if _unit_bytes(case) <= memory_bytes]
    for names in _worth_trying(schedules):
        for count in _stage_counts(hopeful, stages, memory_bytes):
            wide = widened(cluster, count)
            pairs = product(names, hopeful)
            # To wait for another schedule costs less than to compute everything twice.
            for name, case in sorted(pairs, key=lambda pair: pair[1].recompute != "none"):
                if fits(case, name, count, wide):
                    yield _lean(case, name, count, wide)


def _worth_trying(schedules: Sequence[ScheduleName]) -> tuple[tuple[ScheduleName, ...], ...]:
    """gpipe only where it is all that may be: it never holds less than 1f1b."""
    if "1f1b" in schedules:
        return ("1f1b",), ("naive",)
    return (("gpipe", "1f1b"), ("naive",)) if "gpipe" in schedules else (("naive",),)


def _unit_bytes(case: Case) -> int:
    """The least that the hungriest unit needs, alone on a device with one microbatch in flight."""
    table = peak_table(case.ranges, (Alive(1, 0, 0, 0),))
    return max(int(table[unit, unit + 1]) for unit in range(case.units))


def _stage_counts(cases: Sequence[Case], stages: int, memory_bytes: int) -> list[int]:
    """From the least that holds the weights and their states: one by one, then doubled twice."""
    if not cases:
        return []
    least = min(-(-_state_bytes(case) // memory_bytes) for case in cases)
    first, units = max(stages, least), min(case.units for case in cases)
    counts = (*range(first, first + MORE_STAGES + 1), 2 * (first + MORE_STAGES), 4 * (first + MORE_STAGES))
    return [count for count in counts if count <= min(units, MOST_STAGES)]


def _state_bytes(case: Case) -> int:
    ranges = case.ranges
    return sum(int(table[0, -1]) for table in (ranges.weights, ranges.gradients, ranges.optimizer))


def _lean(case: Case, schedule: ScheduleName, stages: int, cluster: Cluster) -> Lean:
    bounds = leanest(case, schedule, stages, cluster)
    lowered = lower_along(edges_between(case.graph, bounds), build(schedule, stages, case.microbatches))
    memories = account_ranges(case.ranges, case.graph, bounds, lowered)
    stage = fullest(memories, cluster.devices[:stages])
    share = memories[stage].peak_bytes / cluster.devices[stage].memory_bytes
    return Lean(case, schedule, stages, stage, memories[stage], share)


def widened(cluster: Cluster, stages: int) -> Cluster:
    """The cluster with copies of its last device, so that there are at least `stages`."""
    last, count = cluster.devices[-1], len(cluster.devices)
    family = last.name.rpartition(":")[0] or last.name
    extra = (last.model_copy(update={"name": f"{family}:{rank}"}) for rank in range(count, stages))
    return cluster.model_copy(update={"devices": (*cluster.devices, *extra)})


def device_part(cluster: Cluster) -> str:
    """`2x8xh100-80gb` -> `h100-80gb`; a cluster with a name of its own gives its devices' kind."""
    counts = _COUNTS.match(cluster.name)
    return cluster.name[counts.end() :] if counts else cluster.devices[0].kind


def _near_text(near: Lean | None, closest: Lean) -> str:
    if near is None:
        name, size = closest.memory.largest[0]
        return f"nothing near fits; the largest unit there is {name} with {bytes_text(size)}"
    count = microbatches_text(near.case.microbatches)
    anew = ANEW[near.case.recompute]
    size = bytes_text(near.memory.peak_bytes)
    return f"nearest fit: pp={near.stages}, {count}, {near.schedule}{anew} -> {size}"


def _steps(
    near: Lean, asked: Sequence[Case], schedules: Sequence[ScheduleName], closest: Lean, cluster: Cluster
) -> str:
    """Only the options that have to change."""
    steps: list[str] = []
    if near.stages > len(cluster.devices):
        steps.append(f"--cluster {near.stages}x{device_part(cluster)}")
    if near.stages != closest.stages:
        steps.append(f"--stages {near.stages}")
    if near.case.microbatches not in {case.microbatches for case in asked}:
        steps.append(f"--microbatches {near.case.microbatches}")
    if near.case.recompute != closest.case.recompute:
        steps.append(f"--recompute {near.case.recompute}")
    if near.schedule not in schedules:
        steps.append(f"--schedule {near.schedule}")
    return " ".join(steps)


def _larger_devices(closest: Lean) -> str:
    """Smaller microbatches help only while there is more than one sample in each."""
    if closest.case.graph.batch_size % 2:
        return "devices with more memory"
    return f"--microbatches {2 * closest.case.microbatches}, or devices with more memory"
