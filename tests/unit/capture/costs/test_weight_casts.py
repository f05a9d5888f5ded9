"""Which calls of a recording read weights in autocast's copies alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.capture.graph.build import build_graph
from outsize.capture.measure.local_cluster import find_cluster
from outsize.capture.recording.fallbacks import record
from outsize.planner.costs.efficiency import GPU


def casts_of(model: nn.Module, x: Tensor) -> list[list[str]]:
    """The weights that each instruction casts."""
    with torch.autocast("cpu", torch.bfloat16):
        tape = record(model, (x,), {}, None, ())
    assert {dtype for i in tape.instructions for _, dtype in i.casts} <= {torch.bfloat16, None}
    return [sorted(name for name, dtype in i.casts if dtype is not None) for i in tape.instructions]


@final
class Calling(nn.Module):
    """Calls a function of its weight."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.function = nn.Identity(), function
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x), self.weight)


@final
class Leaf(nn.Module):
    """The same without children: one instruction of the user's code."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


@final
class Product(torch.autograd.Function):
    """A user's function gets the weight as it is, and returns the gradient of that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, gradient.mT @ gradient


def asking(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight) * (2 if weight.dtype is torch.float32 else 3)


def by_values(x: Tensor, weight: Tensor) -> Tensor:
    """Its values decide, so it is run on real tensors, and its ops are not seen."""
    return F.linear(x, weight) if float(x.sum()) > 1e9 else F.linear(x, weight) + 1


def both(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight) + weight.sum()


@pytest.mark.parametrize("kind", [Calling, Leaf])
def test_a_weight_that_a_call_reads_as_a_cast_alone(kind: Any) -> None:
    x = torch.randn(2, 4)
    assert casts_of(kind(F.linear), x)[-1] == ["weight"]
    assert casts_of(kind(torch.matmul), x)[-1] == ["weight"]
    assert ["weight"] not in casts_of(kind(lambda x, w: F.embedding(x.argmax(-1), w)), x)
    assert ["weight"] not in casts_of(kind(lambda x, w: x + w.to(torch.bfloat16).sum()), x)
    assert ["weight"] not in casts_of(kind(lambda x, w: Product.apply(x, w)), x)


@pytest.mark.parametrize("function", [asking, by_values, both])
def test_a_leaf_that_may_tell_the_weight_from_its_copy(function: Callable[..., Tensor]) -> None:
    assert casts_of(Leaf(function), torch.randn(2, 4)) == [[]]


def test_a_layer_that_is_called_twice() -> None:
    """The second call has no cast of its own: autocast keeps the first."""
    linear = nn.Linear(4, 4)
    assert casts_of(nn.Sequential(linear, nn.ReLU(), linear), torch.randn(2, 4)) == [
        ["0.bias", "0.weight"],
        [],
        ["0.bias", "0.weight"],
    ]


def test_a_weight_that_one_call_casts_in_an_unknown_way_is_left_to_autocast() -> None:
    leaf, known = Leaf(asking), Leaf(F.linear)
    known.weight = leaf.weight
    assert casts_of(nn.Sequential(leaf, known), torch.randn(2, 4)) == [[], []]


@final
class Listing(nn.Module):
    """Reads its weight from a list, as an LSTM does: a copy in the module's table would not come there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.weights = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[0])


def test_weights_in_lists() -> None:
    assert casts_of(Listing(), torch.randn(2, 4)) == [[]]


def test_copies_are_counted_once_and_are_in_no_other_cost() -> None:
    """They are made once per step: a layer that is called twice has them in its first call."""
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    model = nn.Sequential(linear, nn.ReLU(), linear)
    with torch.autocast("cpu", torch.bfloat16):
        units = build_graph(record(model, (x,), {}, None, ()), model).graph.units
    assert sum(unit.cast_bytes for unit in units) == 2 * (16 + 4)
    first, *_, last = units
    assert (first.cast_bytes, last.cast_bytes) == (40, 0)
    # What is left is the cast of the input, and addmm of (4), (2, 4), (4, 4) with its result.
    assert first.moved_bytes == 8 * (4 + 2) + 2 * (4 + 8 + 16 + 8)
    assert sum(work.launches for work in first.forward) == 2
    assert first.saved_bytes == 2 * 8, "the input in bfloat16"


def test_no_casts_without_autocast() -> None:
    tape = record(nn.Linear(4, 4), (torch.randn(2, 4),), {}, None, ())
    assert [i.casts for i in tape.instructions] == [()]


def test_a_step_on_an_accelerator_has_the_seconds_of_one_cast() -> None:
    """Four bytes are read of a weight, and two written, whatever the number of microbatches."""
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), torch.randn(8, 64)
    how: dict[str, Any] = {"stages": 1, "recompute": "none", "loss_fn": F.mse_loss, "target": x}
    plans = [
        outsize.plan(model, (x,), cluster="1xa100-80gb", microbatches=m, precision="bf16-mixed", **how)
        for m in (1, 4)
    ]
    without = outsize.plan(model, (x,), cluster="1xa100-80gb", microbatches=1, precision="fp32", **how)
    once, also_once, never = (p.expected.update_s for p in (*plans, without) if p.expected is not None)
    cast_s = GPU.update_s(6 * 4 * (64 * 64 + 64), find_cluster("1xa100-80gb").devices[0])
    assert once == also_once == pytest.approx(never + cast_s)
