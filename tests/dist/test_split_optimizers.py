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


def trained(makes: dict[str, Make], refused: str | None = None, **how: Any) -> None:
    """Two ranks take two steps with each optimizer in turn; weights are those of the plain loop.

    With `refused` each first step is refused on every rank, in words that match it.
    """

    def rank() -> None:
        join()
        torch.set_num_threads(1)
        for name, make in makes.items():
            steps(name, make)
        leave(join())

    def steps(name: str, make: Make) -> None:
        plain, example = MODEL.net(), MODEL.example(0)
        expected = make(plain.parameters())
        model = outsize.split(MODEL.net(), example.args, microbatches=4, **how)
        optimizer = make(model.parameters())
        for _ in range(2):
            model(*example.args).square().sum().backward()
            before = [p.detach().clone() for p in model.parameters()]
            if refused is not None:
                with pytest.raises(BadOption, match=refused):
                    optimizer.step()
                assert all(map(torch.equal, before, model.parameters())), name
                return
            optimizer.step()
            optimizer.zero_grad()
            torch.cat([plain(part) for part in example.args[0].chunk(4)]).square().sum().backward()
            expected.step()
            expected.zero_grad()
        whole = dict(plain.named_parameters())
        for of, weight in model.named_parameters():
            close = torch.equal if "stages" in how else torch.allclose  # Replicas add up in another order.
            assert weight.numel() == 0 or close(weight, whole[of]), (name, of)

    run_in_forks(2, rank)


def test_weights_that_are_stepped_by_themselves_are_stepped() -> None:
    makes: dict[str, Make] = {
        "adamw": lambda p: AdamW(p, lr=1e-2),
        "sgd": lambda p: SGD(p, lr=1e-2, momentum=0.9),
        "adafactor": Adafactor,
        "rows": RowNorm,
        "muon": lambda p: Muon(matrices(p)),
        "wrapping": lambda p: Wrapping(p, 0.1),
    }
    trained(makes, stages=2)


def test_an_optimizer_that_couples_the_weights_of_ranks_is_refused() -> None:
    makes: dict[str, Make] = {
        "norm": GlobalNorm,
        "step size": GrowingStep,
        "draws": Noise,
        "copied": lambda p: Normed(p, 0.1),
    }
    trained(makes, refused="this rank has a part of them", stages=2)


def test_replicas_have_all_weights() -> None:
    trained({"normed": lambda p: Normed(p, 0.1)}, axes={"dp_replicate": 2})
