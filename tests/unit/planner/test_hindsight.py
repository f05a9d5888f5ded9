"""A plan is redrawn from its own figures; a measured step is held against its own stage times."""

from __future__ import annotations

import pytest
from planner_graphs import chain

from outsize.errors import BadOption
from outsize.ir.cluster import parse_cluster
from outsize.ir.timeline import Span, Timeline
from outsize.planner.hindsight import expected_timeline, measured_bound_s, stage_times
from outsize.planner.price import timeline
from outsize.planner.search import Request, search
from outsize.planner.simulate import StageCost

TWO = parse_cluster("2xcpu")
GRAPH, PROFILE = chain([0.1] * 6)
PLAN = search(Request(batch_size=4, microbatches=4), {4: (GRAPH, PROFILE)}, TWO)


def test_the_timeline_is_the_one_that_was_planned_with() -> None:
    assert expected_timeline(PLAN, GRAPH, TWO) == timeline(PLAN, GRAPH, PROFILE, TWO)


def test_a_plan_without_figures_cannot_be_redrawn() -> None:
    with pytest.raises(BadOption, match="no expected figures"):
        expected_timeline(PLAN.model_copy(update={"expected": None}), GRAPH, TWO)


def step(gap_s: float, slow_s: float = 0.0) -> Timeline:
    """Four microbatches on two stages, 1 s forward, 2 s backward, a gap after each; one forward is slower."""
    spans = []
    for rank in range(2):
        at = 0.0
        for mb in range(4):
            for kind, seconds in (("F", 1.0 + slow_s * (mb == 0)), ("B", 2.0)):
                action = f"{rank}{kind}{mb}"
                spans.append(Span(rank=rank, lane="compute", action=action, start_s=at, end_s=at + seconds))
                at += seconds + gap_s
        spans.append(Span(rank=rank, lane="wait", action=f"{rank}B0", start_s=0, end_s=99))
    return Timeline(source="measured", ranks=2, spans=tuple(spans))


def test_the_bound_is_the_closed_form_of_the_stage_times() -> None:
    # 1F1B with equal stages: (m + p - 1) (t_f + t_b) = (4 + 1) (1 + 2)
    assert measured_bound_s(PLAN, GRAPH, step(gap_s=0.5)) == pytest.approx(15.0)


def test_one_slow_microbatch_does_not_move_the_stage_times() -> None:
    assert stage_times(step(0.0, slow_s=5.0), 2) == (StageCost(1.0, 2.0), StageCost(1.0, 2.0))


def test_a_stage_that_was_not_measured_is_named() -> None:
    with pytest.raises(BadOption, match="stage 2"):
        stage_times(step(0.0), 3)
