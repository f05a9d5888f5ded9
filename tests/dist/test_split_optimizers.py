"""Optimizers that a rank's own loop makes over its weights: those that couple weights are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

import outsize
from outsize.errors import BadOption
from outsize.train.world.join import join
from outsize.train.world.local_ranks import run_in_forks
from outsize.train.world.world import leave
from split.cases import case

sys.path.append(str(Path(__file__).parents[1] / "unit" / "train" / "optimizers"))
from coupled_optimizers import (  # pyright: ignore[reportMissingImports]  # isort: skip
    GlobalNorm, GrowingStep, Noise, RowNorm,
)  # fmt: skip

pytestmark = pytest.mark.dist
MODEL = case("mlp")
Make = Callable[[Any], Optimizer]


class Wrapping(Optimizer):
    """SGD whose constructor wants what its defaults do not have."""

    def __init__(self, parameters: Any, factor: float) -> None:
        self._factor = factor
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.add_(weight.grad, alpha=-self._factor)


class Normed(Wrapping):
    """The same by the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        weights = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([weight.grad.square().sum() for weight in weights]).sum().sqrt()
        for weight in weights:
            weight.sub_(weight.grad / norm, alpha=self._factor)


def matrices(parameters: Any) -> list[nn.Parameter]:
    """Muon takes nothing else."""
    return [p for p in parameters if p.ndim == 2]


def trained(make: Make, **how: Any) -> None:
    """Two ranks take two steps; weights are compared with those of the plain loop."""
    plain = MODEL.net()
    expected = make(plain.parameters())

    def rank() -> None:
        join()
        torch.set_num_threads(1)
        example = MODEL.example(0)
        model = outsize.split(MODEL.net(), example.args, microbatches=4, **how)
        optimizer = make(model.parameters())
        for _ in range(2):
            model(*example.args).square().sum().backward()
            before = [p.detach().clone() for p in model.parameters()]
            try:
                optimizer.step()
            except BadOption:
                assert all(map(torch.equal, before, model.parameters()))
                raise
            optimizer.zero_grad()
            torch.cat([plain(part) for part in example.args[0].chunk(4)]).square().sum().backward()
            expected.step()
            expected.zero_grad()
        whole = dict(plain.named_parameters())
        for name, weight in model.named_parameters():
            close = torch.equal if "stages" in how else torch.allclose  # Replicas add up in another order.
            assert weight.numel() == 0 or close(weight, whole[name]), name
        leave(join())

    run_in_forks(2, rank)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: AdamW(p, lr=1e-2),
        lambda p: SGD(p, lr=1e-2, momentum=0.9),
        Adafactor,
        RowNorm,
        lambda p: Muon(matrices(p)),
        lambda p: Wrapping(p, 0.1),
    ],
    ids=["adamw", "sgd", "adafactor", "rows", "muon", "wrapping"],
)
def test_weights_that_are_stepped_by_themselves_are_stepped(make: Make) -> None:
    trained(make, stages=2)


@pytest.mark.parametrize(
    "make",
    [GlobalNorm, GrowingStep, Noise, lambda p: Normed(p, 0.1)],
    ids=["norm", "step size", "draws", "copied"],
)
def test_an_optimizer_that_couples_the_weights_of_ranks_is_refused(make: Make) -> None:
    with pytest.raises(BadOption, match="this rank has a part of them"):
        trained(make, stages=2)


def test_replicas_have_all_weights() -> None:
    trained(lambda p: Normed(p, 0.1), axes={"dp_replicate": 2})
