"""Oracle: anew.py for every run, with all its units chosen."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import profile_of
from test_anew import told
from test_walk import kept

from outsize.ir.graph import ModelGraph, Unit
from outsize.planner.anew import StageBytes
from outsize.planner.blockwise import block_ranges
from outsize.planner.optimizer import optimizer_bytes
from outsize.planner.ranges import Ranges, owned_gradients
from outsize.planner.walk import UnitBytes


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
    full = Ranges.of(graph, profile, optimizer)
    whole = Ranges(*(getattr(full, name)[np.ix_(ends, ends)] for name in Ranges.__slots__))
    tables = block_ranges(whole, graph, profile, gradients, ends)
    for i, j in combinations(range(len(ends)), 2):
        run = ends[i], ends[j]
        stage = StageBytes.of(graph, profile, gradients[slice(*run)].tolist(), run)
        held, here = stage.held(set(range(run[1] - run[0]))), tables.only(i, j)
        assert here.saved == held.kept
        assert (here.forward, here.backward, here.first_backward) == (
            held.forward,
            held.backward,
            held.first_backward,
        )
