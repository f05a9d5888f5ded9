"""Oracle: anew.py for every run, with all its units chosen."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain, profile_of
from test_memory_activations import kept
from test_recomputed_stage import told

from outsize.errors import NoFeasiblePlan
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import make_cluster
from outsize.ir.graph import ModelGraph, Unit
from outsize.ir.plan import Axes
from outsize.ir.units.recompute_segments import blocks
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.activations import UnitBytes
from outsize.planner.memory.optimizer_states import optimizer_bytes
from outsize.planner.memory.range_tables import RangeTables, owned_gradients
from outsize.planner.memory.recomputed_blocks import block_ranges
from outsize.planner.memory.recomputed_stage import StageBytes
from outsize.planner.search.search import search
from outsize.policies.activations import Recompute


def in_blocks(unit: Unit, block: int) -> Unit:
    name = f"h.{block // 2}.{unit.index}" if block % 2 else f"u{unit.index}"
    return unit.model_copy(update={"name": name})


@settings(max_examples=150, derandomize=True, deadline=None)
@given(kept(), st.data())
def test_every_run_holds_what_its_segments_do(
    case: tuple[ModelGraph, UnitBytes], data: st.DataObject
) -> None:
    graph, units = told(*case), case[1]
    n = len(graph.units)
    marks = sorted(data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n)))
    named = tuple(in_blocks(u, mark) for u, mark in zip(graph.units, marks, strict=True))
    graph = graph.model_copy(update={"units": named})
    profile = profile_of(graph, [1.0] * n, units.workspace.tolist())
    optimizer = optimizer_bytes("adamw")
    gradients = owned_gradients(graph, optimizer)
    ends = (0, *sorted(data.draw(st.sets(st.integers(1, n - 1)))), n)
    full = RangeTables.of(graph, profile, optimizer)
    whole = RangeTables(*(getattr(full, name)[np.ix_(ends, ends)] for name in RangeTables.__slots__))
    tables = block_ranges(whole, graph, profile, gradients, ends)
    block_of = blocks([unit.name for unit in graph.units])
    for i, j in combinations(range(len(ends)), 2):
        run = ends[i], ends[j]
        stage = StageBytes.of(graph, profile, gradients[slice(*run)].tolist(), run, block_of)
        held, here = stage.held(set(range(run[1] - run[0]))), tables.of_run(i, j)
        assert here.saved == held.saved_bytes
        assert (here.forward, here.backward, here.first_backward) == (
            held.forward,
            held.backward,
            held.first_backward,
        )


WAYS: tuple[Recompute, ...] = ("none", "full", "selective")


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.lists(st.integers(20, 200), min_size=4, max_size=6), st.integers(400, 1600))
def test_the_search_finds_what_fits_in_any_way(saved: list[int], memory_bytes: int) -> None:
    """Blocks of two units; the best of all cuts and ways under 1f1b, or nothing where nothing fits."""
    graph, profile = chain([1.0] * len(saved), weight_bytes=40)
    pairs = zip(graph.units, saved, strict=True)
    units = [in_blocks(u, 2 * (u.index // 2) + 1).model_copy(update={"saved_bytes": s}) for u, s in pairs]
    graph = graph.model_copy(update={"units": tuple(units)})
    profile = profile_of(graph, [1.0] * len(saved))
    assert "" not in blocks([u.name for u in graph.units])[: len(saved) // 2 * 2]
    cluster = make_cluster("2xcpu", "cpu", 1, 2, memory_bytes)
    pipeline = Pricing({3: (graph, profile)}, cluster, "adamw").pipeline(
        Layout(Axes(pp=2), 2, "1f1b", 3, 3), WAYS
    )
    assert pipeline is not None
    cuts = [(0, cut, len(saved)) for cut in range(1, len(saved))]
    tried = (
        Candidate.of(pipeline, bounds, ways) for bounds, ways in product(cuts, product(range(3), repeat=2))
    )
    best = min((each.step_s for each in tried if each.fits), default=float("inf"))
    try:
        found = search(PlanRequest(exact=True, batch_size=3, schedule="1f1b"), {3: (graph, profile)}, cluster)
    except NoFeasiblePlan:
        assert best == float("inf")
        return
    assert found.expected is not None
    some = any(0 < s.recomputed < s.units for s in found.expected.stages)
    assert found.expected.step_s <= best * 1.01
    assert some or found.expected.step_s >= best * (1 - 1e-9)
