"""What `fit(inference=True)` says, against what real evaluations and generations hold: tensors by stage."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outsize
from outsize.capture.models.generation import forward_arguments

pytestmark = pytest.mark.usefixtures("shared_recordings")
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "memory"
MICROBATCHES = 4


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """The meter and the models of benchmarks/memory, and nothing of them left behind."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER.parent / "prediction"))
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("meter"), importlib.import_module("cases")
    for name in set(sys.modules) - before:
        if name in {"meter", "cases", "models"}:
            del sys.modules[name]


def said(answer: outsize.Fit) -> list[int]:
    """The bytes of tensors on each device, without a device's context and what an allocator keeps."""
    return [d.p50_bytes - d.context_bytes - d.kept_bytes for d in answer.devices]


def hold(counted: Any, model: nn.Module, home: dict[str, int], stages: int) -> None:
    for stage in range(stages):
        named = [*model.named_parameters(), *model.named_buffers()]
        counted.hold(stage, [tensor for name, tensor in named if home.get(name, 0) == stage])


@pytest.mark.parametrize(("name", "stages"), [("resnet18", 2), ("vit", 3)])
@pytest.mark.sample("vit")
def test_an_evaluation_over_stages_holds_what_was_said(memory: Any, name: str, stages: int) -> None:
    """No stage holds more, and none 6 % less."""
    meter, cases = memory
    torch.manual_seed(0)
    case = cases.CASES[name]()
    model, args = case.model.eval(), case.batch.args
    asked: dict[str, Any] = {"cluster": f"{stages}xcpu", "stages": stages, "microbatches": MICROBATCHES}
    answer = outsize.fit(model, args, request=outsize.Request(inference=True), **asked)
    plan = outsize.plan(model, args, axes="pp", request=outsize.Request(inference=True), **asked)
    cut = [
        stage.model_copy(update={"units": d.units})
        for stage, d in zip(plan.stages, answer.devices, strict=True)
    ]
    engine = outsize.parallelize(model, args, plan=plan.model_copy(update={"stages": tuple(cut)}))
    counted, home = meter.Meter(stages), engine._ownership.placement.home
    with meter.metered(counted):
        engine.evaluate(*args)
        gc.collect()
        with counted:
            hold(counted, model, home, stages)
            counted.share(case.batch.tensors()[: len(args)])
            engine.evaluate(*args)
    shares = [real / predicted for real, predicted in zip(counted.peaks, said(answer), strict=True)]
    assert 0.94 < min(shares) <= max(shares) < 1.001


def test_a_generation_holds_what_was_said(memory: Any) -> None:
    """Prompts of all but one of the tokens, and one more: within 3 % of what was said."""
    meter, cases = memory
    torch.manual_seed(0)
    case = cases.CASES["llama"]()
    model, example = case.model.eval(), case.batch.kwargs
    answer = outsize.fit(model, (), example, cluster="1xcpu", request=outsize.Request(inference=True))
    ids, counted = example["input_ids"][:, :-1], meter.Meter(1)
    assert forward_arguments(model, example)["logits_to_keep"] == 1
    with torch.no_grad(), counted:
        hold(counted, model, {}, 1)
        counted.stage = 0
        model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
        counted.stage = None
    assert 0.97 < counted.peaks[0] / said(answer)[0] < 1.03
