"""Loops and forwards that a plain training script may have, each against that script written out here.

The judge is `plain`: one process, microbatches in order, the user's own model and optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, final

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer

import outsize
from outsize.train.engine.engine import Engine

_RANDOM = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 4, generator=_RANDOM), torch.randint(0, 3, (8,), generator=_RANDOM)
MICROBATCHES = 4


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(parameters: Any) -> Optimizer:
    return SGD(parameters, lr=0.1)


def engine(model: nn.Module, x: Tensor = X, **options: Any) -> Engine:
    wanted = {"loss_fn": F.cross_entropy, "target": Y, "stages": 2, "microbatches": MICROBATCHES}
    return outsize.parallelize(model, (x,), **{"optimizer": sgd, **wanted, **options})


def accumulate(model: nn.Module, x: Tensor = X) -> Tensor:
    """Adds up the gradients of the microbatches and returns the batch's loss."""
    total = torch.zeros(())
    for part, target in zip(x.split(2), Y.split(2), strict=True):
        loss = F.cross_entropy(model(part), target)
        (loss * 0.25).backward()
        total = total + loss.detach() * 0.25
    return total


def alike(one: nn.Module, other: nn.Module) -> bool:
    """Says whether parameters, gradients and buffers are bit-equal."""
    pairs = [(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True)]
    grads = all(
        (a.grad is None and b.grad is None)
        or (a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad))
        for a, b in pairs
    )
    buffers = zip(one.buffers(), other.buffers(), strict=True)
    return grads and all(torch.equal(a, b) for a, b in [*pairs, *buffers])


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_an_optimizer_that_wants_a_closure_gets_one(clip_norm: float | None) -> None:
    def make(parameters: Any) -> Optimizer:
        return LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    model = mlp()
    reference = copy.deepcopy(model)
    optimizer, built = make(reference.parameters()), engine(model, optimizer=make, clip_norm=clip_norm)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = accumulate(reference)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(reference.parameters(), clip_norm)
        return loss

    for _ in range(2):
        expected: Any = optimizer.step(closure)  # pyright: ignore[reportArgumentType]
        assert torch.equal(built.step(X, target=Y).loss, expected)
        optimizer.zero_grad()
        assert alike(model, reference)


# -- forwards that no tape holds ---------------------------------------------------------------------


@final
class Body(nn.Module):
    """Two layers, with `change(hidden, x)` between them and `enter(x)` before."""

    def __init__(self, change: Callable[[Tensor, Tensor], Tensor], enter: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.change, self.enter = change, enter

    def forward(self, x: Tensor) -> Tensor:
        self.enter(x)
        return self.last(self.change(self.first(x).tanh(), x))


def by_numpy(hidden: Tensor, x: Tensor) -> Tensor:
    return hidden * float(np.abs(x.numpy()).sum())


def by_numpy_of_activations(hidden: Tensor, x: Tensor) -> Tensor:
    return hidden * torch.from_numpy(np.sign(hidden.detach().numpy()))


def unchanged(hidden: Tensor, x: Tensor) -> Tensor:
    return hidden


def doubled(x: Tensor) -> None:
    x.mul_(2)


FORWARDS = {
    "numpy of an input": lambda: Body(by_numpy, id),
    "numpy of activations": lambda: Body(by_numpy_of_activations, id),
    "an input written in place": lambda: Body(unchanged, doubled),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_that_no_tape_holds_has_the_numbers_of_the_plain_loop(name: str) -> None:
    model, x, same_x = FORWARDS[name](), X.clone(), X.clone()
    reference = copy.deepcopy(model)
    built = engine(model, x)
    assert torch.equal(x, X), "planning has written into the example"
    for _ in range(2):
        assert torch.equal(built.step(x, target=Y, update=False).loss, accumulate(reference, same_x))
    assert alike(model, reference)
    assert torch.equal(x, same_x)


@pytest.mark.parametrize("name", FORWARDS)
def test_a_check_of_it_sees_what_the_engine_sees(name: str) -> None:
    x = X.clone()
    verdict = outsize.check(FORWARDS[name](), (x,), loss_fn=F.cross_entropy, target=Y, steps=2)
    assert verdict.bit_equal, verdict
    assert torch.equal(x, X)
