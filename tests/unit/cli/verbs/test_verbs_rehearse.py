"""`outsize rehearse`: what it prints, its exit code, and what it refuses; tests/dist runs real processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from outsize.cli.processes.rehearsals import RehearsedModel
from outsize.ir.answers.runs.rehearsal import Culprit, Proof, ProofResult, Rehearsal, RehearsedWorld
from outsize.ir.plan import Axes

Outsize = Callable[..., Any]


def result(proof: Proof, holds: bool | None = True, difference: float | None = None) -> ProofResult:
    return ProofResult(proof=proof, holds=holds, bits=difference is None, relative_diff=difference)


def rehearsal(culprit: Culprit | None = None) -> Rehearsal:
    wrong = culprit is not None
    world = RehearsedWorld(
        axes=Axes(pp=2, dp_shard=2, tp=2),
        stages=2,
        microbatches=4,
        batch_size=16,
        actions=64,
        messages=32,
        results=(
            result("messages"),
            result("numbers", not wrong, 3e-7),
            *(result(proof, None if wrong else True) for proof in ("memory of steps", "death", "resume")),
        ),
        culprit=culprit,
        seconds=20.0,
    )
    return Rehearsal(
        model="LlamaForCausalLM",
        axes=Axes(pp=4, dp_shard=8, tp=4),
        schedule="1f1b",
        stages=4,
        microbatches=16,
        actions=1472,
        messages=480,
        parameters=6_738_415_616,
        small_parameters=158_240,
        changes=(),
        dropped=0,
        kinds=14,
        missing_kinds=(),
        worlds=(world,),
        met=() if wrong else (("pp", "tp"),),
        apart=(("pp", "dp_shard"),),
        unlike=("precision bf16-mixed: computed in fp32",),
        device="cpu",
        seconds=25.0,
    )


@pytest.fixture
def plan(outsize: Outsize) -> str:
    outsize("plan", "toy:build", "--cluster", "2xcpu", "--stages", "2", "--batch", "4", "--out", "p.json")
    return "p.json"


def answered(monkeypatch: pytest.MonkeyPatch, found: Rehearsal) -> None:
    monkeypatch.setattr(RehearsedModel, "rehearsed", lambda self, tell: found)


def test_what_holds_is_zero(outsize: Outsize, monkeypatch: pytest.MonkeyPatch, plan: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    answered(monkeypatch, rehearsal())
    answer = outsize("rehearse", "toy:build", "--plan", plan)
    assert answer.code == 0
    assert "the plan holds in rehearsal" in answer.out
    row = next(line for line in answer.out.splitlines() if line.startswith("pp=2"))
    assert row.split() == ["pp=2", "dp_shard=2", "tp=2", "8", "bits", "3e-07", "bits", "bits", "bits"]
    assert "axes that never met: pp with dp_shard" in answer.out
    assert "precision bf16-mixed: computed in fp32" in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80


def test_what_does_not_hold_is_one_and_named(
    outsize: Outsize, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    culprit = Culprit(rank=3, stage=1, action="backward of stage 1", seen="gradient of head.weight")
    answered(monkeypatch, rehearsal(culprit))
    answer = outsize("rehearse", "toy:build", "--plan", plan)
    assert answer.code == 1
    assert "DOES NOT HOLD" in answer.out
    assert "rank 3 (stage 1), backward of stage 1: gradient of head.weight" in answer.out
    assert "WRONG" in answer.out
    assert "loss and gradients are those" not in answer.out
    document = json.loads(outsize("rehearse", "toy:build", "--plan", plan, "--json").out)
    assert document["worlds"][0]["culprit"]["rank"] == 3
    assert document["holds"] is False


def test_a_plan_of_one_device_sends_nothing(outsize: Outsize) -> None:
    outsize("plan", "toy:build", "--cluster", "1xcpu", "--batch", "4", "--out", "one.json")
    answer = outsize("rehearse", "toy:build", "--plan", "one.json")
    assert answer.code == 2
    assert "the plan is for one device, where no message is sent" in answer.err


def test_a_plan_of_another_model_is_refused(outsize: Outsize, plan: str) -> None:
    answer = outsize("rehearse", "toy:build?layers=7", "--plan", plan)
    assert answer.code != 0
    assert "the plan was made for" in answer.err


def test_a_plan_that_trains_nothing_is_refused(outsize: Outsize) -> None:
    wanted = ("--cluster", "2xcpu", "--stages", "2", "--batch", "4", "--inference", "--out", "runs.json")
    outsize("plan", "toy:build", *wanted)
    answer = outsize("rehearse", "toy:build", "--plan", "runs.json")
    assert answer.code == 2
    assert "the plan runs the model and does not train it" in answer.err
    assert "--inference" in answer.err


def test_adapters_are_those_of_the_plan(outsize: Outsize, plan: str) -> None:
    answer = outsize("rehearse", "toy:build", "--plan", plan, "--lora", "2,targets=all-linear")
    assert answer.code != 0
    assert "the plan was made for Sequential, this model is PeftModel" in answer.err
