"""Which stages' forwards and backwards take turns: where ranks exchange, and both meet nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn

from outsize.capture.recording.fallbacks import record
from outsize.run.stage.cut import cut, in_runs
from outsize.run.stage.stage import StageExecutor, StageSetting


@final
class Forces(nn.Module):
    """A loss of forces, which are gradients of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.up(x).tanh().square().sum(), x, create_graph=True)
        return force.square().mean()


def stage(model: nn.Module, setting: StageSetting) -> StageExecutor:
    tape = record(model, (torch.randn(4, 6),), {})
    made = cut(tape, model, in_runs([0, len(tape.instructions)]), outputs=True, stages=1)
    return StageExecutor(made.programs[0], model, setting)


def again(*args: Any) -> Any:
    raise AssertionError("nothing runs")


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.GELU())


def drawing() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))


def writing() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))


@pytest.mark.parametrize(
    ("model", "repeats", "alternates"),
    [
        (plain, False, True),
        (drawing, False, True),
        (writing, False, True),
        (plain, True, True),
        (drawing, True, False),
        (writing, True, False),
        (Forces, False, False),
    ],
)
def test_a_stage_alternates_where_nothing_is_shared(
    model: Callable[[], nn.Module], repeats: bool, alternates: bool
) -> None:
    setting = StageSetting(again if repeats else None, exchanges=True)
    assert stage(model().train(), setting).alternates is alternates


def test_a_second_forward_under_autocast_does_not_alternate() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert stage(plain(), StageSetting(exchanges=True)).alternates
        assert not stage(plain(), StageSetting(again, exchanges=True)).alternates


def test_a_stage_that_nobody_divides_does_not_alternate() -> None:
    assert not stage(plain(), StageSetting()).alternates
