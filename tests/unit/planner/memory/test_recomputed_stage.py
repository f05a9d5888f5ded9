"""Oracles: walk.py where nothing is recomputed; counting tensor by tensor where something is."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import profile_of
from test_memory_activations import kept

from outsize.ir.graph import ModelGraph
from outsize.ir.units.recompute_segments import blocks
from outsize.planner.memory.activations import ActivationTables, UnitBytes
from outsize.planner.memory.recomputed_stage import StageBytes, StageStorage


def told(graph: ModelGraph, units: UnitBytes) -> ModelGraph:
    """What a `UnitBytes` says, as the graph's own."""
    columns = zip(graph.units, units.saved.tolist(), units.backward_workspace.tolist(), strict=True)
    more = [u.model_copy(update={"saved_bytes": s, "backward_workspace_bytes": r}) for u, s, r in columns]
    return graph.model_copy(update={"units": tuple(more)})


@settings(max_examples=100, derandomize=True, deadline=None)
@given(kept())
def test_nothing_recomputed_is_the_walk(case: tuple[ModelGraph, UnitBytes]) -> None:
    graph, units = told(*case), case[1]
    n = len(graph.units)
    alone = UnitBytes(
        units.saved, units.workspace, units.gradients, units.backward_workspace, np.ones(n, np.bool_)
    )
    tables, profile = (
        ActivationTables.of(graph, alone),
        profile_of(graph, [1.0] * n, units.workspace.tolist()),
    )
    block_of = blocks([unit.name for unit in graph.units])
    for first, end in combinations(range(n + 1), 2):
        stage = StageBytes.of(graph, profile, units.gradients[first:end].tolist(), (first, end), block_of)
        held, received = stage.held(()), [v for v in graph.values if v.producer < first <= v.saved_by < end]
        assert held.saved_bytes == units.saved[first:end].sum() - tables.saved_boundary[first, end]
        there = tables.forward[first, end], tables.backward[first, end], tables.first_backward[first, end]
        found = held.forward, held.backward, held.first_backward
        # The walk counts a received value as freed with the unit that keeps it.
        assert found == there or (received and all(a >= b for a, b in zip(found, there, strict=True)))


def stage_of(stores: tuple[StageStorage, ...], own: tuple[int, ...], block: str = "aaaaaa") -> StageBytes:
    n = len(own)
    none = (0,) * n
    return StageBytes(tuple(block[:n]), own, none, none, none, (*none, 0), (*none, 0), stores)


CHAIN = tuple(StageStorage(10 * (u + 1), u, u + 1, (u + 1,), (u + 1,)) for u in range(3))  # of four units


def test_a_segment_keeps_what_it_reads() -> None:
    """Units 1 and 2 of four: 10 comes in and is kept, 20 goes, 30 is what unit 3 keeps; own bytes go."""
    stage = stage_of(CHAIN, (1, 2, 3, 4))
    assert stage.held(()).saved_bytes == 1 + 2 + 3 + 4 + 10 + 20 + 30
    assert stage.held({1, 2}).saved_bytes == 1 + 4 + 10 + 30


def test_blocks_end_a_segment() -> None:
    """Between two blocks the second segment reads what the first has made."""
    assert stage_of(CHAIN, (1, 2, 3, 4), "abbb").held({0, 1, 2, 3}).saved_bytes == 10
    assert stage_of(CHAIN, (1, 2, 3, 4), "aaaa").held({0, 1, 2, 3}).saved_bytes == 0


def test_a_memory_stays_for_its_other_keeper() -> None:
    """A skip that unit 3 keeps too is not gone with unit 1."""
    skip = StageStorage(100, 0, 3, (1, 3), (1, 3))
    assert stage_of((skip,), (0, 0, 0, 0)).held({1, 2}).saved_bytes == 100
    assert stage_of((skip,), (0, 0, 0, 0)).held({0, 1, 2, 3}).saved_bytes == 0


def test_the_second_forward_is_there_beside_what_is_kept() -> None:
    """While 1 and 2 go back: 10 kept for them, unit 0's own, and 2 + 3 + 20 anew."""
    stage = stage_of(CHAIN, (1, 2, 3, 0))
    assert stage.held({1, 2}).backward == max(1 + 10 + 30, 1 + 10 + 2 + 3 + 20)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(kept(), st.randoms(use_true_random=False))
def test_what_is_not_chosen_stays(case: tuple[ModelGraph, UnitBytes], draw: random.Random) -> None:
    """Never more than everything kept and every value that crosses, never less than the rest's own."""
    graph, units = told(*case), case[1]
    n = len(graph.units)
    profile = profile_of(graph, [1.0] * n, units.workspace.tolist())
    block_of = blocks([unit.name for unit in graph.units])
    stage = StageBytes.of(graph, profile, units.gradients.tolist(), (0, n), block_of)
    chosen = {u for u in range(n) if draw.random() < 0.5}
    left = sum(size for u, size in enumerate(stage.own) if u not in chosen)
    assert left <= stage.held(chosen).saved_bytes <= left + sum(s.size_bytes for s in stage.stores)
