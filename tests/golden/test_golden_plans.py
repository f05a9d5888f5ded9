"""The plans of many questions, as in tests/golden/plans: decision, figures, alternatives, reasons.

A change of the planner's structure must not change one of them. Regenerate with `pytest
tests/golden/test_golden_plans.py --all --update-golden`, and read the diff.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from plan_questions import QUESTIONS, QUICK
from shared_captures import each_model_captured_once

from outsize.api import plan
from outsize.api.records import Request
from outsize.capture.measure import local_cluster
from outsize.cli.model_input import ModelInput, make_model_input
from outsize.errors import OutsizeError
from outsize.ir.plan import Plan

LEFT_OUT = {"version", "model", "fingerprint"}
"""Of a plan: what says of which program and file it is."""


# "2xcpu" shares the memory of the machine, of which a kernel takes more or less at each start. This is what
# the machine had that wrote the files.
MEMORY_BYTES = 25_276_063_744


@pytest.fixture(autouse=True)
def _one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimpleNamespace(total=MEMORY_BYTES)
    monkeypatch.setattr(local_cluster.psutil, "virtual_memory", lambda: machine)


@pytest.fixture(autouse=True, scope="module")
def _shared_captures() -> Iterator[None]:
    with each_model_captured_once():
        yield


@cache
def model_without_weights(model: str, shape: str, batch: int) -> ModelInput:
    return make_model_input(model, shape, batch, meta=True)


def planned(model: str, shape: str, batch: int, asked: Mapping[str, Any]) -> Plan:
    """The plan of a model that has no weights."""
    subject = model_without_weights(model, shape, batch)
    return plan(*subject.call, **subject.loss, request=Request(batch_size=batch, **asked))


def rounded(found: Any) -> Any:
    """With nine digits of each number that is not whole: sums of many differ in the last ones by machine."""
    if isinstance(found, dict):
        return {name: rounded(each) for name, each in found.items()}
    if isinstance(found, list):
        return [rounded(each) for each in found]
    return float(f"{found:.9g}") if isinstance(found, float) else found


def text_of(document: dict[str, Any]) -> str:
    """JSON with a line for each fact, and for each element of a list: a diff shows the stage that moved."""
    lines = []
    for name, fact in document.items():
        rows = [json.dumps(each) for each in fact] if isinstance(fact, list) else []
        shown = "[\n  " + ",\n  ".join(rows) + "\n ]" if rows else json.dumps(fact)
        lines.append(f" {json.dumps(name)}: {shown}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def answer(question: str) -> dict[str, Any]:
    """The plan, or the code of the error that there is none."""
    model, shape, batch, asked = QUESTIONS[question]
    try:
        found = planned(model, shape, batch, asked)
    except OutsizeError as error:
        return {"error": error.code}
    document = found.model_dump(mode="json", exclude=LEFT_OUT, exclude_defaults=True)
    expected = document.pop("expected")
    assert found.expected is not None
    pairs = zip(expected.pop("stages"), found.expected.stages, strict=True)
    figures = [{**each, "peak_bytes": of.peak_bytes, "p95_bytes": of.p95_bytes} for each, of in pairs]
    return rounded({**document, "expected": expected, "figures": figures})


@pytest.mark.parametrize(
    "question", [pytest.param(q, marks=[] if q in QUICK else [pytest.mark.full]) for q in QUESTIONS]
)
def test_the_plan_is_as_it_was(question: str, golden: Callable[[str, str], None]) -> None:
    name = question.replace(", ", "-").replace(" ", "-")
    golden(f"plans/{name}.json", text_of(answer(question)))
