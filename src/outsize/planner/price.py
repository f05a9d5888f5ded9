"""What a given cut costs: seconds by simulating its schedule, bytes by executing it. Cuts are not moved.

`price` is for plans that a person has edited; the search uses the same `estimate` for its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

from outsize.errors import TooFewSamples, UnknownDevice
from outsize.ir.cluster import Cluster, Device
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Expected, Plan, ScheduleName, StageFigures
from outsize.ir.profile import Profile, UnitCost
from outsize.ir.schedule import Schedule
from outsize.ir.timeline import Timeline
from outsize.planner.edges import Edge, Edges, edges_between
from outsize.planner.memory import StageMemory, account_ranges
from outsize.planner.reasons import fullest_reason, over_memory, pace_reason
from outsize.planner.simulate import StageCost, simulate
from outsize.planner.split import Case
from outsize.schedules.builders import build
from outsize.schedules.lower import lower


@final
@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """One way to run one case, with what it is expected to cost."""

    case: Case
    schedule: ScheduleName
    bounds: tuple[int, ...]
    devices: tuple[Device, ...]
    costs: tuple[StageCost, ...]
    memories: tuple[StageMemory, ...]
    timeline: Timeline

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step without the optimizer's."""
        return self.timeline.duration_s

    @property
    def peak_bytes(self) -> int:
        """Peak of the fullest stage."""
        return max(m.peak_bytes for m in self.memories)


def estimate(
    case: Case, schedule: ScheduleName, bounds: Sequence[int], cluster: Cluster, ranks: Sequence[int]
) -> Estimate:
    """Simulate and account one cut; `ranks[stage]` is the index of the stage's device in the cluster."""
    edges = edges_between(case.graph, bounds)
    lowered = lower_along(edges, build(schedule, len(bounds) - 1, case.microbatches))
    costs = stage_costs(case.profile, bounds)
    timeline = simulate(
        lowered,
        costs,
        forward_bytes(edges, case.microbatches),
        edges.backward,
        lambda a, b: cluster.link(ranks[a], ranks[b]),
    )
    memories = account_ranges(case.ranges, case.graph, bounds, lowered)
    devices = tuple(cluster.devices[rank] for rank in ranks)
    return Estimate(case, schedule, tuple(bounds), devices, costs, memories, timeline)


def lower_along(edges: Edges, schedule: Schedule) -> Schedule:
    """The compute-only schedule with the transfers of these edges."""
    return lower(schedule, frozenset(edges.forward), frozenset(edges.backward), frozenset(edges.step))


def stage_costs(profile: Profile, bounds: Sequence[int]) -> tuple[StageCost, ...]:
    """Seconds per stage and microbatch: the sums over its units."""
    runs = (profile.units[first:end] for first, end in pairwise(bounds))
    return tuple(_stage_cost(run) for run in runs)


def _stage_cost(run: Sequence[UnitCost]) -> StageCost:
    return StageCost(
        sum(c.forward_s for c in run),
        sum(c.backward_s for c in run),
        sum(c.backward_weight_s for c in run),
    )


def expected(found: Estimate, batch_size: int) -> Expected:
    """The figures that a plan shows."""
    measured = all(c.source == "measured" for c in found.case.profile.units)
    return Expected(
        step_s=found.step_s,
        bubble=found.timeline.bubble,
        samples_per_s=batch_size / found.step_s if found.step_s else 0.0,
        stages=tuple(_figures(found, stage) for stage in range(len(found.costs))),
        source="measured" if measured else "roofline",
    )


def price(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Plan:
    """The plan with `expected` and `why` of what it says now; its cuts stay, even if they do not fit.

    `graph` and `profile` are of one microbatch of the plan. Raises ModelMismatch, BadPlan,
    TooFewSamples, and UnknownDevice when the cluster lacks a device of the plan.
    """
    found = _of_plan(plan, graph, profile, cluster)
    over = over_memory(found.memories, found.devices)
    why = (
        *over,
        pace_reason(graph, found.bounds, found.costs),
        fullest_reason(found.memories, found.devices),
    )
    return plan.model_copy(update={"expected": expected(found, plan.batch_size), "why": why})


def timeline(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Timeline:
    """The predicted Timeline of one step of the plan; raises as `price` does."""
    return _of_plan(plan, graph, profile, cluster).timeline


def check_enough(batch_size: int, microbatches: int) -> None:
    """Raise TooFewSamples when a microbatch would be empty."""
    if microbatches > batch_size:
        raise TooFewSamples(
            f"a batch of {batch_size} cannot be cut into {microbatches} microbatches",
            numbers=f"{microbatches - batch_size} would be empty",
            next_step=f"--microbatches {batch_size}, or a larger --batch",
        )


def _of_plan(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Estimate:
    check_enough(plan.batch_size, plan.microbatches)
    case = Case.of(graph, profile, plan.microbatches, plan.optimizer, plan.recompute)
    ranks = tuple(_rank_of(stage.device, cluster) for stage in plan.stages)
    return estimate(case, plan.schedule, plan.bounds(graph), cluster, ranks)


def _rank_of(device: str, cluster: Cluster) -> int:
    names = [d.name for d in cluster.devices]
    if device in names:
        return names.index(device)
    raise UnknownDevice(
        f"the plan names {device!r}, which cluster {cluster.name!r} has not",
        numbers=f"its devices: {', '.join(names)}",
        next_step=f"set the stage's device to {names[-1]!r}, or give a larger --cluster",
    )


def forward_bytes(edges: Edges, microbatches: int) -> Mapping[Edge, int]:
    """Bytes per forward message. A step edge beside a forward one is spread over the step's messages."""
    merged = dict(edges.step)
    for edge, size in edges.forward.items():
        merged[edge] = size + edges.step.get(edge, 0) // microbatches
    return merged


def _figures(found: Estimate, stage: int) -> StageFigures:
    first, end = found.bounds[stage], found.bounds[stage + 1]
    memory, cost = found.memories[stage], found.costs[stage]
    return StageFigures(
        units=end - first,
        parameters=sum(p.numel for p in found.case.graph.owned_parameters(first, end - 1)),
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        weights_bytes=memory.weights_bytes,
        gradients_bytes=memory.gradients_bytes,
        optimizer_bytes=memory.optimizer_bytes,
        activations_bytes=memory.activations_bytes,
        boundary_bytes=memory.boundary_bytes,
        busy=found.timeline.utilisation(stage),
        device_bytes=found.devices[stage].memory_bytes,
    )
