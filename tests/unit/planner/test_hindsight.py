"""A plan is redrawn from its own figures; a measured step is held against its own times."""

from __future__ import annotations

import pytest
from planner_graphs import chain

from outsize.errors import BadOption
from outsize.ir.cluster import parse_cluster
from outsize.ir.timeline import Span, Timeline
from outsize.planner.hindsight import expected_timeline, measured_bound_s
from outsize.planner.price import timeline
from outsize.planner.request import Request
from outsize.planner.search import search

TWO = parse_cluster("2xcpu")
GRAPH, PROFILE = chain([0.1] * 6)
PLAN = search(Request(batch_size=4, microbatches=4), {4: (GRAPH, PROFILE)}, TWO)


def test_the_timeline_is_the_one_that_was_planned_with() -> None:
    assert expected_timeline(PLAN, GRAPH, TWO) == timeline(PLAN, GRAPH, PROFILE, TWO)


def test_a_plan_without_figures_cannot_be_redrawn() -> None:
    with pytest.raises(BadOption, match="no expected figures"):
        expected_timeline(PLAN.model_copy(update={"expected": None}), GRAPH, TWO)


def step(gap_s: float, slow: str = "") -> Timeline:
    """Four microbatches on two stages, 1 s forward, 2 s backward, a gap after each; `slow` takes 5 s more."""
    spans = []
    for rank in range(2):
        at = 0.0
        for action in [f"{rank}{kind}{mb}" for mb in range(4) for kind in "FB"]:
            end = at + (1.0 if "F" in action else 2.0) + 5.0 * (action == slow)
            spans.append(Span(rank=rank, lane="compute", action=action, start_s=at, end_s=end))
            at = end + gap_s
        spans.append(Span(rank=rank, lane="wait", action=f"{rank}B0", start_s=0, end_s=99))
    return Timeline(source="measured", ranks=2, spans=tuple(spans))


def test_the_bound_is_the_closed_form_of_the_stage_times_whatever_the_gaps() -> None:
    # 1F1B with equal stages: (m + p - 1) (t_f + t_b) = (4 + 1) (1 + 2)
    assert measured_bound_s(PLAN, GRAPH, step(gap_s=0.5)) == pytest.approx(15.0)


def test_a_slow_microbatch_counts_where_it_was_slow() -> None:
    # the first forward of stage 0 delays everything, the second is 1 s off the critical path
    first, second = (measured_bound_s(PLAN, GRAPH, step(0.0, slow)) for slow in ("0F0", "0F1"))
    assert first == pytest.approx(20.0)
    assert 15.0 < second < first


def test_an_action_that_was_not_measured_is_named() -> None:
    found = step(0.0)
    spans = tuple(s for s in found.spans if s.action != "1B3")
    with pytest.raises(BadOption, match=r"lacks 1B3; 1 of 16"):
        measured_bound_s(PLAN, GRAPH, found.model_copy(update={"spans": spans}))
