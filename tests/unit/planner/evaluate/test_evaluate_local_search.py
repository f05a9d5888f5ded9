"""After the cut was found: stages that need not recompute do not, however many share a device."""

from __future__ import annotations

import pytest
from planner_graphs import chain

from outsize.ir.cluster import make_cluster
from outsize.ir.plan import Axes
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.local_search import polish
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import MOST_STAGES, Layout
from outsize.schedules.families import CHUNKS

RANKS = MOST_STAGES // CHUNKS[-1]


@pytest.mark.parametrize("stages", [RANKS, MOST_STAGES])
def test_stages_that_fit_do_not_recompute(stages: int) -> None:
    schedule = "1f1b" if stages == RANKS else "interleaved"
    menu = Pricing({RANKS: chain([1.0] * stages)}, make_cluster("many", "cpu", 1, RANKS, 1 << 30), "adamw")
    pipeline = menu.pipeline(Layout(Axes(pp=RANKS), stages, schedule, RANKS, RANKS), ("none", "full"))
    assert pipeline is not None
    start = Candidate.of(pipeline, range(stages + 1), [1] * stages)
    found = polish(start)
    assert set(found.choices) == {0}
    assert found.step_s < start.step_s
