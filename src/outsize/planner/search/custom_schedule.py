"""Plans for a schedule that the user has written: its number of stages, its ranks, and balanced cuts.

With a stage on each rank the cuts are those that the search finds for 1f1b, with links and memory; with more,
runs of about the same work. The schedule is checked against the messages between the stages, and priced.
Oracle: tests/unit/planner/search/test_custom_schedule.py.
"""

from __future__ import annotations

from outsize.errors import TooManyStages
from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan, stages_from_units
from outsize.ir.profile import Profile
from outsize.ir.schedule import CUSTOM_NAME, Schedule
from outsize.planner.costs.stage_edges import edges_between
from outsize.planner.search.evaluate_plan import price
from outsize.planner.strategies.parallel_branches import even_runs
from outsize.schedules.builders import read, written
from outsize.schedules.check import check, check_waits


def with_schedule(
    plan: Plan, actions: tuple[str, ...], graph: ModelGraph, profile: Profile, cluster: Cluster
) -> Plan:
    """Returns `plan`, which has a stage on each rank, with the schedule; raises InvalidSchedule, which marks
    the cell, and TooManyStages.
    """
    schedule = read(actions)
    ranks = [schedule.rank_of[stage] for stage in range(schedule.stages)]
    devices = [plan.stages[rank].device for rank in ranks]
    if ranks != list(range(len(plan.stages))):
        units = _runs(schedule, graph, profile)
        plan = plan.model_copy(update={"stages": stages_from_units(graph, units, devices)})
    made = plan.model_copy(update={"schedule": CUSTOM_NAME, "actions": written(schedule), "alternatives": ()})
    edges = edges_between(graph, made.bounds(graph))
    forward, backward, step = edges.along
    check_waits(schedule, forward, backward)
    check(edges.lowered(schedule), forward, backward, step)
    return price(made, graph, profile, cluster)


def _runs(schedule: Schedule, graph: ModelGraph, profile: Profile) -> list[list[int]]:
    if schedule.stages > len(graph.units):
        raise TooManyStages(
            f"the schedule has {schedule.stages} stages, the model {len(graph.units)} units to put into them",
            numbers="one unit is the smallest stage",
            next_step=f"a schedule of at most {len(graph.units)} stages",
        )
    seconds = [unit.forward_s + unit.backward_s for unit in profile.units]
    run_of = even_runs(seconds, schedule.stages)
    return [[unit for unit, stage in enumerate(run_of) if stage == s] for s in range(schedule.stages)]
