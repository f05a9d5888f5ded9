"""The planner's answer to a Problem of dag_problems.py, and the comparison with brute force."""

from __future__ import annotations

import pytest
from convex import Convex
from dag_problems import Problem, brute_force_bottleneck, brute_force_step, checked_step
from options import Choice, fastest

from outsize.planner.dag.dag import Dag
from outsize.planner.dag.partition import split_dag


def planned(problem: Problem) -> tuple[Convex, Choice | None]:
    convex = Convex.of(Dag.of(problem.seconds, problem.edges))
    ways = [
        convex.way(str(i), m.steady, problem.fixed, m.held, problem.boundary, m.once)
        for i, m in enumerate(problem.manners)
    ]
    rooms = problem.rooms.__getitem__
    return convex, fastest(problem.stages, ways, problem.microbatches, problem.in_flight, rooms)


def step_of(problem: Problem) -> float:
    choice = planned(problem)[1]
    return float("inf") if choice is None else choice.step_s


def compare_step(problem: Problem) -> None:
    """Equal optimum, equal feasibility; the plan is what it says."""
    convex, choice = planned(problem)
    best = brute_force_step(problem)
    assert (choice is None) == (best == float("inf"))
    if choice is not None:
        assert choice.step_s == pytest.approx(best, rel=1e-12)
        assert checked_step(problem, convex.stages(choice), choice.ways) == pytest.approx(best, rel=1e-12)


def compare_bottleneck(problem: Problem) -> None:
    """The bottleneck alone, with and without what crosses boundaries."""
    dag = Dag.of(problem.seconds, problem.edges)
    for crossing in ((), problem.boundary):
        split = split_dag(dag, problem.stages, crossing)
        assert split.gap == 0
        assert split.ticks == brute_force_bottleneck(problem, crossing or (0,) * problem.units)
        assert_split(problem, split.stages, split.ticks, crossing)


def assert_split(
    problem: Problem, stages: tuple[int, ...], ticks: int, crossing: tuple[int, ...] = ()
) -> None:
    """Every unit once, no edge back, as slow as it says; no empty stage where nothing crosses."""
    stage_of = {u: s for s, units in enumerate(stages) for u in range(problem.units) if units >> u & 1}
    assert sorted(stage_of) == list(range(problem.units))
    assert sum(bin(units).count("1") for units in stages) == problem.units
    assert all(stage_of[a] <= stage_of[b] for a, b in problem.edges)
    assert crossing or len(set(stage_of.values())) == min(problem.stages, problem.units)
    loads = [sum(problem.seconds[u] for u in stage_of if stage_of[u] == s) for s in range(problem.stages)]
    wires = [0] * problem.stages
    for a in range(problem.units if crossing else 0):
        last = max((stage_of[v] for u, v in problem.edges if u == a), default=stage_of[a])
        for boundary in range(stage_of[a], last):
            wires[boundary] += crossing[a]
    assert max(*loads, *wires) == ticks
