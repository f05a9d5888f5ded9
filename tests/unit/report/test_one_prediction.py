"""The heading, the drawing and the trace of a plan show one predicted step time."""

from __future__ import annotations

import re

import pytest
from planner_graphs import chain, graph_of, parameter, profile_of, unit, value

from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import parse_cluster
from outsize.ir.formatting import seconds_text
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import ScheduleName
from outsize.ir.profile import Profile
from outsize.planner.advice.overview import Outlook, outlook
from outsize.planner.search.search import search
from outsize.report.html.page import PageFacts, render
from outsize.report.trace import perfetto

SCHEDULES: tuple[ScheduleName, ...] = (
    "naive",
    "gpipe",
    "1f1b",
    "interleaved",
    "zero-bubble",
    "zero-bubble-v",
    "auto",
)


def skip_model() -> tuple[ModelGraph, Profile]:
    """Six units with a skip connection and a parameter that the first and the last unit share."""
    units = [unit(i, ("tied",) if i in (0, 5) else (f"h.{i}.weight",)) for i in range(6)]
    values = [value(i, i, (i + 1,), 4_000_000) for i in range(5)] + [value(5, 0, (4,), 1_000_000)]
    parameters = [parameter("tied", size_bytes=800)]
    parameters += [parameter(f"h.{i}.weight", size_bytes=400) for i in range(1, 5)]
    graph = graph_of(units, values, parameters)
    return graph, profile_of(graph, [0.001, 0.004, 0.002, 0.003, 0.002, 0.005])


MODELS = {"chain": chain([0.1, 0.05, 0.2, 0.3, 0.1, 0.02, 0.1, 0.1]), "skip": skip_model()}


def outlook_of(model: str, schedule: ScheduleName) -> Outlook:
    cluster = parse_cluster("2xcpu")
    request = PlanRequest(batch_size=8, microbatches=8, schedule=schedule, stages=2)
    plan = search(request, {8: MODELS[model]}, cluster)
    return outlook(plan, *MODELS[model], cluster)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_the_drawn_prediction_ends_at_the_step_time_of_the_heading(
    model: str, schedule: ScheduleName
) -> None:
    seen = outlook_of(model, schedule)
    expected = seen.plan.expected
    assert expected is not None
    page = render(PageFacts(plan=seen.plan, graph=seen.graph, profile=seen.profile, predicted=seen.timeline))
    assert f'<dd><span class="value">{seconds_text(expected.step_s)}</span>' in page
    assert f"Predicted</strong> <span>{seconds_text(expected.step_s)}, bubble" in page
    assert drawn_end_percent(page) == pytest.approx(100.0, abs=0.05)
    assert f"2 ranks, {seconds_text(expected.step_s)}, bubble" in page


def drawn_end_percent(page: str) -> float:
    """The right end of the last compute bar, in percent of the axis."""
    bars = re.findall(r'<rect [^>]*class="cell" x="([\d.]+)%" width="([\d.]+)%"', page)
    return max(float(x) + float(width) for x, width in bars)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.sample("skip")
def test_the_trace_of_the_prediction_is_as_long_as_the_plan_expects(
    model: str, schedule: ScheduleName
) -> None:
    seen = outlook_of(model, schedule)
    assert seen.plan.expected is not None
    events = perfetto(seen.timeline, None)["traceEvents"]
    steps_us = [event["dur"] for event in events if event["name"] == "step"]
    assert steps_us == pytest.approx([1e6 * seen.plan.expected.step_s] * len(steps_us), abs=0.01)
