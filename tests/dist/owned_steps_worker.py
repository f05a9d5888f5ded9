"""A small model that ranks train by optimizers of every coupling, and the plain loop to compare with."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.append(str(Path(__file__).parents[1] / "unit/train/optimizers"))

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import outsize
from outsize.ir.plan import Plan
from outsize.train.batch.batch import Batch
from outsize.train.context.options import EngineOptions
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import make_engine

STEPS: Final = 4
MICROBATCHES: Final = 2
Make = Callable[..., Any]


class Mixer(nn.Module):
    """Matrices that tp divides, vectors, and a frozen weight; the head is wide enough for blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)
        )
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.frozen(x))


class Tied(nn.Module):
    """One matrix that the first part and the last one use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.weight = self.first.weight
        self.blocks = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16), nn.LayerNorm(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Mixer()


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)


def batch(step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(8, 16, generator=drawn), torch.randint(6, (8,), generator=drawn)


@dataclass
class Found:
    """Losses, trained weights, hyperparameters of the first group, and what the user draws afterwards."""

    losses: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    group: dict[str, Any] = field(default_factory=dict)
    drawn: Tensor | None = None


def group_of(optimizer: Any) -> dict[str, Any]:
    groups = getattr(optimizer, "param_groups", [{}])
    return {k: v for k, v in groups[0].items() if isinstance(v, int | float)}


def plain(make: Make, clip_norm: float | None = None, *, halves_rate: bool = False) -> Found:
    net, found = model(), Found()
    seed(7)
    optimizer = make(net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if halves_rate else None
    for step in range(STEPS):
        x, y = batch(step)
        parts = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
        losses = [functional.cross_entropy(net(a), b) / MICROBATCHES for a, b in parts]
        for loss in losses:
            loss.backward()
        found.losses.append(torch.stack(losses).sum().detach())
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        optimizer.zero_grad()
    found.weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    found.group, found.drawn = group_of(optimizer), torch.rand(2)
    return found


def plan_of(world: int, *, stages: int | None = None, **axes: int) -> Plan:
    x, y = batch(0)
    replicas = axes.get("dp_shard", 1) * axes.get("dp_replicate", 1)
    return outsize.plan(
        model(), (x,), loss_fn=functional.cross_entropy, target=y, cluster=f"{world}xcpu",
        microbatches=MICROBATCHES // replicas, stages=stages, axes=axes,
    )  # fmt: skip


def engine_of(make: Make, plan: Plan, group: dist.ProcessGroup, **options: Any) -> Engine:
    options = {"loss_fn": functional.cross_entropy, "optimizer": make, **options}
    engine = make_engine(model(), plan, group, EngineOptions(**options))
    x, y = batch(0)
    engine.prepare(Batch((x,), {}, (y,)))
    return engine


def train(engine: Engine, first: int = 0, steps: int = STEPS) -> list[Tensor]:
    pairs = (batch(step) for step in range(first, first + steps))
    return [engine.step(x, target=y).loss.detach() for x, y in pairs]


def split(make: Make, plan: Plan, group: dist.ProcessGroup, **options: Any) -> Found:
    """The same run over the ranks of a group; weights on rank 0 alone."""
    engine = engine_of(make, plan, group, **options)
    seed(7)
    found = Found(losses=train(engine))
    found.weights, found.group, found.drawn = (
        engine.weights.full_state_dict(),
        group_of(engine.optimizer),
        torch.rand(2),
    )
    return found


def gap_of(
    make: Make, build: Callable[[], nn.Module], axes: dict[str, int], group: dist.ProcessGroup
) -> float:
    """How far weights are from the plain loop's after steps on rows of samples and tokens, in float64."""
    torch.manual_seed(0)
    alone = build().double()
    x, y = torch.randn(2, 4, 6, 16, dtype=torch.float64).unbind()
    net, loss_fn = copy.deepcopy(alone), functional.mse_loss
    replicas = axes.get("dp_shard", 1)
    count = axes.get("stages", 1)
    mesh = {axis: size for axis, size in axes.items() if axis != "stages"}
    request = outsize.Request(
        cluster=f"{group.size()}xcpu", microbatches=count, stages=axes.get("stages"), axes=mesh
    )
    plan = outsize.plan(net, (x,), loss_fn=loss_fn, target=y, request=request)
    engine = make_engine(net, plan, group, EngineOptions(loss_fn=loss_fn, optimizer=make))
    optimizer = make(list(alone.parameters()))
    for _ in range(STEPS):
        engine.step(x, target=y)
        parts = zip(x.chunk(count * replicas), y.chunk(count * replicas), strict=True)
        for a, b in parts:
            (loss_fn(alone(a), b) / (count * replicas)).backward()
        optimizer.step()
        for p in alone.parameters():
            p.grad = None
    pairs = [(t, alone.state_dict()[name]) for name, t in engine.weights.full_state_dict().items()]
    return max((float((a - b).abs().max() / b.abs().max()) for a, b in pairs), default=0.0)


def distance(found: Found, expected: Found) -> float:
    """The largest difference, relative to a tensor's largest element."""
    pairs = list(zip(found.losses, expected.losses, strict=True))
    pairs += [(weight, expected.weights[name]) for name, weight in found.weights.items()]
    gaps = [float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs]
    return max(gaps)


def compared(
    makes: dict[str, Make], plan: Plan, expected: dict[str, Found], group: dist.ProcessGroup
) -> dict[str, Any]:
    """For each optimizer the distance, and whether numbers of groups and later draws are the plain loop's."""
    said = dict[str, Any]()
    for name, make in makes.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = split(make, plan, group)
        same_group = found.group == pytest.approx(expected[name].group, rel=1e-6 if plan.axes.tp > 1 else 0)
        drawn, wanted = found.drawn, expected[name].drawn
        assert drawn is not None
        assert wanted is not None
        said[name] = distance(found, expected[name]), same_group, torch.equal(drawn, wanted)
    return said
