"""The plans of many questions, as in tests/golden/plans: stages, schedule, axes, seconds and bytes.

A change of the planner's structure must not change one of them. What explains a plan (`why`, alternatives)
is not in here. Regenerate with `pytest tests/golden/test_golden_plans.py --all --update-golden`, and read
the diff.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest
from shared_captures import each_model_captured_once

from outsize.api import plan
from outsize.cli.model_input import ModelInput, make_model_input
from outsize.errors import OutsizeError
from outsize.ir.plan import Plan

GPT2 = "transformers:GPT2Config?n_layer=6&n_embd=256&n_head=4"
LLAMA = "transformers:LlamaConfig?num_hidden_layers=12&hidden_size=1024&intermediate_size=2816"
T5 = "transformers:T5Config?num_layers=3&d_model=128"
MIXTRAL = "transformers:MixtralConfig?num_hidden_layers=4&hidden_size=256&intermediate_size=512"
RESNET, DEEPLAB = "torchvision:resnet50", "torchvision:deeplabv3_resnet50"
IMAGE, TEXT = "3x64x64", "128"

# A question is a model, one sample's shape, a batch, and what is asked of `plan`.
QUESTIONS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "resnet50 on two CPUs": (RESNET, IMAGE, 32, {"cluster": "2xcpu"}),
    "resnet50, exact": (RESNET, IMAGE, 32, {"cluster": "2xcpu", "exact": True}),
    "resnet50, 3 stages, gpipe": (RESNET, IMAGE, 32, {"cluster": "3xcpu", "schedule": "gpipe", "stages": 3}),
    "resnet50, interleaved": (RESNET, IMAGE, 32, {"cluster": "2xcpu", "schedule": "interleaved"}),
    "resnet50, zero-bubble": (
        RESNET,
        IMAGE,
        32,
        {"cluster": "4xcpu", "schedule": "zero-bubble", "exact": True},
    ),
    "resnet50, zero-bubble-v": (RESNET, IMAGE, 32, {"cluster": "2xcpu", "schedule": "zero-bubble-v"}),
    "resnet50, naive": (RESNET, IMAGE, 32, {"cluster": "3xcpu", "schedule": "naive"}),
    "resnet50, auto": (RESNET, IMAGE, 16, {"cluster": "2xcpu", "schedule": "auto", "microbatches": 4}),
    "resnet50, sync": (RESNET, IMAGE, 8, {"cluster": "2xcpu", "bn": "sync"}),
    "resnet50, little memory": (RESNET, "3x128x128", 64, {"cluster": "2x1.5GB"}),
    "resnet50, little memory, recompute": (
        RESNET,
        IMAGE,
        64,
        {"cluster": "2x1GB", "recompute": "full", "exact": True},
    ),
    "deeplab on three devices": (DEEPLAB, "3x128x128", 8, {"cluster": "3x12GB", "exact": True}),
    "gpt2 on four GPUs": (GPT2, TEXT, 64, {"cluster": "4xa100-40gb"}),
    "gpt2, sgd, bf16": (
        GPT2,
        TEXT,
        64,
        {"cluster": "2xa100-40gb", "precision": "bf16", "optimizer": "sgd", "exact": True},
    ),
    "gpt2, tp": (GPT2, TEXT, 32, {"cluster": "4xa100-40gb", "tp": 2, "axes": "pp"}),
    "gpt2, replicas": (GPT2, TEXT, 32, {"cluster": "4xa100-40gb", "dp_replicate": 2, "axes": "pp"}),
    "gpt2, shards": (
        GPT2,
        TEXT,
        32,
        {"cluster": "4xa100-40gb", "dp_shard": 2, "weights": "sharded", "axes": "pp"},
    ),
    "llama, all axes": (LLAMA, TEXT, 64, {"cluster": "2x4xh100-80gb"}),
    "llama, little memory": (LLAMA, TEXT, 16, {"cluster": "2x3GB"}),
    "llama on one small device": (LLAMA, TEXT, 8, {"cluster": "1x3GB"}),
    "llama, host optimizer": (LLAMA, TEXT, 8, {"cluster": "1x8GB", "weights": "host-optimizer"}),
    "llama, host, two devices": (LLAMA, TEXT, 8, {"cluster": "2x2GB", "weights": "host"}),
    "llama, four small devices": (LLAMA, TEXT, 32, {"cluster": "4x2GB"}),
    "llama, unequal devices": (LLAMA, TEXT, 16, {"cluster": "1xa100-40gb+2xv100-16gb"}),
    "t5": (T5, TEXT, 16, {"cluster": "3xcpu", "exact": True}),
    "mixtral": (MIXTRAL, TEXT, 16, {"cluster": "2xa100-40gb", "stages": 2}),
}

# One to ten seconds each: only with --all, as before a change of the planner lands.
SLOW = {
    "resnet50, little memory",
    "llama, four small devices",
    "llama on one small device",
    "gpt2, sgd, bf16",
    "deeplab on three devices",
    "gpt2 on four GPUs",
    "llama, all axes",
    "llama, unequal devices",
    "t5",
    "mixtral",
}


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
    return plan(*subject.call, **subject.loss, batch_size=batch, **asked)


def figures(found: Plan) -> dict[str, Any]:
    """The decision and its figures, without the words."""
    expected = found.expected
    assert expected is not None
    return {
        **found.model_dump(mode="json", include=DECISION, exclude_defaults=True),
        "step_s": f"{expected.step_s:.9g}",
        "gap": None if expected.gap is None else f"{expected.gap:.6g}",
        "peaks": [stage.peak_bytes for stage in expected.stages],
        "p95": [stage.p95_bytes for stage in expected.stages],
    }


DECISION = {
    "axes", "microbatches", "schedule", "actions", "stages", "weights", "sequence_parallel", "recompute",
}  # fmt: skip


def answer(question: str) -> dict[str, Any]:
    """The figures of a plan, or the code of the error that there is none."""
    model, shape, batch, asked = QUESTIONS[question]
    try:
        return figures(planned(model, shape, batch, asked))
    except OutsizeError as error:
        return {"error": error.code}


@pytest.mark.parametrize(
    "question", [pytest.param(q, marks=[pytest.mark.full] if q in SLOW else []) for q in QUESTIONS]
)
def test_the_plan_is_as_it_was(question: str, golden: Callable[[str, str], None]) -> None:
    golden(
        f"plans/{question.replace(', ', '-').replace(' ', '-')}.json",
        f"{json.dumps(answer(question), indent=1)}\n",
    )
