"""`outsize explain-plan`: from the file alone, and priced anew for the model; wrong files are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Outsize = Callable[..., Any]


@pytest.fixture
def plan_file(outsize: Outsize, folder: Path) -> Path:
    """A plan of toy:build over two processes."""
    assert outsize("plan", "toy:build", "--cluster", "2xcpu", "--exact", "--out", "plan.json").code == 0
    return folder / "plan.json"


@pytest.mark.usefixtures("plan_file")
def test_from_the_file_alone(outsize: Outsize) -> None:
    answer = outsize("explain-plan", "plan.json")
    assert (answer.code, answer.err) == (0, "")
    for heading in (
        "Where the seconds of a step go",
        "Why this one",
        "Not chosen",
        "What would make it faster",
    ):
        assert heading in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80


def test_with_the_model_it_is_priced_as_it_is_now(outsize: Outsize, plan_file: Path) -> None:
    edited = json.loads(plan_file.read_text())
    loss = edited["stages"][1]["units"][-1]
    edited["stages"][0]["units"], edited["stages"][1]["units"] = ["0"], ["1-11", loss]
    plan_file.write_text(json.dumps(edited))
    document = json.loads(outsize("explain-plan", "plan.json", "toy:build", "--json").out)
    assert document["plan"]["expected"]["stages"][0]["units"] == 1
    assert "small-stage" in {a["code"] for a in document["advice"]}
    assert "balance" in {lever["code"] for lever in document["levers"]}
    spent_s = sum(part["seconds"] for part in document["seconds"]["parts"])
    assert spent_s == pytest.approx(document["plan"]["expected"]["step_s"])
    shown = outsize("explain-plan", "plan.json", "toy:build").out
    assert "Advice" in shown
    assert "Where the seconds of a step go" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.usefixtures("plan_file")
def test_a_plan_of_another_model(outsize: Outsize) -> None:
    answer = outsize("explain-plan", "plan.json", "toy:pair")
    assert (answer.code, answer.out) == (3, "")
    assert answer.err.startswith("ModelMismatch [E203]")


def test_no_plan(outsize: Outsize, folder: Path) -> None:
    (folder / "no.json").write_text("{}")
    for name, code in (("no.json", 3), ("gone.json", 3)):
        answer = outsize("explain-plan", name)
        assert (answer.code, answer.out) == (code, "")
        assert answer.err.startswith("BadPlan [E205]")
