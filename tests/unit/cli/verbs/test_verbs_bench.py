"""`outsize bench tutorial` and `outsize tune` up to the processes (real ones: tests/dist)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outsize.cli.processes import launch
from outsize.cli.processes.bench_experiment import TutorialJob, TutorialOutcome
from outsize.cli.processes.job import TuneJob
from outsize.cli.verbs import bench, tune
from outsize.ir.answers.tuned import Trial, Tuned
from outsize.ir.plan import Axes, Plan, Stage

Outsize = Callable[..., Any]
JOB = TutorialJob(input="3x8x8", batch=4, splits=(1, 2), repeats=2, trials=1)
PLAN = Plan(
    model="toy",
    fingerprint="f",
    cluster="2xcpu",
    axes=Axes(pp=2),
    batch_size=4,
    microbatches=2,
    schedule="1f1b",
    stages=(Stage(units=("a",), device="cpu:0"), Stage(units=("b",), device="cpu:1")),
    why=(),
)
OUTCOME = TutorialOutcome(
    job=JOB,
    devices=("cpu:0", "cpu:1"),
    torch="2",
    single_s=(2.0, 2.2),
    split_s=(2.1, 2.1),
    pipelined_s={1: (1.9, 1.9), 2: (1.5, 1.7)},
    outsize_s=(1.0, 1.0),
    plan=PLAN,
)


def test_bars_and_curve_as_files(outsize: Outsize, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    jobs: list[TutorialJob] = []

    def run_worker(_worker: str, job: TutorialJob, *_: Any, **__: Any) -> str:
        jobs.append(job)
        return OUTCOME.to_json()

    monkeypatch.setattr(bench, "run_worker", run_worker)
    answer = outsize("bench", "tutorial", "--batch", "12", "--splits", "6,2", "--out", "made/here", "--json")
    assert answer.code == 0
    assert jobs[0].splits == (2, 6)
    document = json.loads(answer.out)
    assert document["best_split"] == 2
    assert document["bars"]["pipelined"] == {"mean_s": 1.6, "std_s": pytest.approx(0.2 / 2**0.5)}
    made = folder / "made" / "here"
    assert json.loads((made / "tutorial.json").read_text()) == document
    assert {p.name for p in made.iterdir()} == {"bars.png", "splits.png", "tutorial.json"}
    outsize("bench", "tutorial", "--batch", "6", "--out", "made")
    assert jobs[1].splits == (1, 2, 3)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ["--splits", "5"],
            "'5' is not a possible size; possible: 1, 2, 3, 4, 6, 8, 12. Next: ",
        ),
        (["--splits", "a"], "--splits a: 'a' is not a possible size"),
        (["--batch", "1"], "batch"),
    ],
)
def test_what_bench_refuses(outsize: Outsize, options: list[str], text: str) -> None:
    answer = outsize("bench", "tutorial", *options)
    assert (answer.code, answer.out) == (2, "")
    assert text in answer.err


def test_tune_writes_the_winning_plan(
    outsize: Outsize, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = PLAN
    found = Tuned(plan=plan, trials=(Trial(plan=plan, predicted_s=1.5, step_s=2.0, wall_s=2.5),))
    jobs: list[tuple[TuneJob, int]] = []

    def run_worker(_worker: str, job: TuneJob, processes: int, *_: Any, **__: Any) -> str:
        jobs.append((job, processes))
        return found.to_json()

    monkeypatch.setattr(tune, "run_worker", run_worker)
    answer = outsize("tune", "toy:build", "--nproc", "3", "--schedule", "1f1b", "--out", "won.json", "--json")
    assert answer.code == 0
    job, processes = jobs[0]
    assert (job.schedule, job.batch, processes) == ("1f1b", 8, 3)
    assert json.loads(answer.out)["step_s"] == 2.0
    assert Plan.load(folder / "won.json") == plan
    assert "outsize run MODEL --plan won.json" in answer.err


def test_a_failed_tuning_is_an_object_under_json(outsize: Outsize, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "launch", lambda _: 4)
    answer = outsize("tune", "toy:build", "--json")
    assert answer.code == 4
    assert '"exit_code": 4' in answer.out
