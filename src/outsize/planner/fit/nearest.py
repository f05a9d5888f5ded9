"""Builds the error when nothing fits: which stage lacks how much, and the nearest setting that fits, by
trying what a table lists (`NEAREST`), as `outsize fit` does (changes.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import itemgetter
from typing import Final, Self, final

import numpy as np

from outsize.errors import NoFeasiblePlan
from outsize.ir.cluster import Cluster, Device
from outsize.ir.findings import DoesNotFit
from outsize.ir.formatting import byte_unit, bytes_text, microbatches_text, needs_text
from outsize.ir.plan import ScheduleName
from outsize.planner.evaluate.plan_findings import shortage
from outsize.planner.fit.changes import SettingChange, sufficing
from outsize.planner.memory.account import (
    InFlightState,
    StageMemory,
    account_stage,
    component_table,
    peak_table,
    peaks_of_components,
)
from outsize.planner.partition.feasibility import ChainFeasibility
from outsize.planner.partition.least_full import least_full_cut
from outsize.planner.partition.stage_prices import Pipeline, PricedModel
from outsize.policies.activations import ActivationPolicy
from outsize.schedules.families import SEQUENTIAL, family_of

OTHERS = "outsize plan MODEL without --axes pp or --exact, which looks beyond pipelines"
MORE_STAGES = 8
MOST_STAGES = 64
_COUNTS = re.compile(r"^(?:\d+x)+")


@final
@dataclass(frozen=True, slots=True, eq=False)
class LeastFull:
    """Describes the cut of one attempt that fills its fullest device least."""

    case: PricedModel
    schedule: ScheduleName
    stages: int
    stage: int
    memory: StageMemory
    share: float


def rejections(tried: Iterable[Pipeline]) -> Iterator[DoesNotFit]:
    """Yields why attempts do not fit; schedules that differ in nothing else are one finding."""
    schedules: dict[str, list[str]] = {}
    findings: dict[str, DoesNotFit] = {}
    for pipeline in tried:
        rejection = _rejection(pipeline)
        reason = rejection.model_dump_json(exclude={"schedules"})
        schedules.setdefault(reason, []).append(pipeline.layout.schedule)
        findings.setdefault(reason, rejection)
    for reason, names in schedules.items():
        yield findings[reason].model_copy(update={"schedules": tuple(names)})


def _rejection(tried: Pipeline) -> DoesNotFit:
    """Describes an attempt with what its least full cut lacks; no cut is shown of stages that share
    a device.
    """
    layout, short = tried.layout, None
    if layout.chunks == 1:
        cut = _least_full(tried.options[0][-1], layout.schedule, layout.stages, tried.room)
        short = shortage(cut.stage, cut.memory, tried.room.devices[cut.stage])
    return DoesNotFit(
        schedules=(layout.schedule,),
        microbatches=layout.whole_microbatches,
        stages_per_device=layout.chunks,
        axes=layout.axes.used,
        weights=layout.weights,
        shortage=short,
    )


def no_feasible_plan(
    asked: Sequence[PricedModel],
    spare: Sequence[PricedModel],
    schedules: Sequence[ScheduleName],
    stages: int,
    cluster: Cluster,
) -> NoFeasiblePlan:
    """Returns the error; the `asked` cases do not fit in any of the schedules, `spare` ones may help."""
    closest = _closest([(case, name) for case in asked for name in schedules], stages, cluster)
    if closest.share <= 1:  # What was asked for had several stages on each rank.
        policy = closest.case.activation_policy
        recompute = "" if policy.keeps_all else f" --recompute {policy.name}"
        return NoFeasiblePlan(
            "several stages on each rank do not fit these devices, and one on each does",
            numbers=_near_text(closest, closest),
            next_step=f"--schedule {closest.schedule}{recompute}, without --chunks",
        )
    judge = _PricedCases.of((*asked, *spare), schedules, cluster)
    start = ChainFeasibility(closest.case, closest.schedule, stages, cluster)
    found = next(sufficing(NEAREST, start, judge), None)
    near = None if found is None else _least_full(found.case, found.schedule, found.stages, found.cluster)
    steps = _larger_devices(closest) if near is None else _steps(near, asked, schedules, closest, cluster)
    return NoFeasiblePlan(
        stage_needs_text(closest.stage, closest.memory, cluster.devices[closest.stage]),
        numbers=f"{parts_text(closest.memory)}; {_near_text(near, closest)}",
        next_step=steps,
    )


def _closest(
    attempts: Sequence[tuple[PricedModel, ScheduleName]], stages: int, cluster: Cluster
) -> LeastFull:
    """Returns the least full cut of all attempts, of equal ones that of the first; most are ruled out by a
    bound of how full they are.
    """
    unit_bytes = [_unit_bytes(case) for case, _ in attempts]
    best: tuple[float, int, LeastFull] | None = None
    for place in sorted(range(len(attempts)), key=unit_bytes.__getitem__):
        case, name = attempts[place]
        if best is None or ChainFeasibility(case, name, stages, cluster).may_fill_less(best[0]):
            cut = _least_full(case, name, stages, cluster)
            best = min(((cut.share, place, cut), *([best] if best else ())), key=itemgetter(0, 1))
    assert best is not None, "something was tried"
    return best[2]


def or_other_axes(refused: NoFeasiblePlan) -> NoFeasiblePlan:
    """Returns the error of a pipeline, whose next step names the axes that were not searched as well."""
    steps = "; or ".join(step for step in (refused.next_step, OTHERS) if step)
    return NoFeasiblePlan(refused.what, numbers=refused.numbers, next_step=steps)


def recomputed_text(policy: ActivationPolicy) -> str:
    """Returns what to say after a comma of units that are all treated so; empty for the plain backward."""
    return f", {policy.block_text}" if policy.block_text else ""


@final
@dataclass(frozen=True, slots=True, eq=False)
class _PricedCases:
    """Decides whether settings fit that have one of these cases, whose largest unit has room on a device;
    `schedules` were asked for, `cluster` has usable memory.
    """

    cases: tuple[PricedModel, ...]
    schedules: Sequence[ScheduleName]
    cluster: Cluster

    @classmethod
    def of(cls, cases: Iterable[PricedModel], schedules: Sequence[ScheduleName], cluster: Cluster) -> Self:
        """Leaves out the cases that no number of devices would hold."""
        memory_bytes = max(d.memory_bytes for d in cluster.devices)
        return cls(tuple(c for c in cases if _unit_bytes(c) <= memory_bytes), schedules, cluster)

    def fits(self, setting: ChainFeasibility) -> bool:
        """Returns whether any cut fits."""
        return setting.fits()


def _with_more_stages(setting: ChainFeasibility, judge: _PricedCases) -> Iterator[ChainFeasibility]:
    for count in _stage_counts(judge, setting.stages):
        yield replace(setting, stages=count, cluster=widened(judge.cluster, count))


def _recomputed_last(setting: ChainFeasibility, judge: _PricedCases) -> Iterator[ChainFeasibility]:
    """Yields the setting with a case that keeps all activations, and then with one that does not."""
    for keeps in (True, False):
        cases = (case for case in judge.cases if case.activation_policy.keeps_all is keeps)
        yield from (replace(setting, case=case) for case in islice(cases, 1))


def _by_another_schedule(setting: ChainFeasibility, judge: _PricedCases) -> Iterator[ChainFeasibility]:
    """Yields the schedules that differ in memory, without the sequential one.

    A schedule that another one dominates is tried only where that one may not be, and then before it.
    """
    asked = [family_of(name) for name in judge.schedules]
    plain = [family for family in asked if family.plain and not family.sequential]
    names = dict.fromkeys(f.name for f in plain if f.dominated_by not in judge.schedules)
    names |= dict.fromkeys(f.dominated_by for f in plain if f.dominated_by is not None)
    yield from (replace(setting, schedule=name) for name in names)


def _in_another_case(setting: ChainFeasibility, judge: _PricedCases) -> Iterator[ChainFeasibility]:
    keeps = setting.case.activation_policy.keeps_all
    cases = (case for case in judge.cases if case.activation_policy.keeps_all is keeps)
    yield from (replace(setting, case=case) for case in cases)


_Change = SettingChange[ChainFeasibility, _PricedCases]
STAGES: Final[_Change] = SettingChange(
    name="more stages, on devices like the last one",
    relaxes=frozenset({"stages", "cluster"}),
    settings=_with_more_stages,
)
RECOMPUTED_LAST: Final[_Change] = SettingChange(
    name="activations kept, and then recomputed, for a second forward costs more than another schedule",
    relaxes=frozenset({"case"}),
    settings=_recomputed_last,
)
ANOTHER_SCHEDULE: Final[_Change] = SettingChange(
    name="another schedule", relaxes=frozenset({"schedule"}), settings=_by_another_schedule
)
ONE_MICROBATCH_AT_A_TIME: Final[_Change] = SettingChange(
    name="one microbatch at a time",
    relaxes=frozenset({"schedule"}),
    settings=lambda setting, _: [replace(setting, schedule=SEQUENTIAL.name)],
)
OTHER_MICROBATCHES: Final[_Change] = SettingChange(
    name="other microbatches, whose stages keep or recompute as well",
    relaxes=frozenset({"case"}),
    settings=_in_another_case,
)
NEAREST: Final[tuple[tuple[_Change, ...], ...]] = (
    (STAGES, RECOMPUTED_LAST, ANOTHER_SCHEDULE, OTHER_MICROBATCHES),
    (STAGES, RECOMPUTED_LAST, ONE_MICROBATCH_AT_A_TIME, OTHER_MICROBATCHES),
)
"""Lists what may change of a pipeline that does not fit, the nearest first: few stages before other
schedules, and what is slow last of all.
"""


def _unit_bytes(case: PricedModel) -> int:
    """Returns the minimum that the largest unit needs, alone on a device with one microbatch in flight."""
    table = peak_table(case.ranges, (InFlightState(1, 0, 0, 0),))
    return max(int(table[unit, unit + 1]) for unit in range(case.units))


def _stage_counts(judge: _PricedCases, stages: int) -> list[int]:
    """Returns counts from the minimum that holds weights and states: one by one, then doubled twice."""
    if not judge.cases:
        return []
    memory_bytes = max(d.memory_bytes for d in judge.cluster.devices)
    least = min(-(-_state_bytes(case) // memory_bytes) for case in judge.cases)
    first, units = max(stages, least), min(case.units for case in judge.cases)
    counts = (*range(first, first + MORE_STAGES + 1), 2 * (first + MORE_STAGES), 4 * (first + MORE_STAGES))
    return [count for count in counts if count <= min(units, MOST_STAGES)]


def _state_bytes(case: PricedModel) -> int:
    ranges = case.ranges
    return sum(int(table[0, -1]) for table in (ranges.weights, ranges.gradients, ranges.optimizer))


def _least_full(case: PricedModel, schedule: ScheduleName, stages: int, cluster: Cluster) -> LeastFull:
    bounds = least_full_cut(case, schedule, stages, cluster)
    states = case.states(schedule, stages)
    first, end = bounds[:-1], bounds[1:]
    parts = component_table(case.ranges.at((np.array(first), np.array(end))), case.microbatches)
    peaks = [float(peaks_of_components(parts[:, s : s + 1], own)[0]) for s, own in enumerate(states)]
    fractions = [peak / d.memory_bytes for peak, d in zip(peaks, cluster.devices[:stages], strict=True)]
    stage = fractions.index(max(fractions))
    memory = account_stage(case.ranges, case.graph, (first[stage], end[stage]), states[stage])
    return LeastFull(case, schedule, stages, stage, memory, fractions[stage])


def widened(cluster: Cluster, stages: int) -> Cluster:
    """Returns the cluster with copies of its last device, so that there are at least `stages`."""
    if stages <= len(cluster.devices):
        return cluster
    last, count = cluster.devices[-1], len(cluster.devices)
    family = last.name.rpartition(":")[0] or last.name
    extra = (last.model_copy(update={"name": f"{family}:{rank}"}) for rank in range(count, stages))
    return cluster.model_copy(update={"devices": (*cluster.devices, *extra)})


def device_part(cluster: Cluster) -> str:
    """Returns the device part of a name, `h100-80gb` of `2x8xh100-80gb`, or the devices' kind without such a
    name.
    """
    counts = _COUNTS.match(cluster.name)
    return cluster.name[counts.end() :] if counts else cluster.devices[0].kind


def stage_needs_text(stage: int, memory: StageMemory, room: Device) -> str:
    """Returns `stage 2 needs 31.4 GiB, cpu:1 has room for 23.8`; `room` is a device with usable memory."""
    return needs_text(f"stage {stage}", memory.peak_bytes, room.name, room.memory_bytes)


def parts_text(memory: StageMemory) -> str:
    """Returns `weights 3.1 + gradients 3.1 + optimizer 6.2 + activations 18.7 GiB`, without what is zero."""
    name, unit = byte_unit(memory.peak_bytes)
    parts = (
        ("weights", memory.weights_bytes),
        ("gradients", memory.gradients_bytes),
        ("optimizer", memory.optimizer_bytes),
        ("activations", memory.activations_bytes),
        ("boundary", memory.boundary_bytes),
    )
    return " + ".join(f"{part} {size / unit:.1f}" for part, size in parts if size / unit >= 0.05) + f" {name}"


def _near_text(near: LeastFull | None, closest: LeastFull) -> str:
    if near is None:
        name, size = closest.memory.largest[0]
        return f"nothing near fits; the largest unit there is {name} with {bytes_text(size)}"
    count = microbatches_text(near.case.microbatches)
    recompute_text = recomputed_text(near.case.activation_policy)
    size = bytes_text(near.memory.peak_bytes)
    return f"nearest fit: pp={near.stages}, {count}, {near.schedule}{recompute_text} -> {size}"


def _steps(
    near: LeastFull,
    asked: Sequence[PricedModel],
    schedules: Sequence[ScheduleName],
    closest: LeastFull,
    cluster: Cluster,
) -> str:
    """Returns only the options that have to change."""
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
    return " ".join(steps) or "devices with more memory"


def _larger_devices(closest: LeastFull) -> str:
    """Returns the next step: smaller microbatches while each has more than one sample, or larger devices."""
    if closest.case.graph.batch_size % 2:
        return "devices with more memory"
    return f"--microbatches {2 * closest.case.microbatches}, or devices with more memory"
