"""Oracle: HiGHS on random networks of up to 40 units (docs/decisions/0016-highspy.md)."""

from __future__ import annotations

import highspy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.planner.dag.dag import Dag
from outsize.planner.dag.partition import split_dag

SCALE = 1000


def by_highs(weights: list[int], edges: list[tuple[int, int]], stages: int) -> float:
    """Least max of stages; binaries on[u][s] "u is on stage s", and stage numbers that no edge lowers."""
    solver = highspy.Highs()
    solver.silent()
    for name, value in {"mip_rel_gap": 0.0, "threads": 1, "time_limit": 20.0}.items():
        solver.setOptionValue(name, value)
    # Whole weights: no stage is lighter than the mean rounded up.
    slowest = solver.addVariable(lb=-(-sum(weights) // stages) / SCALE)
    on = [[solver.addBinary() for _ in range(stages)] for _ in weights]
    for row in on:
        solver.addConstr(solver.qsum(row) == 1)
    for a, b in edges:
        for s in range(1, stages):
            solver.addConstr(solver.qsum(on[b][:s]) <= solver.qsum(on[a][:s]))
    for s in range(stages):
        load = solver.qsum(w / SCALE * row[s] for w, row in zip(weights, on, strict=True))
        solver.addConstr(load <= slowest)
    solver.minimize(slowest)
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return SCALE * solver.getObjectiveValue()


def network(seed: int, units: int, back: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Each unit uses one to three of the `back` units before it."""
    generator = np.random.default_rng(seed)
    edges = set()
    for unit in range(1, units):
        for _ in range(int(generator.integers(1, 4))):
            edges.add((max(0, unit - int(generator.integers(1, back + 1))), unit))
    return generator.integers(1, SCALE, units).tolist(), sorted(edges)


@settings(max_examples=5, derandomize=True, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(4, 40), st.integers(1, 5), st.integers(2, 4))
def test_highs_agrees(seed: int, units: int, back: int, stages: int) -> None:
    weights, edges = network(seed, units, back)
    split = split_dag(Dag.of(weights, edges), stages)
    assert split.gap == 0
    assert split.ticks == pytest.approx(by_highs(weights, edges, stages), rel=1e-6)
