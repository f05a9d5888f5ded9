"""Stages of branches, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from planner_graphs import chain, graph_of, profile_of, unit, value

from outsize.ir.graph import ModelGraph
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.dag.balance_gain import branches


def towers(*seconds: float) -> tuple[ModelGraph, UnitSeconds]:
    """Units that wait for nobody, and one that waits for all; forward and backward together take so long."""
    n = len(seconds)
    graph = graph_of([unit(i) for i in range(n + 1)], [value(i, i, (n,), 8) for i in range(n)])
    return graph, UnitSeconds.of(profile_of(graph, [s / 3 for s in (*seconds, 0.0)]))


def test_towers_in_another_order_are_lighter() -> None:
    """3 2 | 3 2 2 is the best of its own order, 3 3 | 2 2 2 of any."""
    found = branches(*towers(3.0, 2.0, 3.0, 2.0, 2.0), 2)
    assert found is not None
    assert (found.runs_s, found.stages_s) == (pytest.approx(7.0), pytest.approx(6.0))
    graph, seconds = towers(3.0, 2.0, 3.0, 2.0, 2.0)
    assert sorted(u for stage in found.stages for u in stage) == list(range(len(graph.units)))
    assert [float(seconds.total[list(s)].sum()) for s in found.stages] == pytest.approx([6.0, 6.0])


def test_what_is_balanced_or_in_a_row_stays() -> None:
    assert branches(*towers(3.0, 3.0, 3.0, 3.0), 2) is None
    graph, profile = chain([1.0, 0.5, 1.0, 0.5, 0.5])
    assert branches(graph, UnitSeconds.of(profile), 2) is None
    assert branches(*towers(3.0, 2.0, 3.0), 9) is None


def test_no_stage_is_lighter_than_a_unit() -> None:
    graph, seconds = towers(9.0, 1.0, 1.0)
    assert branches(graph, seconds, 2) is None
    assert np.isclose(seconds.total.sum(), 11.0)
