"""Trains a model by an engine of local stages and by the plain loop; the loop shares no code with outsize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from guard_models import WIDTH
from torch import Tensor, nn

from outsize.capture.graph.build import build_graph
from outsize.capture.recording.fallbacks import record
from outsize.ir.plan import Axes, Plan, stages_from_bounds
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine

MICROBATCHES, STEPS = 2, 4
Between = Callable[[int], None]  # called with the number of the step that comes


def batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        (torch.randn(4, WIDTH, generator=draw), torch.randn(4, WIDTH, generator=draw)) for _ in range(count)
    ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def plain(model: nn.Module, loss_fn: Any, between: Between, steps: int = STEPS) -> list[Tensor]:
    """Losses of each step, then the parameters."""
    optimizer, losses = sgd(model.parameters()), list[Tensor]()
    for number, (x, y) in enumerate(batches(steps)):
        between(number)
        total = torch.zeros(())
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            loss = loss_fn(model(part), target)
            (loss * (1 / MICROBATCHES)).backward()
            total = total + loss.detach() * (1 / MICROBATCHES)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def plan_of(model: nn.Module, loss_fn: Any, stages: int = 2) -> Plan:
    x, y = (t.chunk(MICROBATCHES)[0] for t in batches()[0])
    graph = build_graph(record(model, (x,), {}, loss_fn, (y,)), model).graph
    count = len(graph.units)
    bounds = tuple(count * s // stages for s in range(stages + 1))
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        cluster=f"{stages}xcpu",
        axes=Axes(pp=stages),
        batch_size=4,
        microbatches=MICROBATCHES,
        schedule="1f1b",
        stages=stages_from_bounds(graph, bounds, tuple(f"cpu:{s}" for s in range(stages))),
    )


def engine_of(model: nn.Module, loss_fn: Any) -> Engine:
    return make_engine(model, plan_of(model, loss_fn), None, EngineOptions(loss_fn=loss_fn, optimizer=sgd))


def split(engine: Engine, between: Between, steps: int = STEPS) -> list[Tensor]:
    """The same of an engine."""
    losses = list[Tensor]()
    for number, (x, y) in enumerate(batches(steps)):
        between(number)
        losses.append(engine.step(x, target=y).loss)
    return [*losses, *(p.detach().clone() for p in engine.model.parameters())]


def insist_on_equal(expected: list[Tensor], found: list[Tensor]) -> None:
    gaps = [n for n, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.equal(a, b)]
    assert not gaps, gaps
