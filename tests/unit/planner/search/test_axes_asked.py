"""Axes beside pp that are asked for: every layout has them, microbatches are those of a replica."""

from __future__ import annotations

import pytest
from findings_of import findings
from planner_graphs import chain

from outsize.api.options import request_of
from outsize.errors import BadOption, TooManyStages
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import parse_cluster
from outsize.ir.findings import SumOrder
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, Plan
from outsize.ir.profile import Profile
from outsize.planner.search.evaluate_plan import price
from outsize.planner.search.search import search

FOUR = parse_cluster("4xcpu")
ROWS = ("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1")


def candidates(*counts: int) -> dict[int, tuple[ModelGraph, Profile]]:
    return {m: chain([0.1 / m] * 6, value_bytes=8, saved_bytes=4096 // m, batch_size=8 // m) for m in counts}


def asked(**wishes: object) -> Plan:
    return search(PlanRequest(batch_size=8, **{"axes": "pp", **wishes}), candidates(1, 2, 4, 8), FOUR)  # pyright: ignore[reportArgumentType]


def test_every_stage_gets_as_many_devices_as_the_axes_want() -> None:
    plan = asked(dp_replicate=2)
    assert (plan.axes, plan.unsupported) == (Axes(pp=2, dp_replicate=2), "")
    assert [stage.device for stage in plan.stages] == ["cpu:0", "cpu:2"]
    assert all(other.axes == plan.axes for other in plan.alternatives)
    assert asked(dp_replicate=4).axes == Axes(dp_replicate=4)
    assert asked(dp_shard=2).weights == "sharded"
    resident = asked(dp_shard=2, weights="resident")
    assert (resident.weights, resident.axes, resident.unsupported) == ("resident", Axes(pp=2, dp_shard=2), "")
    assert asked(dp_replicate=2, stages=1).axes == Axes(dp_replicate=2)


def test_microbatches_are_those_of_a_replica() -> None:
    plan = asked(dp_replicate=2, microbatches=2)
    assert (plan.microbatches, plan.microbatch_size, plan.microbatches_of(8)) == (2, 2, 4)
    assert [plan.microbatches_of(size) for size in (1, 3, 5, 100)] == [2, 2, 4, 4]


def test_all_axes_keep_those_that_were_asked_for() -> None:
    plan = asked(dp_replicate=2, axes="all")
    assert (plan.axes.dp_replicate, plan.axes.world_size) == (2, 4)


def test_all_axes_keep_the_weights_that_were_asked_for() -> None:
    plan = asked(dp_shard=2, weights="resident", axes="all")
    assert (plan.axes.dp_shard, plan.weights) == (2, "resident")
    assert {other.weights for other in plan.alternatives} == {"resident"}


def test_a_schedule_of_somebodys_own_runs_on_every_replica() -> None:
    plan = asked(dp_replicate=2, schedule="custom", actions=ROWS, microbatches=2)
    assert (plan.axes, plan.actions) == (Axes(pp=2, dp_replicate=2), ROWS)
    assert plan.expected is not None


def test_weights_are_sharded_over_replicas_that_are_asked_for() -> None:
    with pytest.raises(
        BadOption, match=r"dp_shard and cp, and there is one; dp_shard 1, cp 1. Next: axes=.'dp_shard': 2. "
    ):
        request_of({"weights": "sharded", "axes": "pp"}, 8)
    assert request_of({"weights": "sharded"}, 8).weights == "sharded"
    assert request_of({"weights": "sharded", "dp_shard": 2}, 8).weights == "sharded"


def test_axes_that_the_devices_do_not_have() -> None:
    with pytest.raises(
        BadOption, match=r"want 3 devices each; dp_replicate 3; cluster .4xcpu. has 4 devices"
    ):
        asked(dp_replicate=3)
    with pytest.raises(BadOption, match=r"2 stages want 4 devices each.*Next: --cluster 8xcpu"):
        asked(dp_replicate=4, stages=2)


@pytest.mark.parametrize("axes", [{"dp_replicate": 2}, {"dp_shard": 2}, {"tp": 2}, {"dp_replicate": 4}])
@pytest.mark.sample("axes0", "axes2")
def test_a_schedule_is_composed_for_the_axes_that_were_asked_for(axes: dict[str, int]) -> None:
    """Never slower than one with a name by the same prediction, and priced as it was planned."""
    composed, named = asked(schedule="auto", **axes), asked(**axes)
    assert (composed.schedule, composed.axes, composed.weights) == ("auto", named.axes, named.weights)
    assert composed.expected is not None
    assert named.expected is not None
    assert composed.expected.step_s <= named.expected.step_s * (1 + 1e-9)
    again = price(composed, *candidates(1, 2, 4, 8)[composed.microbatches * composed.axes.replicas], FOUR)
    assert again.expected is not None
    assert again.expected.step_s == pytest.approx(composed.expected.step_s)
    assert again.expected.stages == composed.expected.stages
    assert findings(composed, SumOrder)


def test_a_schedule_is_composed_for_the_best_of_all_axes() -> None:
    composed, named = asked(schedule="auto", axes="all"), asked(axes="all")
    assert composed.schedule == "auto"
    assert composed.expected is not None
    assert named.expected is not None
    assert composed.expected.step_s <= named.expected.step_s * 1.01
    assert asked(schedule="auto", axes="all", microbatches=2).microbatches == 2


def test_a_schedule_that_makes_no_pipeline_of_the_model_is_refused_by_its_reason() -> None:
    """Each device of an interleaved pipeline has two stages at least, and as many microbatches as devices."""
    with pytest.raises(
        TooManyStages, match=r"8 stages on 4 devices, the model has 6 units.*Next: --stages 3"
    ):
        asked(schedule="interleaved")
    with pytest.raises(
        BadOption, match=r"interleaved has no pipeline of 3 devices; 2 microbatches.*--microbatches 3"
    ):
        asked(schedule="interleaved", stages=3, microbatches=2)
    with pytest.raises(BadOption, match=r"interleaved has no pipeline of 1 device;.*Next: --stages 2"):
        asked(schedule="interleaved", stages=1)
