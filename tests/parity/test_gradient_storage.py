"""Gradients that travel or wait between stages never share memory with a `.grad`.

Some backwards hand one storage to two of their inputs: `a + b` gives both the gradient that came in, or views
of it where an operand was broadcast along a dimension of size one. The autograd engine then makes a `.grad`
of the very memory that the gradient of a boundary value lives in. In the plain loop nobody reads that
gradient again; in a pipeline it waits for an earlier stage while the next microbatch is added to `.grad`.

The judge is a plain loop written here; it shares no code with the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any, cast, final

import pytest
import torch
import torch.nn.functional as F
from shared_captures import each_model_captured_once
from torch import Tensor, nn

import outsize
from outsize.ir.plan import Plan, ScheduleName
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine

pytestmark = pytest.mark.usefixtures("shared_recordings")

WIDTH, BLOCKS, COUNT, STAGES = 4, 6, 4, 3
SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved", "zero-bubble", "zero-bubble-v")

# (parameter of [2, WIDTH], value of [samples, 2 * WIDTH]) -> [samples, 2, WIDTH]
SHARING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda p, t: p[None] + t.reshape(len(t), 2, -1),
    "add, the value first": lambda p, t: t.reshape(len(t), 2, -1) + p[None],
    "add of a view": lambda p, t: p.view(1, 2, -1) + t.view(-1, 2, WIDTH),
    "add of expanded": lambda p, t: p.expand(len(t), 2, -1) + t.unflatten(1, (2, -1)),
    "add in place": lambda p, t: t.reshape(len(t), 2, -1).clone().add_(p[None]),
    "subtract": lambda p, t: p[None] - t.reshape(len(t), 2, -1),
    "add, flat": lambda p, t: (p.flatten() + t).unflatten(1, (2, -1)),
    "stack and sum": lambda p, t: torch.stack([p.expand(len(t), 2, -1), t.reshape(len(t), 2, -1)]).sum(0),
    "cat": lambda p, t: torch.cat([p.repeat(len(t), 1, 1), t.reshape(len(t), 2, -1)], 2)[..., ::2],
    "lerp": lambda p, t: torch.lerp(p[None], t.reshape(len(t), 2, -1), 1.0),
    "where": lambda p, t: torch.where(torch.ones(1, 2, 1) > 0, t.reshape(len(t), 2, -1) + p, p[None]),
    "einsum": lambda p, t: torch.einsum("nij->nij", p[None]) + torch.einsum("nij->nij", t.view(-1, 2, WIDTH)),
    "bias of a linear layer": lambda p, t: F.linear(t, torch.eye(2 * WIDTH), p.flatten()).unflatten(
        1, (2, -1)
    ),
    "transposed": lambda p, t: (p.t()[None] + t.reshape(len(t), 2, -1).mT).mT,
}


@final
class Block(nn.Module):
    """Shifts and scales by a table of its own and a value of all blocks, as adaptive layer norm does."""

    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self._operation = operation

    def forward(self, x: Tensor, shared: Tensor) -> Tensor:
        shift, scale = self._operation(self.table, shared).chunk(2, 1)
        return x + self.linear(torch.tanh(x) * (1 + scale) + shift)


@final
class Modulated(nn.Module):
    """Blocks that all read one embedding, made in the first stage."""

    def __init__(self, operation: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, 2 * WIDTH)
        self.blocks = nn.ModuleList(Block(operation) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        shared = self.embedding(t)
        for block in self.blocks:
            x = block(x, shared)
        return self.head(x)


def built(name: str) -> Modulated:
    torch.manual_seed(0)
    return Modulated(SHARING[name])


@cache
def planned_model(name: str) -> Modulated:
    """The model that plans are made of; no test changes it."""
    return built(name)


@pytest.fixture(autouse=True, scope="module")
def _shared_captures() -> Iterator[None]:
    with each_model_captured_once():
        yield


def batch(samples: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Inputs and target of COUNT microbatches of `samples`."""
    draw = torch.Generator().manual_seed(1)
    shapes = ((COUNT * samples, 3, WIDTH), (COUNT * samples, 1), (COUNT * samples, 3, WIDTH))
    x, t, target = (torch.randn(shape, generator=draw) for shape in shapes)
    return (x, t), target


def plain_gradients(name: str, samples: int, steps: int) -> dict[str, Tensor]:
    """Accumulated over microbatches and steps, one process, no engine."""
    model, ((x, t), target) = built(name), batch(samples)
    for _ in range(steps):
        for at in range(0, len(x), samples):
            rows = slice(at, at + samples)
            (F.mse_loss(model(x[rows], t[rows]), target[rows]) / COUNT).backward()
    return {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}


def plan_of(name: str, schedule: str, samples: int, ranks: int | None = None) -> Plan:
    """COUNT microbatches; two stages on each of two ranks where the schedule has several on a rank."""
    inputs, target = batch(samples)
    several = schedule in ("interleaved", "zero-bubble-v")
    devices = ranks or (2 if several else STAGES)
    found = outsize.plan(
        planned_model(name), inputs, cluster=f"{devices}xcpu", schedule=cast("ScheduleName", schedule),
        microbatches=1 if schedule == "naive" else COUNT, batch_size=COUNT * samples, loss_fn=F.mse_loss,
        target=target, stages=None if several else devices,
    )  # fmt: skip
    return found.model_copy(update={"microbatches": COUNT})


def engine_gradients(name: str, schedule: str, samples: int, steps: int) -> dict[str, Tensor]:
    engine: Any = make_engine(
        built(name), plan_of(name, schedule, samples), None, EngineOptions(loss_fn=F.mse_loss)
    )
    inputs, target = batch(samples)
    for _ in range(steps):
        engine.step(*inputs, target=target, update=False)
    return {key: parameter.grad for key, parameter in engine.weights.named_parameters()}


def insist_equal(name: str, schedule: str, samples: int, steps: int) -> None:
    expected = plain_gradients(name, samples, steps)
    got = engine_gradients(name, schedule, samples, steps)
    assert expected.keys() == got.keys()
    assert [key for key, gradient in expected.items() if not torch.equal(gradient, got[key])] == []


# Gradients wait in one of these for an earlier stage, in the other for the half of a backward too.
WAITING = ("1f1b", "zero-bubble")


def cells() -> list[Any]:
    """Every operation under two schedules, and one operation under all."""
    pairs = product(SHARING, SCHEDULES)
    return [
        pytest.param(*pair, marks=[] if pair[0] == "add" or pair[1] in WAITING else [pytest.mark.full])
        for pair in pairs
    ]


@pytest.mark.parametrize(("name", "schedule"), cells())
def test_one_sample_in_a_microbatch(name: str, schedule: str) -> None:
    insist_equal(name, schedule, samples=1, steps=2)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.sample("naive", "interleaved", "zero-bubble")
def test_two_samples_in_a_microbatch(schedule: str) -> None:
    insist_equal("add", schedule, samples=2, steps=1)


def test_the_operations_do_share_storage() -> None:
    """Otherwise the tests above prove nothing: a parameter's `.grad` is made of the value's gradient."""
    sharing = []
    for name, operation in SHARING.items():
        parameter, value = nn.Parameter(torch.randn(2, WIDTH)), torch.randn(1, 2 * WIDTH, requires_grad=True)
        received = value.view_as(value)
        arrived: list[Tensor] = []
        received.register_hook(arrived.append)
        out = operation(parameter, received)
        (out * torch.arange(1.0, out.numel() + 1).view_as(out)).sum().backward()
        assert parameter.grad is not None
        if parameter.grad.untyped_storage().data_ptr() == arrived[0].untyped_storage().data_ptr():
            sharing.append(name)
    assert len(sharing) >= 4, sharing
