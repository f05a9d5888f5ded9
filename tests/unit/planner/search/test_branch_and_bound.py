"""What is not priced could not have won: the same best step as when every layout is priced."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain

from outsize.ir.cluster import Cluster, make_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Recompute
from outsize.ir.profile import Profile
from outsize.planner.evaluate.cost_tables import CostTables
from outsize.planner.layout.layout import all_layouts
from outsize.planner.search import branch_and_bound
from outsize.planner.search.branch_and_bound import BranchAndBound, SearchResult

Model = tuple[ModelGraph, Profile]
WAYS: tuple[Recompute, ...] = ("none", "full")
# So many layouts that no search would price them all.
COUNTS = (8, 16)


def hunted(models: dict[int, Model], cluster: Cluster, few: int) -> SearchResult:
    layouts = list(all_layouts(cluster, COUNTS, ("1f1b", "interleaved"), 8))
    assert len(layouts) > branch_and_bound.FEW
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch_and_bound, "FEW", few)
        patch.setattr(branch_and_bound, "MOST_TRIED", len(layouts))
        return BranchAndBound(CostTables(models, cluster, "adamw"), WAYS).run(layouts)


@settings(max_examples=6, derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=8, max_size=8), st.integers(2, 40), st.integers(1, 30))
def test_the_best_step_is_that_of_all_layouts(seconds: list[int], saved: int, room: int) -> None:
    models = {m: chain([s / m for s in seconds], 8, 400, 1000 * saved // m) for m in COUNTS}
    cluster = make_cluster("2x4xcpu", "cpu", 2, 4, 500 * room)
    pruned, full = hunted(models, cluster, few=24), hunted(models, cluster, few=1 << 30)
    best = min((each.step_s for each in full.estimates), default=float("inf"))
    assert min((each.step_s for each in pruned.estimates), default=float("inf")) == best
    assert len(pruned.estimates) < len(full.estimates) or best == float("inf")
    assert pruned.floor_s <= best
