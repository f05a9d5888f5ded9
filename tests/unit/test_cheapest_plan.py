"""`objective="cost"`: the plan with the least money per sample, of all parts of a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from findings_of import findings
from torch import Tensor, nn

import outsize
from outsize import api
from outsize.api.cheapest import parts_of
from outsize.errors import BadOption
from outsize.ir.answers.ranking import price_per_million
from outsize.ir.answers.request import Objective
from outsize.ir.cluster import Cluster, parse_cluster
from outsize.ir.cluster_file import load_cluster
from outsize.ir.findings import CheapestDevices
from outsize.ir.plan import Plan
from outsize.report.wording import sentence


def subject() -> tuple[nn.Module, tuple[Tensor]]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 2048), nn.ReLU(), nn.Linear(2048, 256))
        return model, (torch.empty(4096, 256),)


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def priced(name: str, **prices: float) -> Cluster:
    cluster = parse_cluster(name)
    devices = (d.model_copy(update={"price_per_hour": prices[d.kind[:2]]}) for d in cluster.devices)
    return cluster.model_copy(update={"devices": tuple(devices)})


def planned(cluster: Cluster, objective: Objective = "time") -> Plan:
    return outsize.plan(
        *subject(),
        cluster=cluster,
        loss_fn=loss,
        microbatches=1,
        request=outsize.Request(objective=objective),
    )


def cost(plan: Plan, cluster: Cluster) -> float:
    assert plan.expected is not None
    assert cluster.price_per_hour is not None
    return price_per_million(cluster.price_per_hour, plan.expected.step_s, plan.batch_size)


@pytest.mark.parametrize("h100", [1.0, 200.0])
@pytest.mark.sample("200.0")
def test_the_plan_costs_as_little_as_that_of_any_part(h100: float) -> None:
    cluster = priced("2xh100-80gb+2xl4", h1=h100, l4=0.8)
    plan = planned(cluster, objective="cost")
    (said,) = findings(plan, CheapestDevices)
    costs = [cost(planned(part), part) for part in parts_of(cluster)]
    assert len(costs) == 8
    assert said.price_per_million == pytest.approx(min(costs))
    kinds = {device.name: device.kind for device in cluster.devices}
    used = {kind for name, kind in kinds.items() for stage in plan.stages if name in stage.device}
    assert used == ({"h100-80gb"} if h100 < 2 else {"l4-24gb"})
    assert said.of_devices == 4
    assert "least money per sample" in sentence(said)


def test_the_plan_is_one_of_the_whole_cluster() -> None:
    cluster = priced("2xh100-80gb+2xl4", h1=200.0, l4=0.8)
    seen = api.outlook(
        *subject(), cluster=cluster, loss_fn=loss, microbatches=1, request=outsize.Request(objective="cost")
    )
    assert seen.plan.cluster == cluster.name
    assert seen.plan.expected is not None
    assert seen.timeline.spans


def test_parts_are_halves_of_equal_nodes_and_keep_their_links() -> None:
    cluster = parse_cluster("2x4xh100-80gb+2xl4")
    parts = list(parts_of(cluster))
    assert [len(part.devices) for part in parts] == [10, 9, 8, 6, 5, 4, 4, 3, 2, 3, 2, 1, 2, 1]
    assert parts[0].devices == cluster.devices
    assert [part.devices_per_node for part in parts if not part.parts][:2] == [4, 4]


def test_nodes_of_another_kind_may_be_rented_alone(tmp_path: Path) -> None:
    """Also where a cluster file lists devices one after the other; one node is not taken apart by kinds."""
    devices = [{"kind": "h100-80gb", "price_per_hour": 200.0}] * 2 + [
        {"kind": "l4", "price_per_hour": 0.5}
    ] * 2
    found: dict[int, list[list[str]]] = {}
    for per_node in (2, 4):
        path = tmp_path / f"lab{per_node}.json"
        path.write_text(json.dumps({"devices": devices, "devices_per_node": per_node}))
        cluster = load_cluster(path)
        parts = list(parts_of(cluster))
        assert parts[0] == cluster
        found[per_node] = [[device.kind[:2] for device in part.devices] for part in parts]
    two, one = ["l4", "l4"], ["l4"]
    assert [kinds for kinds in found[2] if "h1" not in kinds] == [two, one]
    assert sorted(map(len, found[2])) == [1, 1, 2, 2, 2, 3, 3, 4]
    assert found[4] == [["h1", "h1", "l4", "l4"], ["h1", "h1"], ["h1"]]


def test_devices_without_a_price_are_named() -> None:
    with pytest.raises(BadOption, match="no price for h100-80gb of cluster '2xh100-80gb'"):
        planned(parse_cluster("2xh100-80gb"), objective="cost")
