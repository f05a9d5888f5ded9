"""Each answer from a case made for it."""

from __future__ import annotations

import pytest
from planner_graphs import chain, graph_of, parameter, profile_of, unit

from outsize.ir.cluster import Cluster, make_cluster, parse_cluster
from outsize.ir.findings import (
    Bottleneck,
    BubbleBound,
    CollectiveBound,
    ComputeBound,
    LinkBound,
    MemoryBound,
    SingleUnit,
)
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes
from outsize.ir.profile import Profile
from outsize.planner.bounds.step_time import PrefixTimes
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.evaluate.bottleneck import limited_by
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.planner.partition.stage_prices import StagePrices

Model = tuple[ModelGraph, Profile]
TWO = parse_cluster("2xcpu")


def on(link_bytes_per_s: float, cluster: Cluster = TWO) -> Cluster:
    wire = cluster.inner.model_copy(update={"latency_s": 0.0, "bytes_per_s": link_bytes_per_s})
    return cluster.model_copy(update={"inner": wire})


def limit(model: Model, microbatches: int, cluster: Cluster = TWO, axes: Axes | None = None) -> Bottleneck:
    """What limits the best cut under 1f1b."""
    mesh = axes or Axes(pp=2)
    layout = Layout(mesh, mesh.pp, "1f1b", microbatches, microbatches * mesh.replicas)
    menu = Pricing({layout.captured: model}, cluster, "sgd")
    pipeline = menu.pipeline(layout, ("none", "full"))
    assert pipeline is not None
    prices = StagePrices(pipeline)
    cut = prices.split()
    assert cut is not None
    found = Candidate.of(pipeline, cut.bounds, cut.choices, prices.floor_s)
    return limited_by(found, PrefixTimes.of(model[0], UnitSeconds.of(model[1])), model[0], cut.bounds)


def test_a_unit_that_no_cut_divides() -> None:
    assert limit(chain([0.1, 0.1, 0.1, 0.4]), 8) == SingleUnit(unit="h.3", stage=1)


def test_memory_that_makes_a_stage_recompute() -> None:
    """Stage 0 takes 8 s a microbatch for 6; without limits the step is 9 x 6 s."""
    tight = make_cluster("2xcpu", "cpu", 1, 2, 3600)
    model = chain([1.0] * 4, saved_bytes=1000)
    found = limit(model, 8, tight)
    assert isinstance(found, MemoryBound)
    assert found.shorter_s > 0
    assert not isinstance(limit(model, 8), MemoryBound)


def test_gradients_of_replicas() -> None:
    """2 GB of gradients at 1 GB/s take a second or two; the last backward hides 0.4 s."""
    graph = graph_of([unit(0, ("w",)), unit(1)], (), [parameter("w", size_bytes=2 * 10**9)])
    model, replicated = (graph, profile_of(graph, [0.1, 0.1])), Axes(pp=1, dp_replicate=2)
    found = limit(model, 8, on(1e9), replicated)
    assert isinstance(found, CollectiveBound)
    assert found.replicas == 2
    assert not isinstance(limit(model, 8, on(1e12), replicated), CollectiveBound)


def test_links_that_nothing_hides() -> None:
    model = chain([0.1] * 6, value_bytes=10**6)
    assert isinstance(limit(model, 8, on(1e6)), LinkBound)
    assert not isinstance(limit(model, 8, on(1e12)), LinkBound)


def test_the_bubble() -> None:
    """Four units on stage 0, two on stage 1: 1.8 of 2.6 s each; three on both would take 2.7 s."""
    found = limit(chain([0.1] * 6), 2)
    assert isinstance(found, BubbleBound)
    assert found.share == pytest.approx(0.31, abs=0.005)


def test_compute() -> None:
    """Eight microbatches: each device is busy for eight of nine."""
    found = limit(chain([0.1] * 6), 8)
    assert isinstance(found, ComputeBound)
    assert (found.stage, found.share) == (0, pytest.approx(8 / 9, abs=0.005))
