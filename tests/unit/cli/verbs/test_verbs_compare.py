"""`outsize compare`: what differs between two plan files, or between two results of runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Outsize = Callable[..., Any]


@pytest.fixture
def plans(outsize: Outsize, folder: Path) -> dict[str, Any]:
    """`a.json` and `b.json`, which differ in their microbatches and where they are cut."""
    asked = ("plan", "toy:build", "--cluster", "2xcpu", "--batch", "8", "--stages", "2", "--exact")
    assert outsize(*asked, "--microbatches", "4", "--schedule", "gpipe", "--out", "a.json").code == 0
    plan = json.loads((folder / "a.json").read_text())
    loss = plan["stages"][1]["units"][-1]
    other = json.loads(json.dumps(plan))
    other["microbatches"] = 8
    other["stages"][0]["units"], other["stages"][1]["units"] = ["0-2"], ["3-11", loss]
    other["expected"]["step_s"] = 2 * plan["expected"]["step_s"]
    other["expected"]["stages"][0]["p95_bytes"] = plan["expected"]["stages"][0]["p95_bytes"] // 2
    (folder / "b.json").write_text(json.dumps(other))
    return plan


@pytest.mark.usefixtures("plans")
def test_what_differs_is_named_and_nothing_else(outsize: Outsize) -> None:
    found = json.loads(outsize("compare", "a.json", "b.json", "--json").out)
    assert found["choices"] == [{"what": "microbatches", "first": 4, "second": 8}]
    assert [(s["stage"], s["second"][0]) for s in found["stages"]] == [(0, "0-2"), (1, "3-11")]
    table = outsize("compare", "a.json", "b.json").out
    assert "microbatches" in table
    assert "schedule" not in table
    assert "+100 %" in table
    assert "-50 %" in table
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.usefixtures("plans")
def test_a_plan_is_like_itself(outsize: Outsize) -> None:
    found = json.loads(outsize("compare", "a.json", "a.json", "--json").out)
    assert found["choices"] == found["stages"] == []
    assert all(row["first"] == row["second"] for row in found["time"] + found["memory"])
    assert "The plans decide the same." in outsize("compare", "a.json", "a.json").out


def test_results_of_runs_have_what_was_measured(outsize: Outsize, folder: Path, plans: Any) -> None:
    run = {
        "loss": [2.0, 1.5],
        "samples_per_s": 80.0,
        "measured": {"step_s": 0.1, "bubble": 0.25, "busy": [0.8, 0.7], "peak_bytes": [2**20, 2**21]},
        "plan": plans,
    }
    (folder / "one.json").write_text(json.dumps(run))
    faster = {**run, "loss": [2.0, 1.25], "measured": {**run["measured"], "step_s": 0.05, "peak_bytes": []}}
    (folder / "two.json").write_text(json.dumps(faster))
    found = json.loads(outsize("compare", "one.json", "two.json", "--json").out)
    rows = {row["what"]: (row["first"], row["second"]) for row in found["time"] + found["memory"]}
    assert rows["measured step_s"] == (0.1, 0.05)
    assert rows["last loss"] == (1.5, 1.25)
    assert rows["measured rank 1"] == (2**21, None)
    table = outsize("compare", "one.json", "two.json").out
    assert "measured step" in table
    assert "-50 %" in table
    against_plan = json.loads(outsize("compare", "a.json", "one.json", "--json").out)
    assert against_plan["choices"] == []


def test_results_of_runs_have_steps_and_memory_by_cause(outsize: Outsize, folder: Path, plans: Any) -> None:
    held = {
        "device": "cpu",
        "stages": [0],
        "peak_bytes": 7 * 2**20,
        "weights_bytes": 2**20,
        "gradients_bytes": 2**20,
        "optimizer_bytes": 2**21,
    }
    run = {
        "loss": [2.0, None],
        "steps_s": [0.5, 0.3],
        "learning_rate": [1e-3, 1e-3],
        "grad_norm": [3.0, 1.5],
        "samples_per_s": 80.0,
        "measured": {"step_s": 0.1, "bubble": 0.25, "memory": [held, {**held, "peak_bytes": 2**22}]},
        "plan": plans,
    }
    (folder / "one.json").write_text(json.dumps(run))
    less = {**run, "measured": {**run["measured"], "memory": [{**held, "gradients_bytes": None}]}}
    (folder / "two.json").write_text(json.dumps({**less, "learning_rate": [1e-3, 1e-4]}))
    found = json.loads(outsize("compare", "one.json", "two.json", "--json").out)
    rows = {row["what"]: (row["first"], row["second"]) for row in found["time"] + found["memory"]}
    assert rows["measured whole step_s"] == (0.4, 0.4)
    assert rows["last grad_norm"] == (1.5, 1.5)
    assert rows["last learning_rate"] == (1e-3, 1e-4)
    assert "last loss" not in rows  # neither is a finite number
    assert rows["measured rank 0"] == (7 * 2**20, 7 * 2**20)
    assert rows["measured rank 1"] == (2**22, None)
    assert rows["measured gradients"] == (2**20, None)
    assert rows["measured rest"] == (3 * 2**20, 4 * 2**20)
    table = outsize("compare", "one.json", "two.json").out
    assert "last learning rate" in table
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.usefixtures("plans")
@pytest.mark.parametrize("text", ["{}", "[]", "no json", '{"plan": {}}', '{"plan": 3}'])
def test_other_files_are_refused(outsize: Outsize, folder: Path, text: str) -> None:
    (folder / "other.json").write_text(text)
    for names in (("a.json", "other.json"), ("other.json", "a.json"), ("a.json", "missing.json")):
        answer = outsize("compare", *names)
        assert answer.code == 3
        assert answer.err.startswith("BadPlan [E205]: ")


@pytest.mark.usefixtures("plans")
def test_the_result_of_a_run_that_failed_says_why_there_is_nothing_to_compare(
    outsize: Outsize, folder: Path
) -> None:
    failed = outsize("run", "torchvision:resnet999", "--json")
    assert failed.code == 2
    (folder / "failed.json").write_text(failed.out)
    answer = outsize("compare", "a.json", "failed.json")
    assert answer.code == 3
    assert answer.err.startswith("BadPlan [E205]: failed.json is the result of a command that failed")
    assert "UnknownModel [E101]: torchvision has no model 'resnet999'" in answer.err
    assert "Next: outsize explain E101, then outsize run MODEL --json > failed.json" in answer.err
