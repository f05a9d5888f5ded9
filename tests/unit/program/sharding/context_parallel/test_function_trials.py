"""By hand: custom autograd functions that work on each row alone, and those that only look so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outsize.capture.recording.fallbacks import record
from outsize.errors import BadOption
from outsize.program.sharding.context_parallel.rows import by_rows
from outsize.program.sharding.share import Share


class Squared(torch.autograd.Function):
    """Each number by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (x,), (gradient,) = ctx.saved_tensors, grad_outputs
        return 2 * x * gradient


class Scaled(torch.autograd.Function):
    """A norm's form: rows, a weight for all of them, and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by = by
        return x * weight * by

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (x, weight), (gradient,) = ctx.saved_tensors, grad_outputs
        return gradient * weight * ctx.by, (gradient * x * ctx.by).sum((0, 1)), None


class MeanScaled(Scaled):
    """Its weight's gradient is a mean over rows, which does not add up."""

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (x, weight), (gradient,) = ctx.saved_tensors, grad_outputs
        return gradient * weight * ctx.by, (gradient * x * ctx.by).mean((0, 1)), None


class Centred(Squared):
    """Rows see the mean of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x - x.mean(1, keepdim=True)


class Balanced(Squared):
    """Each number by itself, with a backward that counts rows."""

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (gradient,) = grad_outputs
        return gradient / gradient.shape[1]


class Transposed(Squared):
    """The rows are another dim."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.transpose(1, 2).contiguous()


class Net(nn.Module):
    """A product, and the function behind it."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function, self.product, self.weight = function, nn.Linear(12, 12), nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        more = (self.weight, 0.5) if issubclass(self.function, Scaled) else ()
        found: Any = self.function.apply(self.product(x), *more)
        return found


def share_of(function: type[torch.autograd.Function]) -> Share | None:
    model = Net(function)
    tape = record(model, (torch.randn(3, 7, 12),), {})
    return by_rows(tape, model, 2).shares.get(tape.output_slots()[0])


@pytest.mark.parametrize("function", [Squared, Scaled])
def test_rows_alone_are_followed(function: type[torch.autograd.Function]) -> None:
    assert share_of(function) == Share(1, (7,))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (Centred, "from that row alone"),
        (Balanced, "from that row alone"),
        (MeanScaled, "from that row alone"),
        (Transposed, "does not return the rows"),
    ],
)
def test_others_are_refused_with_their_line(function: type[torch.autograd.Function], reason: str) -> None:
    with pytest.raises(BadOption, match=reason) as error:
        share_of(function)
    assert "test_function_trials.py:" in error.value.numbers
    assert "axes={'cp': 1} (--axes cp=1)" in error.value.next_step


def test_a_scripted_function_is_tried_too() -> None:
    @torch.jit.script
    def halved(x: Tensor) -> Tensor:
        return x * 0.5

    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product = nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            return halved(self.product(x))

    model = Scripted()
    tape = record(model, (torch.randn(3, 7, 12),), {})
    assert by_rows(tape, model, 2).shares[tape.output_slots()[0]] == Share(1, (7,))
