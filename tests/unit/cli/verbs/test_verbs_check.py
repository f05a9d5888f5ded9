"""`outsize check`: the verdict and its exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outsize import api
from outsize.ir.answers.verdict import Verdict

Outsize = Callable[..., Any]


def test_bit_equal_is_zero(outsize: Outsize) -> None:
    answer = outsize("check", "toy:build", "--stages", "3", "--steps", "2", "--json")
    verdict = Verdict.model_validate_json(answer.out)
    assert (answer.code, verdict.bit_equal, len(verdict.stages)) == (0, True, 3)
    assert (verdict.schedule, verdict.microbatches, verdict.processes) == ("1f1b", 4, 0)


def test_different_is_one(outsize: Outsize, monkeypatch: pytest.MonkeyPatch) -> None:
    real = api.check

    def spoiled(*args: Any, **kwargs: Any) -> Verdict:
        return real(*args, **kwargs).model_copy(update={"bit_equal": False, "grad_diff": 1e-7})

    monkeypatch.setattr(api, "check", spoiled)
    answer = outsize("check", "toy:pair")
    assert answer.code == 1
    assert "NOT bit-equal" in answer.out


def test_a_plan_decides(outsize: Outsize) -> None:
    outsize(
        "plan", "toy:build", "--cluster", "3xcpu", "--schedule", "gpipe", "--batch", "6", "--out", "p.json"
    )
    verdict = json.loads(outsize("check", "toy:build", "--plan", "p.json", "--json").out)
    assert (verdict["bit_equal"], len(verdict["stages"]), verdict["schedule"]) == (True, 3, "gpipe")
    assert (
        "--schedule cannot be used together with --plan"
        in outsize("check", "toy:build", "--plan", "p.json", "--schedule", "naive").err
    )


def test_weights_are_loaded_into_a_model_without(outsize: Outsize) -> None:
    state = {"0.weight": torch.full((4, 4), 2.0), "0.bias": torch.zeros(4)}
    save_file({**state, "1.weight": torch.ones(3, 4), "1.bias": torch.zeros(3)}, "pair.safetensors")
    assert outsize("check", "toy:pair", "--input", "4", "--weights", "pair.safetensors").code == 0
    save_file(state, "half.safetensors")
    answer = outsize("check", "toy:pair", "--input", "4", "--weights", "half.safetensors")
    said = "half.safetensors lacks weights of Sequential; 2 missing: 1.weight"
    assert answer.code == 2
    assert f"BadWeights [E107]: {said}" in answer.err


def test_a_program_has_its_model_and_is_no_model(outsize: Outsize) -> None:
    for words, said in (
        (("toy:pair", "--trainer", "train.py"), "MODEL cannot be used together with --trainer"),
        (("--seed", "1", "--trainer", "train.py"), "--seed cannot be used together with --trainer"),
        (("--trainer", "-m"), "--trainer '-m' names no program"),
        (("--trainer", "'train.py"), "is no command line: No closing quotation"),
        (("train.py",), 'Next: outsize check --trainer "train.py ARGS"'),
        ((), "there is no MODEL to check. Next: outsize check torchvision:resnet50"),
    ):
        answer = outsize("check", *words)
        assert answer.code == 2
        assert said in answer.err
