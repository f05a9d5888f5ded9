"""An average, SGD with momentum and a chain of schedulers go on over two processes as one device would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from forked import on_ranks
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import outsize
from outsize.ir.plan import Plan
from outsize.train.batch.batch import Batch
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine

pytestmark = pytest.mark.dist
EVERY, ALL = 3, 6


def small() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.randn(8, 4), torch.randint(0, 3, (8,))


def momentum(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.01)


def schedule(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    return lr_scheduler.SequentialLR(
        optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 6)], milestones=[2]
    )


def average_of(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))


Trained = tuple[list[float], list[float], dict[str, Tensor]]


def plain_training() -> Trained:
    """The loop that a person writes on one device, with gradients of two microbatches."""
    model, x, y = small()
    optimizer = momentum(model.parameters())
    scheduler, average = schedule(optimizer), average_of(model)
    losses, rates = list[float](), list[float]()
    for _ in range(ALL):
        parts = [F.cross_entropy(model(x[at : at + 4]), y[at : at + 4]) / 2 for at in (0, 4)]
        for part in parts:
            part.backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        average.update_parameters(model)
        losses.append(float(sum(part.detach() for part in parts)))
    return losses, rates, dict(average.module.named_parameters())


def trained(group: dist.ProcessGroup, root: Path, count: int, goes_on: bool) -> Trained:
    """`count` steps, behind those that are saved where it goes on, and a save."""
    model, x, y = small()
    plan = outsize.plan(model, (x,), loss_fn=F.cross_entropy, target=y, stages=2, microbatches=2)
    assert isinstance(plan, Plan)
    engine = make_engine(model, plan, group, EngineOptions(loss_fn=F.cross_entropy, optimizer=momentum))
    engine.prepare(engine._split.dims.of(Batch((x,), {}, (y,))))
    if goes_on:
        assert engine.state.resume(root) == EVERY
    assert engine.optimizer is not None
    optimizer = engine.optimizer
    scheduler, average = schedule(optimizer), average_of(engine.weights.module)
    engine.state.attach(scheduler=scheduler, average=average)
    losses, rates = list[float](), list[float]()
    for _ in range(count):
        rates.append(optimizer.param_groups[0]["lr"])
        losses.append(float(engine.step(x, target=y).loss))
        scheduler.step()
        average.update_parameters(engine.weights.module)
    engine.save(root)
    return losses, rates, {name: p.detach().clone() for name, p in average.module.named_parameters()}


def test_an_average_and_schedulers_go_on_over_two_processes(tmp_path: Path) -> None:
    expected = plain_training()
    first = on_ranks(tmp_path, 2, lambda group: trained(group, tmp_path / "run", EVERY, False))
    again = on_ranks(tmp_path, 2, lambda group: trained(group, tmp_path / "run", ALL - EVERY, True))
    averages = dict[str, Tensor]()
    for (losses, rates, _), (late_losses, late_rates, average) in zip(first, again, strict=True):
        assert [*losses, *late_losses] == expected[0]
        assert [*rates, *late_rates] == expected[1]
        averages |= {name: tensor for name, tensor in average.items() if not tensor.is_meta}
    assert averages.keys() == expected[2].keys()
    assert all(torch.equal(averages[name], tensor) for name, tensor in expected[2].items())
