"""Stages that one device streams: no cut is between devices, so nothing is said of links, shares, waits."""

from __future__ import annotations

import pytest
from planner_graphs import chain

from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import parse_cluster
from outsize.ir.findings import ComputeBound, Finding, HostBound
from outsize.planner.advice.plan_rules import advise
from outsize.planner.search.search import search

MIB = 1 << 20


@pytest.mark.parametrize(("second", "limit"), [(10.0, ComputeBound), (1e-3, HostBound)])
def test_wide_values_and_a_heavy_unit_on_one_device(second: float, limit: type[Finding]) -> None:
    """What would cross takes 3 s over its link, and a unit has a quarter of all seconds."""
    seconds = [2 * second, *[second] * 6]
    fields = {"value_bytes": 1 << 36, "weight_bytes": 100 * MIB, "saved_bytes": MIB}
    graph, profile = chain(seconds, **fields)
    model = graph, profile.model_copy(update={"device": "h100-80gb"})
    cluster = parse_cluster("1xh100-80gb")
    (device,) = cluster.devices
    cluster = cluster.model_copy(update={"devices": (device.model_copy(update={"memory_bytes": 1 << 40}),)})
    plan = search(PlanRequest(batch_size=2, weights="host"), {2: model}, cluster)
    assert len(plan.stages) > 1
    assert advise(plan, *model, cluster) == ()
    assert plan.expected is not None
    assert isinstance(plan.expected.limited_by, limit)
