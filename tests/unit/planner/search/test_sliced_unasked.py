"""The search takes slices of sequences unasked where they win by more than rounding is worth, and no plan in
slices that is priced beats the one that it finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from math import inf
from typing import Any

import pytest
from findings_of import findings
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain, graphs

from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, make_cluster
from outsize.ir.findings import NotChosen
from outsize.ir.graph import ModelGraph, RowFacts
from outsize.ir.plan import Axes, Plan, stages_from_bounds
from outsize.ir.profile import Profile
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.evaluate.ranking import BITS
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.headroom import room_bytes
from outsize.planner.search.evaluate_plan import price
from outsize.planner.search.incumbents import Limits
from outsize.planner.search.search import search
from outsize.planner.search.sliced import in_slices, model_of_slice
from outsize.planner.search.step_floors import StepFloors
from outsize.policies.activations import Recompute
from outsize.report.wording import sentence

Model = tuple[ModelGraph, Profile]
WAYS: tuple[Recompute, ...] = ("none", "full")
MESHES = (Axes(pp=4), Axes(pp=2, dp_replicate=2), Axes(pp=2, tp=2))
TOKENS = 4096
GIB = 1 << 30


def sequences(model: Model, gathered: list[int], slices: int, *, in_order: bool = True) -> Model:
    """The model of sequences so many times as long as a slice, whose units gather so many bytes."""
    graph, profile = model
    made = (
        unit.model_copy(update={"row_gather_bytes": size})
        for unit, size in zip(graph.units, gathered, strict=False)
    )
    rows = RowFacts(tokens=slices * TOKENS, in_order=in_order)
    return graph.model_copy(update={"units": tuple(made), "rows": rows}), profile


def accelerators(memory_bytes: int) -> Cluster:
    """Four whose peaks may be so many bytes."""
    cluster = make_cluster("4xa100", "a100-80gb", 1, 4, 80 * GIB)
    low, high = 0, 80 * GIB
    while high - low > 1:
        middle = (low + high) // 2
        enough = room_bytes(cluster.devices[0].model_copy(update={"memory_bytes": middle})) >= memory_bytes
        low, high = (low, middle) if enough else (middle, high)
    devices = tuple(each.model_copy(update={"memory_bytes": high}) for each in cluster.devices)
    return cluster.model_copy(update={"devices": devices})


def everything(models: dict[int, Model], slices: int, cluster: Cluster) -> Iterator[Plan]:
    """All plans in slices: every mesh, number of microbatches, cut and recompute of each stage."""
    for (captured, (graph, profile)), axes in product(models.items(), MESHES):
        units, names = len(graph.units), [d.name for d in cluster.devices[:: axes.group_size]]
        cuts = combinations(range(1, units), axes.pp - 1) if captured % axes.replicas == 0 else ()
        for cut, again in product(cuts, tuple(product(WAYS, repeat=axes.pp))):
            plain = stages_from_bounds(graph, (0, *cut, units), tuple(names))
            made = (s.model_copy(update={"recompute": a}) for s, a in zip(plain, again, strict=True))
            plan = Plan(
                model="toy",
                fingerprint="f0",
                cluster=cluster.name,
                axes=axes,
                batch_size=4,
                microbatches=captured // axes.replicas,
                slices=slices,
                schedule="1f1b",
                stages=tuple(made),
            )
            yield price(plan, graph, profile, cluster)


def fits(plan: Plan, cluster: Cluster) -> bool:
    assert plan.expected is not None
    return max(stage.peak_bytes for stage in plan.expected.stages) <= room_bytes(cluster.devices[0])


def step_s(plan: Plan) -> float:
    assert plan.expected is not None
    return plan.expected.step_s


def insist_on_the_best(model: Model, gathered: list[int], memory_bytes: int, slices: int) -> Plan | None:
    """The best plan in slices is found but for ties, and all bounds are below every cut that fits."""
    subject, cluster = sequences(model, gathered, slices), accelerators(memory_bytes)
    models = {2: subject, 4: subject}
    fitting = [plan for plan in everything(models, slices, cluster) if fits(plan, cluster)]
    sliced = {n * slices: model_of_slice(of, slices, cluster) for n, of in models.items()}
    prices, wanted = Pricing(sliced, cluster, "adamw"), list[float]()
    floors = StepFloors(prices, WAYS)
    for plan in fitting:
        count = plan.microbatches
        layout = Layout(plan.axes, plan.axes.pp, "1f1b", count, count * plan.axes.replicas).in_slices(slices)
        assert floors.least_s(layout) <= step_s(plan) * (1 + 1e-9)
        assert floors.together_s(layout, floors.bound(layout).sharpened()) <= step_s(plan) * (1 + 1e-4)
        assert not floors.refuted(layout)
        demand = prices.demands(layout)[0]
        # Stages that only hold frozen weights, or none, are taken where no other cut fits.
        if demand is None or demand.met_by(plan.bounds(subject[0]), layout.ranks):
            wanted.append(step_s(plan))
    pricing = Pricing(models, cluster, "adamw")
    found = in_slices(PlanRequest(batch_size=4), pricing, Limits())
    least_s = min(wanted, default=inf)
    if found is None:
        assert not fitting
        return None
    assert found.expected is not None
    some = any(stage.recomputed for stage in found.stages)
    assert fits(found, cluster)
    assert step_s(found) <= least_s * 1.01
    assert some or step_s(found) >= least_s * (1 - 1e-9)
    if found.expected.gap is not None:
        assert step_s(found) / (1 + found.expected.gap) <= least_s * (1 + 1e-4)
    return found


questions = given(
    graphs(max_units=6),
    st.lists(st.integers(0, 40), min_size=6, max_size=6),
    st.integers(200, 1500),
    st.sampled_from((2, 3, 4)),
)


@settings(max_examples=4, derandomize=True, deadline=None)
@questions
def test_no_plan_in_slices_beats_the_best(
    model: Model, gathered: list[int], memory_bytes: int, slices: int
) -> None:
    insist_on_the_best(model, gathered, memory_bytes, slices)


@pytest.mark.full
@settings(max_examples=40, derandomize=True, deadline=None)
@questions
def test_no_plan_in_slices_beats_the_best_of_more(
    model: Model, gathered: list[int], memory_bytes: int, slices: int
) -> None:
    insist_on_the_best(model, gathered, memory_bytes, slices)


# -- unasked -----------------------------------------------------------------------------------------------


DEVICES = make_cluster("4xcpu", "cpu", 1, 4, 80 * GIB)


def planned(*, in_order: bool = True, **asked: Any) -> Plan:
    """A chain of eight equal units, one sequence in each of two microbatches, over four stages."""
    subject = sequences(chain([0.5] * 8), [0] * 8, 8, in_order=in_order)
    return search(PlanRequest(batch_size=2, **{"stages": 4, **asked}), {2: subject, 1: subject}, DEVICES)


def test_slices_are_taken_and_told() -> None:
    found, whole = planned(), planned(slices=1)
    assert (found.slices, found.schedule, found.axes.pp) == (8, "1f1b", 4)
    assert step_s(found) * BITS < step_s(whole)
    (told,) = [each for each in findings(found, NotChosen) if "slices" in each.differs]
    assert told.slices == 1
    assert told.bit_identical
    assert "not in slices" in sentence(told)
    assert any(other.slices == 1 for other in found.alternatives)


@pytest.mark.parametrize(
    "asked",
    [
        {"exact": True},  # they round otherwise
        {"axes": "pp"},  # nothing is searched
        {"schedule": "zero-bubble"},  # knows no slices
        {"kernels": "compiled"},  # Python keeps what slices read
        {"slices": 1},
        {"bn": "deferred"},
        {"recompute": "offload"},
    ],
)
def test_where_slices_may_not_be_nothing_changes(asked: dict[str, Any]) -> None:
    assert planned(**asked).slices == 1


def test_what_reads_later_rows_is_not_sliced() -> None:
    assert planned(in_order=False).slices == 1


def test_slices_are_not_taken_for_little() -> None:
    """Many microbatches have hardly a bubble."""
    subject = sequences(chain([0.5] * 8), [0] * 8, 8)
    many = search(PlanRequest(batch_size=64, stages=4), {64: subject}, DEVICES)
    assert many.slices == 1
