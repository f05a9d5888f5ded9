"""A run of pieces against the run of their units."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain, graph_of, graphs, profile_of, unit, value

from outsize.ir.graph import ModelGraph
from outsize.ir.profile import Profile
from outsize.planner.costs.coarsening import coarse_graph, coarse_profile, pieces
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.memory.optimizer_states import optimizer_bytes
from outsize.planner.memory.range_tables import RangeTables

Model = tuple[ModelGraph, Profile]
Ends = tuple[int, ...]
ADAMW = optimizer_bytes("adamw")
# What the microbatch that acts holds at its worst moment: it alone depends on the inside of a piece.
PHASES = ("forward", "backward", "first_backward")


@st.composite
def pieces_of_models(draw: st.DrawFn) -> tuple[Model, Ends]:
    """Some values are among the saved bytes, some units tell what their backward holds."""
    graph, profile = draw(graphs(max_units=9))
    n = len(graph.units)
    savers = [draw(st.sampled_from((-1, v.producer, *v.consumers))) for v in graph.values]
    pairs = zip(graph.values, savers, strict=True)
    values = [v.model_copy(update={"saved_by": saver}) for v, saver in pairs]
    kept = [sum(v.size_bytes for v in values if v.saved_by == u.index) for u in graph.units]
    rising = [draw(st.integers(0, 30)) for _ in graph.units]
    units = [
        u.model_copy(update={"saved_bytes": u.saved_bytes + more, "backward_workspace_bytes": most})
        for u, more, most in zip(graph.units, kept, rising, strict=True)
    ]
    told = graph_of(units, values, graph.parameters, graph.output_bytes)
    costs = zip(profile.units, units, strict=True)
    saved = tuple(c.model_copy(update={"saved_bytes": u.saved_bytes}) for c, u in costs)
    inner = draw(st.sets(st.integers(1, n - 1), max_size=n - 1))
    return (told, profile.model_copy(update={"units": saved})), (0, *sorted(inner), n)


def both(model: Model, ends: Ends) -> tuple[RangeTables, RangeTables]:
    graph, profile = model
    small = coarse_graph(graph, ends), coarse_profile(profile, ends)
    return RangeTables.of(graph, profile, ADAMW), RangeTables.of(*small, ADAMW)


def runs(ends: Ends) -> list[tuple[int, int]]:
    return [(a, b) for b in range(1, len(ends)) for a in range(b)]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(pieces_of_models())
def test_a_run_of_pieces_costs_what_its_units_do(found: tuple[Model, Ends]) -> None:
    model, ends = found
    fine, coarse = both(model, ends)
    for name in (field.name for field in fields(RangeTables) if field.name not in PHASES):
        for a, b in runs(ends):
            whole = getattr(fine, name)[ends[a], ends[b]]
            assert getattr(coarse, name)[a, b] == pytest.approx(whole, rel=1e-12), name


@settings(max_examples=60, derandomize=True, deadline=None)
@given(pieces_of_models())
def test_the_worst_moment_is_known_but_for_one_piece(found: tuple[Model, Ends]) -> None:
    """Above by at most what a piece saves and its workspace. Below by the values that a piece has inside; in
    the backward, by those it touches and the gradients of its weights.
    """
    model, ends = found
    fine, coarse = both(model, ends)
    for a, b in runs(ends):
        inside = range(a, b)
        above = max(saved_and_workspace(model, ends, piece) for piece in inside)
        below = max(inner_bytes(model, ends, piece) for piece in inside)
        touched = max(touched_bytes(model, ends, piece) for piece in inside)
        for name, least in (("forward", below), ("backward", touched), ("first_backward", touched)):
            more = getattr(coarse, name)[a, b] - getattr(fine, name)[ends[a], ends[b]]
            assert -least <= more <= above, name


def saved_and_workspace(model: Model, ends: Ends, piece: int) -> int:
    costs = model[1].units[ends[piece] : ends[piece + 1]]
    return sum(c.saved_bytes for c in costs) + max(c.workspace_bytes for c in costs)


def inner_bytes(model: Model, ends: Ends, piece: int) -> int:
    inside = set(range(ends[piece], ends[piece + 1]))
    return sum(v.size_bytes for v in model[0].values if {v.producer, *v.consumers} <= inside)


def touched_bytes(model: Model, ends: Ends, piece: int) -> int:
    graph, inside = model[0], set(range(ends[piece], ends[piece + 1]))
    values = sum(v.size_bytes for v in graph.values if {v.producer, *v.consumers} & inside)
    owned = graph.owned_parameters(ends[piece], ends[piece + 1] - 1)
    return values + sum(p.size_bytes for p in owned if p.trainable)


# -- where pieces end --------------------------------------------------------------------------------------


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(1, 20))
def test_pieces_are_few_and_of_about_equal_work(seconds: list[int], most: int) -> None:
    """None has more than its part but a single unit; from half of a part on a piece may end."""
    model = chain([float(s) for s in seconds])
    ends = pieces(model[0], UnitSeconds.of(model[1]), most)
    n, part = len(seconds), 3 * sum(seconds) / most
    assert (ends[0], ends[-1], list(ends)) == (0, n, sorted(set(ends)))
    if n <= most:
        assert ends == tuple(range(n + 1))
        return
    assert len(ends) - 1 <= 2 * most + 1
    for first, end in pairwise(ends):
        work = [3 * s for s in seconds[first:end]]
        assert sum(work[:-1]) <= part * (1 + 1e-9), "what is beyond one part is its last unit's"


def test_a_piece_ends_where_least_crosses() -> None:
    """Eight equal units in two pieces: between half and all of a part, the thin value is behind unit 2."""
    sizes = [9, 9, 1, 9, 9, 9, 9]
    values = [value(i, i, (i + 1,), size) for i, size in enumerate(sizes)]
    graph = graph_of([unit(i) for i in range(8)], values)
    assert pieces(graph, UnitSeconds.of(profile_of(graph, [1.0] * 8)), 2)[1] == 3


def test_a_graph_that_was_looked_at_is_merged_like_any_other() -> None:
    """Its owners are cached; those of the pieces are others."""
    graph, profile = chain([1.0] * 4)
    assert graph.owner_of["h.3.weight"] == 3
    merged = coarse_graph(graph, (0, 2, 4))
    assert merged.owner_of["h.3.weight"] == 1
    assert [(v.producer, v.consumers) for v in merged.values] == [(0, (1,))]
    assert merged.fingerprint == graph.fingerprint
    assert coarse_profile(profile, (0, 2, 4)).step_compute_s == profile.step_compute_s
