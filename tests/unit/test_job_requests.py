"""Which numbers of nodes a run can have: each is planned, and those without a plan are left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outsize.api import plan
from outsize.errors import BadOption, BadPlan, NoFeasiblePlan
from outsize.ir.cluster import parse_cluster
from outsize.ir.plan import Plan
from outsize.ops.jobs.requests import job_request, job_request_of_plans, node_of, with_nodes


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())))


def batch() -> Tensor:
    return torch.zeros(16, 256)


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def made(**more: Any) -> Plan:
    return plan(model(), (batch(),), loss_fn=loss, **more)


def test_every_number_of_nodes_is_planned_like_the_given_plan() -> None:
    given = made(cluster="2x2xcpu", exact=True, microbatches=4, stages=4)
    request = job_request(model(), (batch(),), nodes=range(1, 4), plan=given, loss_fn=loss)
    assert (request.node, request.devices_per_node, request.kind) == ("2xcpu", 2, "cpu")
    assert [(size.nodes, size.ranks) for size in request.sizes] == [(1, 2), (2, 4), (3, 6)]
    assert all(size.bit_identical and size.microbatches == 4 for size in request.sizes)
    second = request.sizes[1]
    assert given.expected is not None
    assert (second.step_s, second.samples_per_s) == (given.expected.step_s, given.expected.samples_per_s)
    assert second.p95_bytes == max(stage.p95_bytes for stage in given.expected.stages)


def test_a_number_without_a_plan_is_left_out_with_its_error() -> None:
    """Nine units make no twelve stages, and the bits of one device allow no replicas."""
    request = job_request(
        model(), (batch(),), nodes=(2, 4), cluster="3xcpu", loss_fn=loss, exact=True, microbatches=4
    )
    assert [size.nodes for size in request.sizes] == [2]
    assert [(out.nodes, out.code) for out in request.left_out] == [(4, "E202")]
    assert "stages" in request.left_out[0].what


def test_where_nothing_fits_the_error_is_that_of_the_fewest_nodes() -> None:
    with pytest.raises(NoFeasiblePlan, match="needs"):
        job_request(model(), (batch(),), nodes=(1, 2), cluster="1x0.001GB", loss_fn=loss, exact=True)


def test_plans_of_a_script_are_its_only_sizes() -> None:
    plans = [made(cluster=name) for name in ("2xcpu", "3x2xcpu")]
    request = job_request_of_plans(plans, range(1, 4), None)
    assert [size.nodes for size in request.sizes] == [1, 3]
    (left_out,) = request.left_out
    assert (left_out.nodes, left_out.what) == (2, "no plan is given for 4 devices")
    assert [size.nodes for size in request.together] == [3]
    other = plans[0].model_copy(update={"fingerprint": "another"})
    with pytest.raises(BadPlan, match="several models"):
        job_request_of_plans([plans[0], other], range(1, 4), None)


def test_a_node_is_found_in_a_cluster_and_multiplied() -> None:
    for name in ("8xh100-80gb", "2x8xh100-80gb"):
        node = node_of(parse_cluster(name))
        assert (node.name, len(node.devices), node.nodes) == ("8xh100-80gb", 8, 1)
    three, named = with_nodes(node, 3), parse_cluster("3x8xh100-80gb")
    assert three == named
    with pytest.raises(BadOption, match="equal nodes"):
        node_of(parse_cluster("4xv100-32gb+4xa100-40gb"))


def test_a_plan_that_does_not_fill_its_nodes_is_refused() -> None:
    with pytest.raises(BadOption, match="does not fill its nodes"):
        job_request(
            model(), (batch(),), nodes=(1,), plan=made(cluster="3xcpu"), cluster="2xcpu", loss_fn=loss
        )
