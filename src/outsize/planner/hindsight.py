"""Look back at a plan: its prediction from its own figures, and what the measured stage times allow.

Neither needs a profile, so a plan file can be drawn and judged long after its units were timed. The same
simulation as in price.py, of the same lowered schedule. Oracle: tests/unit/planner/test_hindsight.py against
the search's own timeline and closed forms.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median

from outsize.errors import BadOption
from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.schedule import Action, Kind, Schedule
from outsize.ir.timeline import Timeline
from outsize.planner.edges import edges_between
from outsize.planner.price import forward_bytes, lower_along
from outsize.planner.simulate import StageCost, bound_s, simulate
from outsize.schedules.builders import build


def expected_timeline(plan: Plan, graph: ModelGraph, cluster: Cluster) -> Timeline:
    """The step as the plan expects it: simulated from the stage times of `plan.expected`.

    `graph` is of one microbatch; `cluster` is the plan's, its first devices in the order of the stages.
    Raises BadOption when the plan holds no expected figures, ModelMismatch for another model's graph.
    """
    if plan.expected is None:
        raise BadOption("the plan holds no expected figures", next_step="outsize plan MODEL --out plan.json")
    costs = [StageCost(stage.forward_s, stage.backward_s) for stage in plan.expected.stages]
    edges = edges_between(graph, plan.bounds(graph))
    sizes = forward_bytes(edges, plan.microbatches)
    return simulate(_lowered(plan, graph), costs, sizes, edges.backward, cluster.link)


def measured_bound_s(plan: Plan, graph: ModelGraph, measured: Timeline) -> float:
    """Seconds the measured step needs at least: its own stage times (medians), with links that cost nothing.

    What a step takes longer is the runtime's and the links'. Raises BadOption when a stage was not measured.
    """
    return bound_s(_lowered(plan, graph), stage_times(measured, len(plan.stages)))


def stage_times(measured: Timeline, stages: int) -> tuple[StageCost, ...]:
    """The median seconds of a forward and of a backward of each stage, over the step's microbatches."""
    found: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    for span in measured.spans:
        if span.lane == "compute":
            action = Action.parse(span.action)
            found[action.stage, action.kind].append(span.duration_s)
    missing = [s for s in range(stages) if not (found[s, Kind.F] and found[s, Kind.B])]
    if missing:
        raise BadOption(
            f"the timeline shows no forward and backward of stage {missing[0]}",
            numbers=f"{len(measured.spans)} spans",
            next_step="measure a training step",
        )
    return tuple(StageCost(median(found[s, Kind.F]), median(found[s, Kind.B])) for s in range(stages))


def _lowered(plan: Plan, graph: ModelGraph) -> Schedule:
    edges = edges_between(graph, plan.bounds(graph))
    return lower_along(edges, build(plan.schedule, len(plan.stages), plan.microbatches))
