"""Stages own trainable weights wherever the model allows; the oracle tries every cut."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest
from findings_of import findings
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import graph_of, graphs, parameter, profile_of, unit, value

from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import make_cluster, parse_cluster
from outsize.ir.findings import UntrainedStages
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.profile import Profile
from outsize.planner.partition.stage_weights import Demand
from outsize.planner.search.search import search


def bare_and_not(kinds: str, seconds: list[float] | None = None) -> tuple[ModelGraph, Profile]:
    """A chain of units: `w` with a trainable weight, `f` with a frozen one, `.` without."""
    units = [unit(i, () if kind == "." else (f"p{i}",), saved_bytes=4) for i, kind in enumerate(kinds)]
    parameters = [
        parameter(f"p{i}", size_bytes=400, trainable=kind == "w")
        for i, kind in enumerate(kinds)
        if kind != "."
    ]
    values = [value(i, i, (i + 1,), 8) for i in range(len(kinds) - 1)]
    graph = graph_of(units, values, parameters, batch_size=2)
    return graph, profile_of(graph, seconds or [0.1] * len(kinds))


def planned(model: tuple[ModelGraph, Profile], stages: int, memory_bytes: int = 1 << 34) -> Plan:
    """With one stage on a rank; of several, one alone has to be trained."""
    cluster = make_cluster(f"{stages}xcpu", "cpu", 1, stages, memory_bytes)
    return search(PlanRequest(exact=True, batch_size=8, stages=stages, chunks=1), {4: model}, cluster)


def trained(graph: ModelGraph, bounds: tuple[int, ...]) -> list[bool]:
    """Whether each stage uses a trainable weight."""
    names = {name for p in graph.parameters if p.trainable for name in p.names}
    return [any(names.intersection(u.parameters) for u in graph.units[a:b]) for a, b in pairwise(bounds)]


def every_cut(units: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *cut, units) for cut in combinations(range(1, units), stages - 1)]


@given(graphs(), st.data())
@settings(max_examples=60, deadline=None)
def test_demands_are_met_where_the_graph_says_so(
    model: tuple[ModelGraph, Profile], data: st.DataObject
) -> None:
    graph, n = model[0], len(model[0].units)
    demand = Demand.of(graph, range(n + 1), frozen=False)
    stages = data.draw(st.integers(1, n))
    for bounds in every_cut(n, stages):
        assert demand.met_by(bounds, range(stages)) is all(trained(graph, bounds))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=n))
    ends = tuple(sorted({min(end, n) for end in accumulate(sizes, initial=0)} | {n}))
    pieces = Demand.of(graph, ends, frozen=False)
    assert pieces.pieces == sum(trained(graph, ends))


@given(st.text("w.f", min_size=2, max_size=7), st.integers(2, 3), st.data())
@settings(max_examples=40, deadline=None)
def test_stages_are_trained_wherever_some_cut_allows(kinds: str, stages: int, data: st.DataObject) -> None:
    stages = min(stages, len(kinds))
    seconds = data.draw(st.lists(st.integers(1, 9), min_size=len(kinds), max_size=len(kinds)))
    graph, profile = bare_and_not(kinds.replace("f", "."), [s / 80 for s in seconds])
    plan = planned((graph, profile), stages)
    some = [bounds for bounds in every_cut(len(kinds), stages) if all(trained(graph, bounds))]
    mine = trained(graph, plan.bounds(graph))
    assert all(mine) or not some
    said = [finding.stages for finding in findings(plan, UntrainedStages)]
    untrained = tuple(stage for stage, is_trained in enumerate(mine) if not is_trained)
    assert said == ([untrained] if untrained and any(mine) else [])


@pytest.mark.parametrize("schedule", [None, "1f1b", "gpipe", "interleaved", "auto"])
def test_every_rank_trains_in_every_schedule(schedule: str | None) -> None:
    graph, profile = bare_and_not("w.w.w....w", [0.1] * 6 + [0.3] * 4)
    request = PlanRequest(exact=True, batch_size=8, stages=2, schedule=schedule)
    plan = search(request, {4: (graph, profile)}, parse_cluster("2xcpu"))
    owners = plan.owners(graph)
    ranks = {plan.ranks[owners[unit.index]] for unit in graph.units if unit.parameters}
    assert ranks == {0, 1}
    if len(plan.stages) == 2:
        assert all(trained(graph, plan.bounds(graph)))


def test_units_without_weights_stay_where_they_are_fast() -> None:
    graph, profile = bare_and_not("w..w", [0.1, 0.1, 0.1, 0.1])
    assert planned((graph, profile), 2).bounds(graph) == (0, 2, 4)


def test_a_stage_is_left_untrained_where_nothing_else_fits() -> None:
    graph, profile = bare_and_not("ww.")
    wide = [u.model_copy(update={"saved_bytes": (4, 4, 1 << 30)[u.index]}) for u in graph.units]
    parameters = [p.model_copy(update={"size_bytes": 1 << 27}) for p in graph.parameters]
    graph = graph.model_copy(update={"units": tuple(wide), "parameters": tuple(parameters)})
    profile = profile_of(graph, [0.1] * 3)
    roomy, narrow = (planned((graph, profile), 2, memory) for memory in (1 << 36, 3 << 29))
    assert all(trained(graph, roomy.bounds(graph)))
    assert narrow.bounds(graph) == (0, 2, 3)
    (said,) = findings(narrow, UntrainedStages)
    assert (said.stages, said.trained_units, said.units, said.stages_in_all) == ((1,), 2, 3, 2)


def test_frozen_weights_are_a_stage_where_the_step_is_much_shorter() -> None:
    graph, profile = bare_and_not("ffffww", [0.3, 0.3, 0.3, 0.3, 0.01, 0.01])
    fast = planned((graph, profile), 2)
    assert trained(graph, fast.bounds(graph)) == [False, True]
    (said,) = findings(fast, UntrainedStages)
    assert said.stages == (0,)
    graph, profile = bare_and_not("fwwwww", [0.3] + [0.1] * 5)
    assert all(trained(graph, planned((graph, profile), 2).bounds(graph)))


def test_tied_weights_count_where_they_are_used() -> None:
    units = [unit(0, ("embed",)), unit(1, ()), unit(2, ("norm",)), unit(3, ("head",)), unit(4, ())]
    tied = [parameter("embed", "head", size_bytes=400), parameter("norm", size_bytes=4)]
    graph = graph_of(units, [value(i, i, (i + 1,), 8) for i in range(4)], tied, batch_size=2)
    plan = planned((graph, profile_of(graph, [0.1, 0.1, 0.1, 5.0, 5.0])), 2)
    assert plan.bounds(graph) == (0, 3, 5)
