"""Look back at a plan: its prediction from its own figures, and the least that a measured step could take.

Neither needs a profile, so a plan file can be drawn and judged long after its units were timed. The same
simulation as in price.py, of the same lowered schedule. Oracle: tests/unit/planner/test_hindsight.py against
the search's own timeline and closed forms.
"""

from __future__ import annotations

from outsize.errors import BadOption
from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.schedule import COMPUTE, Schedule
from outsize.ir.timeline import Timeline
from outsize.planner.edges import Edges, edges_between
from outsize.planner.estimate import forward_bytes, lower_along
from outsize.planner.simulate import StageCost, critical_path_s, simulate
from outsize.schedules.planned import planned


def expected_timeline(plan: Plan, graph: ModelGraph, cluster: Cluster) -> Timeline:
    """The step as the plan expects it: simulated from the stage times of `plan.expected`.

    `graph` is of one microbatch; `cluster` is the plan's, its first devices in the order of the stages.
    Raises BadOption when the plan holds no expected figures, ModelMismatch for another model's graph.
    """
    if plan.expected is None:
        raise BadOption("the plan holds no expected figures", next_step="outsize plan MODEL --out plan.json")
    costs = [StageCost(stage.forward_s, stage.backward_s) for stage in plan.expected.stages]
    edges = _edges(plan, graph)
    sizes = forward_bytes(edges, plan.microbatches)
    return simulate(_lowered(plan, graph), costs, sizes, edges.backward, cluster.link)


def measured_bound_s(plan: Plan, graph: ModelGraph, measured: Timeline) -> float:
    """Seconds the measured step needs at least: every forward and backward as long as it was, links free.

    What the step took longer is the runtime's and the links'. Raises BadOption when an action of the plan's
    schedule was not measured.
    """
    schedule = _lowered(plan, graph)
    lasted_s = {span.action: span.duration_s for span in measured.spans if span.lane == "compute"}
    cells = [action for row in schedule.actions for action in row if action.kind in COMPUTE]
    missing = [str(action) for action in cells if str(action) not in lasted_s]
    if missing:
        raise BadOption(
            f"the measured step lacks {missing[0]}",
            numbers=f"{len(missing)} of {len(cells)} actions of {plan.schedule} were not measured",
            next_step="measure a training step of this plan",
        )
    return critical_path_s(schedule, {action: lasted_s[str(action)] for action in cells})


def _lowered(plan: Plan, graph: ModelGraph) -> Schedule:
    how = plan.schedule, len(plan.stages), plan.microbatches, plan.axes.pp
    return lower_along(_edges(plan, graph), planned(*how, plan.actions))


def _edges(plan: Plan, graph: ModelGraph) -> Edges:
    graph = graph.in_order(plan.in_order(graph))
    return edges_between(graph, plan.bounds(graph))
