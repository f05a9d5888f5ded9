"""What a loss is divided by is found out on the device, where the tensors of the loss are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerators import everywhere
from torch import Tensor, nn

import outsize

SAMPLES = 8


def weighted(device: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A mean times the samples, which is a sum; it has a tensor of its own."""
    weights = torch.linspace(0.5, 1.5, 8).to(device)
    return lambda output, target: F.mse_loss(output * weights, target * weights) * len(output)


def ignoring(device: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A mean over the targets that count, by weights of classes."""
    weights = torch.linspace(0.5, 1.5, 8).to(device)
    return lambda output, target: F.cross_entropy(output, target, weights, ignore_index=-100)


@pytest.mark.parametrize("device", everywhere("cuda:0", "sim:0", orders=("lazy",)))
@pytest.mark.parametrize("make", [weighted, ignoring])
def test_a_loss_with_tensors_on_the_device_gives_the_undivided_batchs_loss(make: Any, device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).to(device)
    x, loss_fn = torch.randn(SAMPLES, 8).to(device), make(device)
    classes = torch.tensor([1, 2, -100, 4, -100, -100, -100, 0]).to(device)
    target = classes if make is ignoring else torch.randn(SAMPLES, 8).to(device)
    plan = outsize.plan(
        model, (x,), cluster="2xcpu", stages=2, microbatches=4, loss_fn=loss_fn, target=target
    )
    engine = outsize.parallelize(model, (x,), plan=plan, loss_fn=loss_fn, target=target)
    loss = engine.step(x, target=target, update=False).loss
    torch.testing.assert_close(loss, loss_fn(model(x), target).detach(), rtol=1e-6, atol=0)
