"""Seconds of units on the host, added up by hand, and what a cluster says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from planner_graphs import chain

from outsize.ir.cluster import parse_cluster
from outsize.ir.cluster_file import load_cluster
from outsize.ir.graph import Work
from outsize.ir.hardware.devices import host_bytes_per_s, host_flops_per_s, source_of
from outsize.planner.costs.host_times import HostSpeed

PRODUCT = Work(family="matmul", dtype="bfloat16", flops=8_000_000, moved_bytes=1_000)
COPY = Work(family="elementwise", dtype="bfloat16", flops=1_000, moved_bytes=6_000_000, launches=9)


def test_a_unit_is_the_sum_of_its_works_each_bound_by_one_of_both() -> None:
    speed = HostSpeed(flops_per_s=4e6, bytes_per_s=3e6)
    graph, _ = chain([1.0, 1.0])
    first = graph.units[0].model_copy(
        update={"forward": (PRODUCT, COPY), "backward_input": (PRODUCT,), "backward_weight": ()}
    )
    by_sums = graph.units[1].model_copy(update={"flops": 2_000_000, "moved_bytes": 9_000_000})
    found = speed.unit_seconds(graph.model_copy(update={"units": (first, by_sums)}))
    assert found.rows() == [(2.0 + 2.0, 2.0, 0.0), (3.0, 3.0, 3.0)]


def test_ranks_of_a_machine_share_its_host() -> None:
    one, four = (HostSpeed.of(parse_cluster("2x4xrtx4090-24gb"), ranks) for ranks in (1, 8))
    assert (one.flops_per_s, one.bytes_per_s) == (host_flops_per_s("rtx4090"), host_bytes_per_s("rtx4090"))
    assert (four.flops_per_s, four.bytes_per_s) == (one.flops_per_s / 4, one.bytes_per_s / 4)
    assert "KTransformers" in source_of("host_tflops", "rtx4090")


def test_a_cluster_may_say_what_its_hosts_reach(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    said = {"devices": ["rtx4090-24gb"] * 2, "host_flops_per_s": 2.1e13, "host_bytes_per_s": 4e11}
    path.write_text(json.dumps(said), encoding="utf-8")
    assert HostSpeed.of(load_cluster(path), 2) == HostSpeed(flops_per_s=1.05e13, bytes_per_s=2e11)
    assert HostSpeed.of(load_cluster(path), 1).flops_per_s == pytest.approx(2.1e13)
