"""Oracle: every cut, and every subset of each stage's units, priced one by one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from itertools import chain, combinations, pairwise, product

import pytest
from findings_of import findings
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain as chain_of
from planner_graphs import graphs

from outsize.errors import NoFeasiblePlan, TooManyStages
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, make_cluster
from outsize.ir.findings import UnitsRecomputed
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan, stages_from_bounds
from outsize.ir.profile import Profile
from outsize.ir.units.names import compress_units
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.memory.headroom import room_bytes
from outsize.planner.memory.optimizer_states import optimizer_bytes
from outsize.planner.memory.range_tables import owned_gradients
from outsize.planner.partition.stage_prices import PricedModel
from outsize.planner.search.evaluate_plan import price
from outsize.planner.search.search import search
from outsize.planner.strategies.selective_recompute import UnitLevelModel

Model = tuple[ModelGraph, Profile]


def small(devices: int, memory_bytes: int) -> Cluster:
    """Devices that memory makes small, and links that cost nothing."""
    cluster = make_cluster(f"{devices}xcpu", "cpu", 1, devices, memory_bytes)
    link = cluster.inner.model_copy(update={"latency_s": 0.0, "bytes_per_s": 1e30})
    return cluster.model_copy(update={"inner": link, "outer": link})


def test_tables_of_chosen_units_go_without_a_search_for_cycles() -> None:
    """In the command line no cycle is looked for, and each choice has tables of its own."""
    graph, profile = chain_of([1.0] * 4, saved_bytes=1000)
    seconds, optimizer = UnitSeconds.of(profile), "sgd"
    gradients = owned_gradients(graph, optimizer_bytes(optimizer))
    units = UnitLevelModel(graph, profile, seconds, gradients, tuple(range(5)))
    chosen = units.case(PricedModel.of(graph, profile, 1, optimizer), (0, 2), frozenset({0}))
    alive, collects = weakref.ref(units), gc.isenabled()
    gc.disable()
    try:
        del units
        assert chosen.recompute == "selective"
        assert alive() is None
    finally:
        (gc.enable if collects else gc.disable)()


def subsets(first: int, end: int) -> Iterator[tuple[int, ...]]:
    units = range(first, end)
    return chain.from_iterable(combinations(units, size) for size in range(len(units) + 1))


def everything(found: Plan, model: Model, cluster: Cluster) -> Iterator[Plan]:
    """The layout of a plan with all cuts and all choices of units."""
    graph, profile = model
    n, p, names = len(graph.units), len(cluster.devices), [u.name for u in graph.units]
    for inner in combinations(range(1, n), p - 1):
        bounds = 0, *inner, n
        plain = stages_from_bounds(graph, bounds, tuple(d.name for d in cluster.devices))
        for chosen in product(*(list(subsets(a, b)) for a, b in pairwise(bounds))):
            stages = tuple(
                stage.model_copy(
                    update={
                        "recompute": "selective" if units else "none",
                        "recomputed": compress_units(names, units),
                    }
                )
                for stage, units in zip(plain, chosen, strict=True)
            )
            plan = found.model_copy(update={"stages": stages, "recompute": "none"})
            yield price(plan, graph, profile, cluster)


def fits(plan: Plan, cluster: Cluster) -> bool:
    assert plan.expected is not None
    return all(s.peak_bytes <= room_bytes(cluster.devices[0]) for s in plan.expected.stages)


def step_s(plan: Plan) -> float:
    assert plan.expected is not None
    return plan.expected.step_s


REQUEST = PlanRequest(exact=True, batch_size=4, microbatches=4, schedule="1f1b")


@settings(max_examples=25, derandomize=True, deadline=None)
@given(graphs(max_units=4), st.integers(100, 700))
def test_no_choice_of_units_beats_the_plan_by_more_than_its_gap(model: Model, memory_bytes: int) -> None:
    cluster = small(2, memory_bytes)
    try:
        found = search(REQUEST, {4: model}, cluster)
    except (NoFeasiblePlan, TooManyStages):
        return
    assert found.expected is not None
    assert found.expected.gap is not None
    fitting = [step_s(plan) for plan in everything(found, model, cluster) if fits(plan, cluster)]
    best = min(fitting, default=step_s(found))
    assert step_s(found) / (1 + found.expected.gap) <= best * (1 + 1e-4)
    whole = search(REQUEST.model_copy(update={"recompute": "full"}), {4: model}, small(2, 10**9))
    assert step_s(found) <= step_s(whole) * (1 + 1e-9)


HEAVY = chain_of([0.1] * 8, saved_bytes=10_000)


def by_memory(memory_bytes: int) -> Plan:
    return search(REQUEST, {4: HEAVY}, small(2, memory_bytes))


def test_a_little_too_little_memory_costs_a_little() -> None:
    """Two microbatches of four units of 10 kB want 80 kB on stage 0: each unit less is four forwards more,
    of which the pipeline hides one, and no cut is better.
    """
    plans = [by_memory(memory) for memory in (90_000, 75_000, 65_000, 60_000, 45_000)]
    assert [step_s(plan) for plan in plans] == pytest.approx([6.0, 6.3, 6.3, 6.6, 6.6])
    assert [len(plan.recomputed(0, NAMES)) for plan in plans] == [0, 1, 1, 2, 2]
    assert all(plan.recompute_of(1) == "none" for plan in plans)


NAMES = [unit.name for unit in HEAVY[0].units]


def test_what_is_chosen_is_in_the_plan_and_priced_as_it_says() -> None:
    plan = by_memory(75_000)
    assert plan.expected is not None
    assert (plan.expected.stages[0].recomputed, plan.expected.stages[0].units) == (1, 4)
    assert findings(plan, UnitsRecomputed)
    again = price(plan, *HEAVY, small(2, 75_000))
    assert again.expected == plan.expected.model_copy(update={"gap": None})


def test_a_choice_edited_by_hand_is_priced_as_it_says() -> None:
    plan = by_memory(75_000)
    more = plan.stages[0].model_copy(update={"recomputed": ("h.0-2",)})
    edited = price(plan.model_copy(update={"stages": (more, plan.stages[1])}), *HEAVY, small(2, 75_000))
    assert edited.expected is not None
    assert plan.expected is not None
    assert edited.expected.stages[0].recomputed == 3
    assert edited.expected.stages[0].backward_s == pytest.approx(plan.expected.stages[0].backward_s + 0.2)
    assert edited.expected.stages[0].activations_bytes < plan.expected.stages[0].activations_bytes


def test_full_where_it_was_asked_for() -> None:
    found = search(REQUEST.model_copy(update={"recompute": "full"}), {4: HEAVY}, small(2, 90_000))
    assert {found.recompute_of(stage) for stage in range(2)} == {"full"}


def test_stages_that_share_devices_take_what_room_is_left() -> None:
    ask = REQUEST.model_copy(update={"schedule": "interleaved", "stages": 2})
    plans = [search(ask, {4: HEAVY}, small(2, memory)) for memory in (200_000, 80_000, 70_000, 60_000)]
    some = [plan for plan in plans if any(stage.recomputed for stage in plan.stages)]
    assert some
    for plan, memory in zip(plans, (200_000, 80_000, 70_000, 60_000), strict=True):
        cluster, expected = small(2, memory), plan.expected
        assert expected is not None
        held = [sum(s.peak_bytes for s in expected.stages[rank::2]) for rank in range(2)]
        assert max(held) <= room_bytes(cluster.devices[0])
        assert price(plan, *HEAVY, cluster).expected == expected.model_copy(update={"gap": None})
    assert step_s(plans[0]) < min(map(step_s, some))
