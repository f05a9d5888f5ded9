"""Oracle: for random graphs and cuts, the tables say what `edges_between` and plain sums say."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain, cut_graphs, graphs, profile_of

from outsize.errors import ModelMismatch
from outsize.ir.graph import ModelGraph
from outsize.ir.profile import Profile
from outsize.planner.costs.stage_edges import edges_between, flows
from outsize.planner.memory.optimizer_states import optimizer_bytes
from outsize.planner.memory.range_tables import RangeTables, rows_without_crossing

ADAMW = optimizer_bytes("adamw")


@settings(max_examples=150, derandomize=True, deadline=None)
@given(cut_graphs())
def test_what_a_stage_receives_is_what_the_edges_carry_to_it(
    case: tuple[ModelGraph, Profile, tuple[int, ...]],
) -> None:
    graph, profile, bounds = case
    ranges, edges = RangeTables.of(graph, profile, ADAMW), edges_between(graph, bounds)
    for stage, run in enumerate(pairwise(bounds)):
        assert ranges.received[run] == sum(b for (_, to), b in edges.forward.items() if to == stage)
        # A stage holds every tied weight that it uses and does not own; frozen ones never travel there.
        tied = [f for f in flows(graph) if f.step and f.producer < run[0]]
        held = [f for f in tied if any(run[0] <= u < run[1] for u in f.consumers)]
        assert ranges.replicas[run] == sum(f.size_bytes for f in held)
        moved = sum(f.size_bytes for f in held if f.gradient)
        assert moved == sum(b for (_, to), b in edges.step.items() if to == stage)
        assert ranges.gradient_in[run] == sum(b for (_, to), b in edges.backward.items() if to == stage)
        assert ranges.gradient_out[run] == sum(b for (who, _), b in edges.backward.items() if who == stage)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(cut_graphs())
def test_sums_over_units(case: tuple[ModelGraph, Profile, tuple[int, ...]]) -> None:
    graph, profile, bounds = case
    ranges, n = RangeTables.of(graph, profile, ADAMW), len(graph.units)
    for first, end in pairwise(bounds):
        units, costs = graph.units[first:end], profile.units[first:end]
        owned = graph.owned_parameters(first, end - 1)
        trainable = [p.size_bytes for p in owned if p.trainable]
        weights = sum(p.size_bytes for p in owned) + sum(u.buffer_bytes for u in units)
        assert ranges.weights[first, end] == weights
        assert ranges.gradients[first, end] == sum(trainable)
        assert ranges.optimizer[first, end] == sum(2 * b + 4 for b in trainable)
        assert ranges.saved[first, end] == sum(c.saved_bytes for c in costs)
        everything = [p for p in graph.parameters if p.trainable and p.name in graph.owner_of]
        pairs = [(a.size_bytes, b) for a, b in pairwise([*everything[:1], *everything]) if b in owned]
        assert ranges.update[first, end] == max(
            (max(2 * a, a + 2 * b.size_bytes) for a, b in pairs), default=0
        )
        assert ranges.compute_s[first, end] == pytest.approx(sum(c.forward_s + c.backward_s for c in costs))
        sent = sum(v.size_bytes for v in graph.crossing(end) if first <= v.producer) if end < n else 0
        assert ranges.sent[first, end] == sent


def test_a_profile_of_another_graph_is_refused() -> None:
    graph, _ = chain([1.0, 1.0])
    other, other_profile = chain([1.0, 1.0, 1.0])
    with pytest.raises(ModelMismatch, match=r"3 units, fingerprint f0, against 2 units"):
        RangeTables.of(graph, other_profile, ADAMW)
    assert RangeTables.of(other, profile_of(other, [1.0] * 3), ADAMW).units == 3


def test_a_recompute_makes_a_second_copy_of_what_was_sent() -> None:
    """Each value is kept by the unit that makes it; the last one of a stage is sent, too."""
    graph, profile = chain([1.0] * 3, value_bytes=8, saved_bytes=10)
    kept = [v.model_copy(update={"saved_by": v.producer}) for v in graph.values]
    ranges = RangeTables.of(graph.model_copy(update={"values": tuple(kept)}), profile, ADAMW)
    sends, last = ranges.of_run(0, 2), ranges.of_run(2, 3)
    assert ranges.recomputed().of_run(0, 2).backward == sends.backward + 8
    assert ranges.recomputed().of_run(2, 3).backward == last.backward


@settings(max_examples=40, derandomize=True, deadline=None)
@given(graphs(max_units=6), st.booleans())
def test_rows_without_crossing_are_rows_of_the_tables(model: tuple[ModelGraph, Profile], saves: bool) -> None:
    kept = optimizer_bytes("adamw")
    tables = RangeTables.of(*model, kept)
    bare = (tables if saves else tables.recomputed()).without_crossing()
    row = rows_without_crossing(*model, kept, saves=saves)
    seen = (
        "weights",
        "replicas",
        "gradients",
        "optimizer",
        "inputs",
        "saved",
        "saved_boundary",
        "forward",
        "backward",
    )
    seen += ("first_backward", "received", "sent", "gradient_in", "gradient_out", "update")
    for first in range(bare.units):
        for name in seen:
            assert np.array_equal(
                getattr(row(first), name)[first + 1 :], getattr(bare, name)[first, first + 1 :]
            ), name


@settings(max_examples=20, derandomize=True, deadline=None)
@given(graphs(max_units=6))
def test_tables_of_another_optimizer_are_those_built_for_it(model: tuple[ModelGraph, Profile]) -> None:
    other = optimizer_bytes("adafactor")
    told, built = (
        RangeTables.of(*model, optimizer_bytes("adamw")).with_optimizer(*model, other),
        RangeTables.of(*model, other),
    )
    assert all(np.array_equal(getattr(told, f.name), getattr(built, f.name)) for f in fields(RangeTables))
