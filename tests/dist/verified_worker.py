"""Faults in the products of one rank, and the engines in which the other ranks are to find them."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import outsize
from outsize.errors import SilentCorruption
from outsize.ir.plan import Plan
from outsize.ir.schedule import Kind
from outsize.run.stage.stage import StageExecutor
from outsize.run.verified import shown_work
from outsize.train.batch.batch import Batch
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine
from outsize.train.verify.verification import NotVerified

SIZE: Final = 8
BLOCKS: Final = 8
METHODS: Final = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "backward_input",
    Kind.W: "backward_weight",
}
_PRODUCTS: Final = (torch.ops.aten.mm, torch.ops.aten.addmm)
Lasting = Literal["always", "once"]


class Chain(nn.Module):
    """Layers that let no error vanish; with a dropout, and one weight for the first and the last of them."""

    def __init__(self, *, tied: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(BLOCKS))
        if tied:
            self.layers[-1].weight = self.layers[0].weight
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return x


class Normed(nn.Module):
    """Its forwards write buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE)) for _ in range(BLOCKS // 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Woven(nn.Module):
    """Values that later layers of this and other stages take, one weight for two neighbours, one for layers
    of two stages, a frozen layer, and a buffer that one layer writes and another reads.
    """

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(BLOCKS))
        self.layers[2].weight = self.layers[1].weight
        self.layers[6].weight = self.layers[0].weight
        self.layers[3].requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        first = kept = x
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + kept
            if number == 1:
                first = x
            if number % 3 == 0:
                x, kept = x + first, x
            if number == 5:
                self.calls.add_(1)
                x = x * torch.cos(self.calls)
            if number == 6:
                x = x + self.calls
        return x


@final
class Flipped(TorchDispatchMode):
    """Flips one bit of one element of each product, or of the first one alone."""

    def __init__(self, drawn: random.Random, lasting: Lasting) -> None:
        super().__init__()
        self._drawn, self._lasting, self.count = drawn, lasting, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _PRODUCTS and (self._lasting == "always" or not self.count):
            self.count += 1
            words = out.view(torch.int32).view(-1)
            # A bit of the mantissa that no later sum rounds away.
            words[len(words) // 2] ^= 1 << self._drawn.randrange(16, 23)
        return out


@final
@dataclass
class Fault:
    """Products of one kind of action that are wrong, on this rank, `always` or in the shown work alone; of
    the latter `flipped` are wrong.
    """

    kind: Kind
    lasting: Lasting
    drawn: random.Random
    flipped: int = 0

    @contextmanager
    def there(self) -> Iterator[None]:
        """A step in which it happens."""
        right = getattr(StageExecutor, METHODS[self.kind])
        seed = self.drawn.random()

        def wrong(stage: Any, *args: Any) -> Any:
            # Rows hold bound methods, so the class that shows a stage is not patched itself.
            is_shown = sys._getframe(1).f_code.co_filename == shown_work.__file__
            if self.lasting == "once" and (self.flipped or not is_shown):
                return right(stage, *args)
            # The same bits are wrong each time, as a broken unit makes them.
            with Flipped(random.Random(seed), self.lasting) as mode:
                result = right(stage, *args)
            self.flipped += mode.count * is_shown
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StageExecutor, METHODS[self.kind], wrong)
            yield


def loss_fn(outputs: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(outputs, target)


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(size, SIZE, generator=drawn), torch.randn(size, SIZE, generator=drawn)


def plan_of(
    model: nn.Module,
    world: int,
    *,
    stages: int,
    replicas: int = 1,
    schedule: str = "1f1b",
    microbatches: int = 4,
    tp: int = 1,
    dp_shard: int = 1,
    **asked: Any,
) -> Plan:
    x, y = batch(0, 2 * microbatches * replicas)
    changed = {"bn": asked.pop("bn")} if "bn" in asked else {}
    axes = {"dp_replicate": replicas, "tp": tp, "dp_shard": dp_shard}
    plan = outsize.plan(
        model, (x,), loss_fn=loss_fn, target=y, cluster=f"{world}xcpu", microbatches=microbatches,
        stages=stages, schedule=schedule, axes=axes, **asked,
    )  # fmt: skip
    return plan.model_copy(update=changed)


def engine_of(model: nn.Module, plan: Plan, group: dist.ProcessGroup | None) -> Engine:
    options = EngineOptions(loss_fn=loss_fn, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), seed=3)
    engine = make_engine(model, plan, group, options)
    x, y = batch(0, plan.batch_size)
    engine.prepare(Batch((x,), {}, (y,)))
    return engine


def step(engine: Engine, number: int) -> Tensor:
    x, y = batch(number, engine.plan.batch_size)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the work of ranks is not verified", NotVerified)
        warnings.filterwarnings("ignore", "verification is expected to take", NotVerified)
        return engine.step(x, target=y).loss.detach()


def said_of(engine: Engine, number: int, fault: Fault | None) -> str:
    """What a step says, with a fault on this rank or on another one; "" where nothing is wrong."""
    try:
        if fault is None:
            step(engine, number)
        else:
            with fault.there():
                step(engine, number)
    except SilentCorruption as error:
        return str(error)
    return ""
