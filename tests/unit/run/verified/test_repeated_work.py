"""What a stage notes of its work, and a repeat beside the step: the same digests, and no trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from outsize.capture.recording.fallbacks import record
from outsize.run.stage.base import Gradients, RunnableStage
from outsize.run.stage.cut import Cut, cut, in_runs
from outsize.run.stage.rng import seeder
from outsize.run.stage.stage import StageExecutor
from outsize.run.verified.digests import Noted, different
from outsize.run.verified.repeat import NotRepeated, repeated
from outsize.run.verified.shown_work import (
    ShownStage,
    WorkRecord,
    note_weights,
    note_work,
    sendable_weights,
    weights_of,
)

CPU = torch.device("cpu")


class Tied(nn.Module):
    """One matrix under two names, a dropout, and a buffer that each forward writes and the next one reads."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.frozen(self.last(self.drop(self.norm(self.first(x))))) * self.count


class Recurrent(nn.Module):
    """Keeps references to its parameters beside its tables."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def cut_of(model: nn.Module, x: Tensor, target: Tensor) -> Cut:
    tape = record(model, (x,), {}, functional.mse_loss, (target,))
    return cut(tape, model, in_runs((0, len(tape.instructions))), outputs=False, stages=1)


def work_of(
    model: nn.Module, stages: Cut, inputs: list[Tensor], *, split: bool = False
) -> tuple[WorkRecord, dict[str, int]]:
    """Runs a shown microbatch; returns what was noted, and all digests."""
    (program,), shown = stages.programs, WorkRecord()
    stage = ShownStage(StageExecutor(program, model), model, shown)
    went_in = Noted()
    note_weights(went_in, weights_of(program, model))
    stage.begin()
    stage.forward(0, inputs, (), seeder(1, 2, 3))
    none: Gradients = {}
    if split:
        stage.backward_input(0, 0.5, none)
        stage.backward_weight(0)
    else:
        stage.backward(0, 0.5, none)
    note_work(went_in, shown.work)
    return shown, {**went_in.numbers(), **shown.noted.numbers()}


def again(stages: Cut, model: nn.Module, shown: WorkRecord) -> dict[str, int]:
    (program,) = stages.programs
    return repeated(program, lambda: StageExecutor(program, model), model, shown.work, CPU)


def state_of(model: nn.Module) -> dict[str, Any]:
    gradients = {f"{n}.grad": copy.deepcopy(p.grad) for n, p in model.named_parameters()}
    return {**{n: t.clone() for n, t in model.state_dict().items()}, **gradients}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("sent", [False, True])
def test_a_repeat_has_the_same_digests_and_leaves_no_trace(split: bool, sent: bool) -> None:
    torch.manual_seed(0)
    model, x, target = Tied(), torch.randn(6, 4), torch.randn(6, 4)
    stages = cut_of(model, x, target)
    shown, digests = work_of(model, stages, [x, target], split=split)
    (program,), before = stages.programs, state_of(model)
    given = sendable_weights(program, model) if sent else None

    def make() -> RunnableStage:
        return StageExecutor(program, model)

    for _ in range(2):
        found = repeated(program, make, model, shown.work, CPU, given)
        assert different(digests, found) == []
        names = {name.removeprefix("the gradient of ") for name in found if name.startswith("the gradient")}
        assert len(names) == len([p for p in model.parameters() if p.requires_grad])
    after = state_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before if before[name] is not None)
    assert [name for name in before if (before[name] is None) != (after[name] is None)] == []
    assert model.last.weight is model.first.weight


def test_what_differs_is_named() -> None:
    torch.manual_seed(0)
    model, x, target = Tied(), torch.randn(6, 4), torch.randn(6, 4)
    stages = cut_of(model, x, target)
    shown, digests = work_of(model, stages, [x, target])
    with torch.no_grad():
        model.last.bias[0] += 1
    names = different(digests, again(stages, model, shown))
    assert names[:2] == ["the weights", "the loss"]
    shown.work.inputs[0][0, 0] += 1
    assert "what went in" in different(digests, again(stages, model, shown))


def test_a_layer_that_keeps_references_to_its_parameters_is_repeated() -> None:
    model, x, target = Recurrent(), torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    stages = cut_of(model, x, target)
    shown, digests = work_of(model, stages, [x, target])
    before = state_of(model)
    found = again(stages, model, shown)
    assert different(digests, found) == []
    after = state_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_repeat_that_adds_to_real_gradients_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, target = Tied(), torch.randn(6, 4), torch.randn(6, 4)
    stages, real = cut_of(model, x, target), model.first.bias
    shown, _ = work_of(model, stages, [x, target])
    before, right = state_of(model), StageExecutor.backward

    def adding(stage: StageExecutor, microbatch: int, weight: float, gradients: Gradients) -> Gradients:
        real.grad = torch.ones(4)
        return right(stage, microbatch, weight, gradients)

    monkeypatch.setattr(StageExecutor, "backward", adding)
    with pytest.raises(NotRepeated, match=r"first\.bias is read beside the table of its module"):
        again(stages, model, shown)
    after = state_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before if before[name] is not None)
