"""Plans in slices: seconds and bytes are those of as many microbatches, and of what slices keep."""

from __future__ import annotations

import pytest
from planner_graphs import chain

from outsize.errors import NoFeasiblePlan
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import make_cluster, parse_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.profile import Profile
from outsize.planner.search.evaluate_plan import price, timeline
from outsize.planner.search.search import search
from outsize.planner.search.sliced import search_in_slices

MIB = 1024**2
FOUR = parse_cluster("4xcpu")
SECONDS = [0.12] * 8


def model(saved_bytes: int = 0, gathered: int = 0) -> tuple[ModelGraph, Profile]:
    graph, profile = chain(SECONDS, saved_bytes=saved_bytes)
    units = tuple(u.model_copy(update={"row_gather_bytes": gathered}) for u in graph.units)
    return graph.model_copy(update={"units": units}), profile


def planned(slices: int, microbatches: int = 1, cluster: str = "4xcpu", **asked: int) -> Plan:
    of = model(**asked)
    request = PlanRequest(
        batch_size=4 * microbatches, microbatches=microbatches, stages=4, axes="pp", slices=slices
    )
    return search_in_slices(request, {microbatches: of}, parse_cluster(cluster))


def step_s(plan: Plan) -> float:
    assert plan.expected is not None
    return plan.expected.step_s


@pytest.mark.parametrize("slices", [2, 4, 12])
def test_one_microbatch_fills_a_pipeline(slices: int) -> None:
    """n + p - 1 turns of a stage's forward and backward, each 1 / n of a microbatch's."""
    plan = planned(slices)
    assert (plan.slices, plan.microbatches, plan.batch_size, plan.actions) == (slices, 1, 4, ())
    turn_s = 2 * 3 * 0.12 / slices
    assert step_s(plan) == pytest.approx((slices + 3) * turn_s, rel=0.02)
    assert plan.expected is not None
    assert plan.expected.samples_per_s == pytest.approx(4 / step_s(plan))


def test_a_plan_that_is_read_again_has_the_same_figures() -> None:
    plan = planned(4, saved_bytes=MIB, gathered=MIB)
    again = price(Plan.of_document(plan.model_dump(mode="json")), *model(MIB, MIB), FOUR)
    assert plan.expected is not None
    assert again.expected == plan.expected.model_copy(update={"gap": None})
    played = timeline(plan, *model(MIB, MIB), FOUR)
    assert {span.action for span in played.spans} >= {"0F3", "3B0"}


def test_stages_hold_slices_and_the_gradients_of_what_is_kept() -> None:
    whole = search(PlanRequest(batch_size=4, microbatches=1, stages=4, axes="pp"), {1: model(MIB)}, FOUR)
    kept, gathered = planned(4, saved_bytes=MIB), planned(4, saved_bytes=MIB, gathered=MIB)
    assert whole.expected is not None
    assert kept.expected is not None
    assert gathered.expected is not None
    held = [stage.activations_bytes for stage in kept.expected.stages]
    # All slices of the one microbatch wait: as much as in one piece, but for what one unit needs at a time.
    assert held[0] == pytest.approx(whole.expected.stages[0].activations_bytes, rel=0.3)
    more = [stage.activations_bytes for stage in gathered.expected.stages]
    assert [b - a for a, b in zip(held, more, strict=True)] == [2 * MIB] * 4


def test_several_microbatches_hold_one_and_a_few_slices() -> None:
    whole = search(PlanRequest(batch_size=32, microbatches=8, stages=4, axes="pp"), {8: model(MIB)}, FOUR)
    sliced = planned(8, 8, saved_bytes=MIB)
    assert whole.expected is not None
    assert sliced.expected is not None
    first = [plan.expected.stages[0].activations_bytes for plan in (whole, sliced) if plan.expected]
    assert first[1] < 0.5 * first[0]


def test_what_does_not_fit_says_by_how_much() -> None:
    small = make_cluster("4xcpu", "cpu", 1, 4, MIB)
    request = PlanRequest(batch_size=4, microbatches=1, stages=4, axes="pp", slices=4)
    with pytest.raises(NoFeasiblePlan, match="in 4 slices of sequences"):
        search_in_slices(request, {1: model(saved_bytes=8 * MIB, gathered=8 * MIB)}, small)
