"""Losses with weights, buffers and state of their own, each in a form in which people write them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, CLASSES = 8, 3


class Memory(nn.Module):
    """A classifier, a norm, and a bank that is written after it was read for the last time."""

    bank: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.classifier, self.norm = nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(FEATURES)
        self.register_buffer("bank", torch.zeros(4, FEATURES))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        output = self.norm(output)
        loss = F.cross_entropy(self.classifier(output), y)
        loss = loss + 0.01 * (output @ self.bank.clone().t()).pow(2).mean()
        with torch.no_grad():
            self.bank.copy_(torch.cat([self.bank[1:], output.detach().mean(0, keepdim=True)]))
            self.calls.add_(1)
        return loss


class Centers(nn.Module):
    """Parameters without a layer, and a buffer that no state dict has."""

    centers: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.log_scale = (
            nn.Parameter(torch.randn(FEATURES, CLASSES)),
            nn.Parameter(torch.zeros(())),
        )
        self.register_buffer("centers", torch.zeros(FEATURES), persistent=False)

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy((output - self.centers) @ self.weight, y) * torch.exp(-self.log_scale)
        with torch.no_grad():
            self.centers.mul_(0.9).add_(0.1 * output.mean(0))
        return loss + self.log_scale


class Rebound(nn.Module):
    """A queue that is another tensor after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("queue", torch.zeros(4, FEATURES))

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.classifier(output) + (output @ self.queue.t()).mean(), y)
        self.queue = torch.cat([self.queue[1:], output.detach().mean(0, keepdim=True)])
        return loss


class Counting(nn.Module):
    """Counts its calls, in a number and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier, self.calls, self.history = nn.Linear(FEATURES, CLASSES), 0, list[int]()

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(self.calls)
        return F.cross_entropy(self.classifier(output), y) / len(self.history)


class Holder:
    """No module, but has one."""

    def __init__(self, criterion: nn.Module) -> None:
        self.criterion, self.unused = criterion, nn.Linear(2, 2)

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        return self.criterion(output, y)


def applied(criterion: nn.Module, output: Tensor, y: Tensor) -> Tensor:
    return criterion(output, y)


CRITERIA: dict[str, Callable[[], nn.Module]] = {
    "memory": Memory,
    "centers": Centers,
    "rebound": Rebound,
    "counting": Counting,
}
FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "module": lambda criterion: criterion,
    "closure": lambda criterion: lambda output, y: criterion(output, y),
    "method": lambda criterion: criterion.forward,
    "partial": lambda criterion: functools.partial(applied, criterion),
    "object": Holder,
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, FEATURES))


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 12, generator=draw), torch.randint(CLASSES, (8,), generator=draw)


def adamw(own: Iterable[nn.Parameter], criterion: nn.Module) -> torch.optim.Optimizer:
    """Two groups, the second of the loss's weights."""
    return torch.optim.AdamW([{"params": [*own]}, {"params": [*criterion.parameters()], "lr": 0.02}], lr=0.01)


CLIP = 0.5


def plain_loop(net: nn.Module, criterion: nn.Module, loss_fn: Any, steps: Iterable[int]) -> list[float]:
    """Two microbatches a step; model and loss are clipped and trained together."""
    optimizer, losses = adamw(net.parameters(), criterion), list[float]()
    for step in steps:
        total = 0.0
        for x, y in zip(*(t.chunk(2) for t in batch(step)), strict=True):
            loss = loss_fn(net(x), y)
            (loss / 2).backward()
            total = total + loss.detach() / 2
        nn.utils.clip_grad_norm_([*net.parameters(), *criterion.parameters()], CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return losses


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
