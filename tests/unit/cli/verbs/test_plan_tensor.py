"""`outsize plan --axes tp=2` and `--styles`: what is divided, what is refused, and what a plan says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outsize.ir.plan import Plan

Outsize = Callable[..., Any]

LLAMA = (
    "transformers:LlamaConfig?num_hidden_layers=2&hidden_size=32&intermediate_size=64"
    "&num_attention_heads=4&num_key_value_heads=2&vocab_size=128"
)
BATCH = ("--input", "16", "--batch", "4")


def test_a_plan_with_tp_is_to_run_and_says_what_is_divided(outsize: Outsize, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    call = ("plan", LLAMA, "--cluster", "4xcpu", "--stages", "2", "--axes", "tp=2", *BATCH)
    said = outsize(*call, "--out", str(file))
    assert said.code == 0
    assert "modules with weights are divided, and a rank has 50 % of the" in " ".join(said.out.split())
    plan = Plan.load(file)
    assert (plan.axes.pp, plan.axes.tp, plan.unsupported) == (2, 2, "")
    priced = outsize("plan", LLAMA, "--cluster", "4xcpu", "--check", str(file), *BATCH)
    assert priced.code == 0
    refused = outsize("check", LLAMA, "--plan", str(file), *BATCH)
    assert refused.code != 0
    assert "a check compares bits" in refused.err


def test_memory_falls_with_what_is_divided_and_not_by_half(outsize: Outsize) -> None:
    """Weights do; what lies between layers is whole."""

    def peak(*more: str) -> tuple[int, int]:
        said = outsize("plan", LLAMA, "--stages", "1", "--microbatches", "1", *more, *BATCH, "--json")
        (stage,) = json.loads(said.out)["expected"]["stages"]
        return stage["weights_bytes"], stage["activations_bytes"]

    (weights, saved), (part, less) = peak("--cluster", "1xcpu"), peak("--cluster", "2xcpu", "--axes", "tp=2")
    assert weights / 2 < part < 0.52 * weights
    assert saved / 2 < less < 0.9 * saved


@pytest.mark.parametrize(
    ("model", "tp", "expected"),
    [
        (
            LLAMA,
            "4",
            "num_key_value_heads=2 is not divided by tp=4; 2 divides all sizes. Next: axes=",
        ),
        ("torchvision:resnet18", "2", "tensor parallelism finds nothing to divide, tp=2"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_the_plan(
    outsize: Outsize, model: str, tp: str, expected: str
) -> None:
    size = BATCH if model == LLAMA else ("--input", "3x32x32", "--batch", "4")
    said = outsize("plan", model, "--cluster", "4xcpu", "--stages", "1", "--axes", f"tp={tp}", *size)
    assert said.code != 0
    assert expected in said.err


def test_styles_are_listed_by_kind_with_what_the_models_own_plan_says(outsize: Outsize) -> None:
    said = outsize("plan", LLAMA, "--styles", *BATCH)
    assert said.code == 0
    lines = said.out.splitlines()
    at = lines.index("row         model.layers.*.mlp.down_proj (2)")
    assert lines[at + 1].strip() == "adds up model.layers.*.mlp.gate_proj, model.layers.*.mlp.up_proj"
    assert "tp that divides every size: 2" in lines
    assert max(map(len, lines)) <= 80
