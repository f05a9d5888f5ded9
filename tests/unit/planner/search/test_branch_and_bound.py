"""What the search says of layouts that it cannot price."""

from __future__ import annotations

from math import inf

from planner_graphs import chain

from outsize.ir.cluster import make_cluster
from outsize.ir.plan import Axes
from outsize.planner.evaluate.cost_tables import CostTables
from outsize.planner.layout.layout import Layout
from outsize.planner.search.branch_and_bound import BranchAndBound


def test_more_stages_than_pieces_are_bounded_and_not_rejected() -> None:
    """Eight units in two pieces, on four devices with room for all: a bound, and no word of memory."""
    cluster = make_cluster("4xcpu", "cpu", 1, 4, 2**40)
    tables = CostTables({4: chain([1.0] * 8)}, cluster, "adamw", ends={4: (0, 4, 8)})
    layouts = [Layout(Axes(pp=stages), stages, "1f1b", 4, 4) for stages in (2, 4)]
    result = BranchAndBound(tables, ("none", "full")).run(layouts)
    assert [estimate.layout.stages for estimate in result.estimates] == [2]
    assert result.rejected == ()
    assert 0 < result.floor_s < inf
