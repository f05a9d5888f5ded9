"""What top, metrics and the note of an error say of unevenly routed rows."""

from __future__ import annotations

from io import StringIO

import pytest
import samples
from rich.console import Console
from run_states import LAUNCH, NOW, STATE

from outsize.ir.answers.run_state import RunOnMachine
from outsize.ir.answers.runs.recorded_run import RecordedRun, RunStep
from outsize.ops.publish.prometheus import prometheus_text
from outsize.report.html.page import PageFacts, render
from outsize.report.tables.plan_tables import run_facts
from outsize.report.tables.runs import run_tables
from outsize.run.collectives.expert_parallel import ExpertLoad
from outsize.train.engine.memory_note import routing_note


def test_the_fullest_rank_is_compared_with_the_mean() -> None:
    assert ExpertLoad((30, 10)).imbalance == 1.5
    assert ExpertLoad((0, 0)).imbalance == 1.0
    assert ExpertLoad((5, 0, 1, 0)).imbalance == pytest.approx(20 / 6)


def test_an_error_of_memory_says_what_exceeds_the_plan_and_what_to_do() -> None:
    (note,) = routing_note(ExpertLoad((30, 6)))
    assert "1.67 times the mean rank's rows of experts, the plan counts 1.5" in note
    assert "rows by rank: 30, 6" in note
    assert "Next: outsize.Request(recompute='full') (--recompute full)" in note
    assert not [*routing_note(ExpertLoad((30, 10)))]
    assert not [*routing_note(None)]


def test_top_and_metrics_show_it() -> None:
    run = RunOnMachine(launch=LAUNCH, state=STATE.model_copy(update={"expert_imbalance": 1.3125}))
    console = Console(width=100, file=StringIO(), force_terminal=False)
    for table in run_tables([run], NOW):
        console.print(table)
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    assert "the fullest rank has 1.31 times the mean rank's rows, 1.5 planned" in shown
    assert 'outsize_expert_imbalance{run="4711",model="GPT"} 1.3125' in prometheus_text(run)
    assert "expert_imbalance" not in prometheus_text(RunOnMachine(launch=LAUNCH, state=STATE))


def test_a_report_has_a_chart_and_a_fact() -> None:
    """Of the steps that are known; runs without ep have neither."""
    steps = tuple(
        RunStep(step=n, loss=1.0, step_s=0.5, expert_imbalance=value) for n, value in enumerate((1.2, 1.4), 1)
    )
    history = RecordedRun(steps=steps)
    facts = dict(run_facts(samples.plan(), samples.measured(), history))
    assert facts["experts"] == "the fullest rank had at most 1.40 times the mean rank's rows, 1.5 planned"
    title = "Rows of experts, fullest rank by mean rank"
    assert title in render(PageFacts(plan=samples.plan(), measured=samples.measured(), history=history))
    without = samples.history()
    assert "experts" not in dict(run_facts(samples.plan(), samples.measured(), without))
    assert title not in render(PageFacts(plan=samples.plan(), measured=samples.measured(), history=without))
