"""Oracle: every run is walked unit by unit, with sums over all values at each place."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import graph_of, graphs, unit, value

from outsize.ir.graph import ModelGraph
from outsize.planner.memory.activations import ActivationTables, UnitBytes, storages_of


@st.composite
def kept(draw: st.DrawFn) -> tuple[ModelGraph, UnitBytes]:
    """A random graph some of whose values autograd keeps, and what its units hold."""
    graph, _ = draw(graphs())
    values = [
        v.model_copy(update={"id": i, "saved_by": draw(st.sampled_from((-1, v.producer, *v.consumers)))})
        for i, v in enumerate(graph.values)
    ]
    n = len(graph.units)
    column = st.lists(st.integers(0, 60), min_size=n, max_size=n).map(lambda x: np.array(x, np.int64))
    alone = np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    units = UnitBytes(draw(column), draw(column), draw(column), draw(column), alone)
    for v in (v for v in values if v.saved_by >= 0):
        units.saved[v.saved_by] += v.size_bytes
    return graph.model_copy(update={"values": tuple(values)}), units


def forward(graph: ModelGraph, units: UnitBytes, first: int, end: int) -> int:
    """What the microbatch holds in its forward beside the received values."""

    def at(k: int) -> int:
        made = [v for v in graph.values if first <= v.producer <= k <= v.consumers[-1]]
        alive = sum(v.size_bytes for v in made if v.saved_by == -1 or v.saved_by > k)
        twice = sum(v.size_bytes for v in graph.values if v.producer < first <= v.saved_by <= k)
        return int(units.saved[first : k + 1].sum() + alive - twice + units.workspace[k])

    return max(map(at, range(first, end)))


def backward(graph: ModelGraph, units: UnitBytes, first: int, end: int, again: bool) -> int:
    """What it holds in its backward beside received and sent values and gradients that came in."""
    used = [(v, [c for c in v.consumers if c < end]) for v in graph.values if v.requires_grad]
    touched = [(v, inside[-1]) for v, inside in used if inside]

    def at(k: int) -> int:
        crossing = [v for v in graph.values if v.producer < end <= v.consumers[-1]]
        inside = [v for v in graph.values if v.producer < first and v.consumers[-1] < end]
        twice = sum(v.size_bytes for v in crossing if first <= v.saved_by <= k)
        twice += sum(v.size_bytes for v in inside if first <= v.saved_by < end)
        weights = units.gradients[first if again else k + 1 : end].sum()
        own = sum(v.size_bytes for v, last in touched if v.producer <= k <= last) + units.gradients[k]
        past = sum(v.size_bytes for v, last in touched if v.producer < k < last) + units.backward_workspace[k]
        if units.single_op[k]:
            gone = [v for v in graph.values if v.requires_grad and v.producer == k and v.consumers[0] >= end]
            past -= sum(v.size_bytes for v in gone)
        inside = max(past, 0) if units.backward_workspace[k] else own
        return int(units.saved[first : k + 1].sum() - twice + weights + inside)

    return max(map(at, range(first, end)))


@settings(max_examples=150, derandomize=True, deadline=None)
@given(kept())
def test_tables_are_what_a_walk_finds(case: tuple[ModelGraph, UnitBytes]) -> None:
    graph, units = case
    tables = ActivationTables.of(graph, units)
    for first, end in combinations(range(len(graph.units) + 1), 2):
        assert tables.forward[first, end] == forward(graph, units, first, end)
        assert tables.backward[first, end] == backward(graph, units, first, end, again=True)
        assert tables.first_backward[first, end] == backward(graph, units, first, end, again=False)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(kept())
def test_no_cut_holds_less_than_what_its_units_save(case: tuple[ModelGraph, UnitBytes]) -> None:
    """Received and sent values are at least what is counted twice: `without_crossing` relies on it."""
    graph, units = case
    tables = ActivationTables.of(graph, units)
    for first, end in combinations(range(len(graph.units) + 1), 2):
        arriving = [
            v for v in graph.values if v.producer < first and any(first <= c < end for c in v.consumers)
        ]
        leaving = [v for v in graph.values if first <= v.producer < end <= v.consumers[-1]]
        crossing = sum(v.size_bytes for v in (*arriving, *leaving))
        saved = int(units.saved[first:end].sum())
        assert tables.saved_boundary[first, end] <= crossing
        assert tables.backward[first, end] + crossing >= saved + units.gradients[first:end].sum()
        assert tables.first_backward[first, end] + crossing >= saved


def test_views_are_one_memory() -> None:
    """Three slices of 8 of a memory of 24, and a view of all of it."""
    slices = [
        value(i, 0, (1 + i,), 8).model_copy(update={"storage": 5, "storage_bytes": 24}) for i in range(3)
    ]
    whole = value(3, 0, (2,), 24).model_copy(update={"storage": 5, "storage_bytes": 24})
    graph = graph_of([unit(i) for i in range(4)], [*slices, whole, value(4, 1, (2,), 7)])
    view, other = storages_of(graph.values)
    assert (view.size_bytes, view.made, view.used) == (24, 0, (1, 2, 3))
    assert (other.size_bytes, other.made, other.last) == (7, 1, 2)
