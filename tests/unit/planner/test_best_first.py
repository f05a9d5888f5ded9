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
from outsize.planner import best_first
from outsize.planner.best_first import Found, Hunt
from outsize.planner.layout import everything
from outsize.planner.menu import Menu

Model = tuple[ModelGraph, Profile]
WAYS: tuple[Recompute, ...] = ("none", "full")
# So many layouts that no search would price them all.
COUNTS = (8, 16)


def hunted(models: dict[int, Model], cluster: Cluster, few: int) -> Found:
    layouts = list(everything(cluster, COUNTS, ("1f1b", "interleaved"), 8))
    assert len(layouts) > best_first.FEW
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best_first, "FEW", few)
        patch.setattr(best_first, "MOST_TRIED", len(layouts))
        return Hunt(Menu(models, cluster, "adamw"), WAYS).run(layouts)


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
