"""Branches at the same time, and composed schedules: by hand, and against every way for small graphs."""

from __future__ import annotations

from itertools import product
from typing import Final

import pytest
from findings_of import findings
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_graphs import chain, graph_of, graphs, parameter, profile_of, unit, value

from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, make_cluster
from outsize.ir.findings import ComposedSchedule
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.profile import Profile
from outsize.ir.stage_graph import check_quotient
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.dag.stage_levels import StageLevels, by_branches
from outsize.planner.search.evaluate_plan import price, timeline
from outsize.planner.search.search import search
from outsize.planner.strategies.parallel_branches import WORTH
from outsize.schedules.builders import read

ROOMY: Final = 10**12
Model = tuple[ModelGraph, Profile]


def cluster(devices: int, memory_bytes: int = ROOMY) -> Cluster:
    """Links that cost nothing."""
    made = make_cluster(f"{devices}xcpu", "cpu", 1, devices, memory_bytes)
    link = made.inner.model_copy(update={"latency_s": 0.0, "bytes_per_s": 1e30})
    return made.model_copy(update={"inner": link, "outer": link})


def towers(*seconds: float, head_s: float = 0.0, saved_bytes: int = 0) -> Model:
    """Towers of two units each and a head; `seconds` are a tower's of forward, a third of all it takes."""
    names, values, each = 2 * len(seconds), [], []
    for tower, s in enumerate(seconds):
        each += [s / 2, s / 2]
        values.append(value(2 * tower, 2 * tower, (2 * tower + 1,), 8))
        values.append(value(2 * tower + 1, 2 * tower + 1, (names,), 8))
    units = [unit(i, (f"h.{i}.w",), saved_bytes=saved_bytes) for i in range(names + 1)]
    weights = [parameter(f"h.{i}.w", size_bytes=100) for i in range(names + 1)]
    graph = graph_of(units, values, weights)
    return graph, profile_of(graph, [*each, head_s])


def planned(model: Model, devices: int, count: int, **wishes: object) -> Plan:
    request = PlanRequest(exact=True, batch_size=count, microbatches=count, **wishes)  # pyright: ignore[reportArgumentType]
    return search(request, {count: model}, cluster(devices))


def step_s(plan: Plan) -> float:
    assert plan.expected is not None
    return plan.expected.step_s


def test_two_towers_run_beside_each_other_with_one_microbatch() -> None:
    """Each 4 forward and 8 backward, a head of 0.3 and 0.6: 12.9 where runs take 24.9."""
    model = towers(4.0, 4.0, head_s=0.3)
    found, runs = planned(model, 2, 1), planned(model, 2, 1, schedule="1f1b")
    assert (step_s(found), step_s(runs)) == (pytest.approx(12.9), pytest.approx(24.9))
    assert (found.schedule, len(found.stages), found.axes.pp) == ("auto", 3, 2)
    head = found.owners(model[0])[-1]
    assert head == 2, "the head is a stage of its own, behind both towers"
    assert found.expected is not None
    assert found.expected.gap == pytest.approx(0.0, abs=1e-9)
    (composed,) = findings(found, ComposedSchedule)
    assert found.why[0] == composed
    assert (composed.branches, composed.stages, composed.devices) == (True, 3, 2)
    assert (composed.step_s, composed.named_step_s) == (pytest.approx(12.9), pytest.approx(24.9))
    assert (composed.named_schedule, composed.microbatches) == ("1f1b", 1)
    assert (found.alternatives[0].schedule, found.alternatives[0].step_s) == ("1f1b", pytest.approx(24.9))


def test_the_head_is_on_the_rank_that_has_time_for_it() -> None:
    """Towers of 12 and 9, a head of 3: behind the lighter one."""
    model = towers(4.0, 3.0, head_s=1.0)
    found = planned(model, 2, 2)
    owners, ranks = found.owners(model[0]), found.ranks
    assert ranks[owners[-1]] == ranks[owners[2]] != ranks[owners[0]]


@pytest.mark.parametrize("count", [1, 4])
def test_three_equal_towers_keep_two_ranks_busy(count: int) -> None:
    """One tower is cut in two: 18 for a microbatch, where whole towers take 24 and runs 36."""
    found = planned(towers(4.0, 4.0, 4.0), 2, count)
    assert step_s(found) == pytest.approx(18.0 * count, rel=0.02)
    assert found.expected is not None
    assert found.expected.gap == pytest.approx(0.0, abs=0.02)


def test_a_chain_has_nothing_to_run_at_the_same_time() -> None:
    model = chain([1.0] * 6)
    assert planned(model, 2, 4).schedule != "auto"
    composed = planned(model, 2, 4, schedule="auto")
    assert composed.schedule == "auto"
    assert step_s(composed) <= step_s(planned(model, 2, 4)) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("model", "devices", "count"),
    [
        (chain([1.0, 2.0, 1.0, 3.0, 1.0, 1.0, 2.0, 1.0]), 4, 4),
        (chain([1.0] * 8), 4, 8),
        (towers(4.0, 1.0, 2.0, head_s=0.5), 3, 2),
    ],
    ids=["uneven", "even", "towers"],
)
@pytest.mark.sample("uneven", "towers")
def test_auto_is_never_worse_than_a_schedule_with_a_name(model: Model, devices: int, count: int) -> None:
    auto = step_s(planned(model, devices, count, schedule="auto"))
    for name in ("1f1b", "gpipe", "zero-bubble", "zero-bubble-v", "naive"):
        assert auto <= step_s(planned(model, devices, count, schedule=name)) * (1 + 1e-9), name


def test_memory_decides() -> None:
    """Four microbatches of a tower do not fit beside each other; a rank holds what it has room for."""
    model = towers(4.0, 4.0, head_s=0.3, saved_bytes=1000)
    tight = cluster(2, memory_bytes=7_000)
    found = search(PlanRequest(exact=True, batch_size=4, microbatches=4, optimizer="sgd"), {4: model}, tight)
    assert found.schedule == "auto"
    assert found.expected is not None
    held = dict.fromkeys(range(2), 0)
    for rank, stage in zip(found.ranks, found.expected.stages, strict=True):
        held[rank] += stage.peak_bytes
    assert max(held.values()) <= 7_000
    free = search(
        PlanRequest(exact=True, batch_size=4, microbatches=4, optimizer="sgd"), {4: model}, cluster(2)
    )
    assert step_s(free) <= step_s(found)


def test_a_plan_of_branches_is_priced_as_it_was_planned() -> None:
    model = towers(4.0, 3.0, 2.0, head_s=1.0)
    found = planned(model, 2, 3)
    assert found.schedule == "auto"
    again = price(found, *model, cluster(2))
    assert again.expected is not None
    assert found.expected is not None
    assert again.expected.stages == found.expected.stages
    assert step_s(again) == pytest.approx(step_s(found))
    assert timeline(found, *model, cluster(2)).duration_s == pytest.approx(step_s(found))
    schedule = read(found.actions, "auto")
    assert (schedule.microbatches, schedule.stages, schedule.ranks) == (3, len(found.stages), 2)


def test_equal_input_equal_plan() -> None:
    model = towers(4.0, 3.0, 2.0, head_s=1.0)
    assert planned(model, 2, 3).to_json() == planned(model, 2, 3).to_json()


@settings(max_examples=60, derandomize=True, deadline=None)
@given(graphs(max_units=6), st.randoms(use_true_random=False))
def test_stages_by_level_are_a_quotient_and_none_waits_inside(model: Model, draw: object) -> None:
    graph, _ = model
    ranks = tuple(draw.randrange(3) for _ in graph.units)  # pyright: ignore[reportAttributeAccessIssue]
    found = StageLevels(graph).stages(ranks)
    assume(found is not None)
    assert found is not None
    check_quotient(graph, found.owners)
    assert all(found.ranks[found.owners[u]] == rank for u, rank in enumerate(ranks))
    for v in graph.values:
        for user in v.consumers:
            same_rank = ranks[user] == ranks[v.producer]
            assert same_rank or found.owners[user] > found.owners[v.producer]


def test_branches_of_towers() -> None:
    model = towers(4.0, 3.0, 2.0, head_s=2.0)
    ways = list(by_branches(model[0], UnitSeconds.of(model[1]).total, 2))
    cut = [sum(way[u] != way[u + 1] for u in (0, 2, 4)) for way in ways]
    assert len(set(ways[:8])) == 8
    assert cut[:8] == [0] * 8
    assert set(cut[8:]) == {0, 1}, "then one tower in two, at most"
    assert list(by_branches(chain([1.0] * 5)[0], UnitSeconds.of(chain([1.0] * 5)[1]).total, 2)) == []


def every_placement_s(model: Model, devices: int) -> float:
    """The least step of one microbatch, with every unit on every rank as a stage of its own."""
    graph, profile = model
    seconds = UnitSeconds.of(profile)
    best = float("inf")
    for ranks in product(range(devices), repeat=len(graph.units)):
        free, ends = [0.0] * devices, [0.0] * len(graph.units)
        for u, rank in enumerate(ranks):
            needs = [ends[v.producer] for v in graph.values if u in v.consumers]
            ends[u] = free[rank] = max([free[rank], *needs]) + float(seconds.forward[u])
        best = min(best, max(ends))
    return 3 * best


def test_as_good_as_the_best_of_all_placements() -> None:
    for seconds in ((4.0, 4.0), (4.0, 3.0), (5.0, 2.0, 2.0), (3.0, 2.0, 3.0, 2.0)):
        model = towers(*seconds, head_s=0.5)
        assert step_s(planned(model, 2, 1)) <= every_placement_s(model, 2) * (1 + WORTH)
