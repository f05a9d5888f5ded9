"""A host with less memory than it is to hold: bytes and seconds of a disk by hand, and what a plan says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from findings_of import findings
from planner_graphs import chain

from outsize.errors import BadOption
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, parse_cluster
from outsize.ir.cluster_file import load_cluster
from outsize.ir.findings import HostMemoryEnough, HostMemoryShort, StageValuesOnHost, WeightsOnHost
from outsize.ir.plan import Expected, Plan
from outsize.planner.offload.host_traffic import host_bytes
from outsize.planner.search.evaluate_plan import price
from outsize.planner.search.search import search
from outsize.policies.weights import Weights

MIB = 1 << 20
GRAPH, PROFILE = chain([0.01] * 8, value_bytes=MIB, weight_bytes=100 * MIB, saved_bytes=MIB)
MODEL = {2: (GRAPH, PROFILE.model_copy(update={"device": "h100-80gb"}))}
SMALL: Any = {"host_memory_bytes": 1 << 30, "disk_bytes_per_s": 1e9}


def cluster(**host: float) -> Cluster:
    """A GPU of 1,400 MiB, and what somebody says of its host."""
    found = parse_cluster("1xh100-80gb")
    (device,) = found.devices
    small = device.model_copy(update={"memory_bytes": 1400 * MIB, "context_bytes": 530 * MIB})
    return found.model_copy(update={"devices": (small,), **host})


def planned(weights: Weights | None = None, **host: float) -> Plan:
    return search(PlanRequest(batch_size=2, weights=weights), MODEL, cluster(**host))


def figures(plan: Plan) -> Expected:
    assert plan.expected is not None
    return plan.expected


def test_nothing_changes_where_nobody_says_anything() -> None:
    plan = planned()
    assert not any(degree.disk for degree in figures(plan).degrees)
    assert [reason.host_memory_known for reason in findings(plan, WeightsOnHost)] == [False]
    assert not findings(plan, HostMemoryShort)


def test_a_host_with_room_says_so() -> None:
    plan = planned(host_memory_bytes=8 << 30, disk_bytes_per_s=1e9)
    assert plan.expected == planned().expected
    assert findings(plan, HostMemoryEnough) == [HostMemoryEnough(host_memory_bytes=8 << 30)]
    assert [reason.host_memory_known for reason in findings(plan, WeightsOnHost)] == [True]


def test_what_is_too_much_is_read_and_written() -> None:
    plan = planned(**SMALL)
    last, spilled = figures(plan).degrees[-1], host_bytes(GRAPH, plan) - (1 << 30)
    assert last.disk
    assert last.weights == plan.weights == "host"
    assert last.bound.disk_s == pytest.approx(2 * spilled / 1e9)
    assert last.bound.longest == "the disk"
    assert figures(plan).step_s == last.step_s == last.bound.disk_s > figures(planned()).step_s
    assert figures(plan).samples_per_s == pytest.approx(2 / last.step_s)
    (short,) = findings(plan, HostMemoryShort)
    assert (short.host_memory_bytes, short.missing_bytes) == (1 << 30, spilled)
    assert (short.disk_bytes_per_s, short.disk_s) == (1e9, last.bound.disk_s)
    again = price(plan, *MODEL[2], cluster(**SMALL))
    assert figures(again).degrees[-1] == last


def test_a_fast_disk_hides() -> None:
    plan = planned(host_memory_bytes=1 << 30, disk_bytes_per_s=1e12)
    assert figures(plan).step_s == figures(planned()).step_s
    assert figures(plan).degrees[-1].disk


def test_of_a_disk_that_nobody_knows_there_is_no_price() -> None:
    plan = planned(host_memory_bytes=1 << 30)
    assert not any(degree.disk for degree in figures(plan).degrees)
    assert [short.disk_s for short in findings(plan, HostMemoryShort)] == [None]


def test_values_between_stages_need_memory_as_well() -> None:
    """Seven values of 1 MiB, of two microbatches."""
    host, away = planned("host", **SMALL), planned("host-activations", **SMALL)
    more_s = figures(away).degrees[-1].bound.disk_s - figures(host).degrees[-1].bound.disk_s
    assert more_s == pytest.approx(2 * 14 * MIB / 1e9)
    assert findings(away, StageValuesOnHost) == [StageValuesOnHost(host_bytes=14 * MIB)]


def test_a_file_says_it(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"devices": ["h100"], "host_memory_bytes": 1 << 36, "disk_bytes_per_s": 3e9}))
    found = load_cluster(path)
    assert (found.host_memory_bytes, found.disk_bytes_per_s) == (1 << 36, 3e9)
    path.write_text(json.dumps({"devices": ["h100"], "disk_bytes_per_s": 0}))
    with pytest.raises(BadOption, match="disk_bytes_per_s"):
        load_cluster(path)
