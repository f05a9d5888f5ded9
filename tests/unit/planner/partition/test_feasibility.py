"""Greedy cuts against every cut: they say whether any fits, and the cut they show fits when one does."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain, graphs

from outsize.ir.cluster import Cluster, make_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, ScheduleName
from outsize.ir.profile import Profile
from outsize.planner.costs.stage_edges import edges_between
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.account import account_stages
from outsize.planner.partition.feasibility import ChainFeasibility
from outsize.planner.partition.stage_prices import PricedModel
from outsize.policies.activations import Recompute
from outsize.policies.weights import Weights
from outsize.schedules.builders import build


def devices(count: int, memory_bytes: int) -> Cluster:
    return make_cluster(f"{count}xcpu", "cpu", 1, count, memory_bytes)


def peak(case: PricedModel, schedule: ScheduleName, bounds: tuple[int, ...]) -> int:
    """Of the fullest stage, by the account of the real edges."""
    built = build(schedule, len(bounds) - 1, case.microbatches)
    lowered = edges_between(case.graph, bounds).lowered(built)
    return max(m.peak_bytes for m in account_stages(case.ranges, case.graph, bounds, lowered))


def least(case: PricedModel, schedule: ScheduleName, stages: int) -> int:
    """By trying every cut."""
    inner = combinations(range(1, case.units), stages - 1)
    return min(peak(case, schedule, (0, *cuts, case.units)) for cuts in inner)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(graphs(max_units=7), st.sampled_from(["gpipe", "1f1b", "naive"]), st.integers(1, 3), st.integers(1, 4))
def test_the_verdict_is_that_of_every_cut(
    model: tuple[ModelGraph, Profile], schedule: ScheduleName, stages: int, microbatches: int
) -> None:
    case = PricedModel.of(*model, microbatches, "adamw")
    needed = least(case, schedule, stages)
    for memory_bytes, fits in ((needed, True), (needed - 1, False)):
        feasibility = ChainFeasibility(case, schedule, stages, devices(stages, memory_bytes))
        assert feasibility.fits() is fits
        bounds = feasibility.least_full_cut()
        assert len(bounds) == stages + 1
        assert (peak(case, schedule, bounds) <= memory_bytes) is fits


WAYS: tuple[Recompute, ...] = ("none", "full", "selective")


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    graphs(max_units=6),
    st.sampled_from(
        [(Axes(pp=2), "resident"), (Axes(pp=2, dp_shard=2), "sharded"), (Axes(pp=3), "resident")]
    ),
    st.integers(1, 3),
    st.integers(100, 2000),
)
def test_no_cut_of_a_refuted_layout_fits(
    model: tuple[ModelGraph, Profile], how: tuple[Axes, Weights], microbatches: int, memory_bytes: int
) -> None:
    """Each stage in the option that it likes; without memory everything is refuted."""
    axes, weights = how
    pp, n, captured = axes.pp, len(model[0].units), microbatches * axes.replicas
    layout = Layout(axes, pp, "1f1b", microbatches, captured, weights)
    tables = Pricing({captured: model}, devices(axes.world_size, memory_bytes), "adamw")
    assert Pricing({captured: model}, devices(axes.world_size, 1), "adamw").bounds.refuted(layout, WAYS)
    pipeline = tables.pipeline(layout, WAYS)
    assert pipeline is not None
    refuted = {ways: tables.bounds.refuted(layout, ways) for ways in (WAYS[:2], WAYS)}
    for inner, choices in product(combinations(range(1, n), pp - 1), product(range(3), repeat=pp)):
        if Candidate.of(pipeline, (0, *inner, n), choices).fits:
            assert not refuted[WAYS]
            assert not refuted[WAYS[:2]] or 2 in choices


def test_equal_units_are_shared_out_evenly() -> None:
    case = PricedModel.of(*chain([0.1] * 12), 4, "sgd")
    assert ChainFeasibility(case, "naive", 3, devices(3, 10**6)).least_full_cut() == (0, 4, 8, 12)
