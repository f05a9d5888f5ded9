"""What an optimizer couples is found by trial, and the trial leaves nothing behind."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from coupled_optimizers import (
    ALL_WEIGHTS,
    DRAWS,
    ELEMENTWISE,
    PER_WEIGHT,
    Curvature,
    GlobalNorm,
    RowNorm,
    Sharpness,
    matrices_apart,
)
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from outsize.train.optimizers.coupling import Coupling, CouplingTrial, WeightKind


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 200), nn.LayerNorm(200), nn.Linear(200, 300))


def tried(make: Callable[..., Any], net: nn.Module | None = None, **how: bool) -> Coupling:
    net = model() if net is None else net
    kinds = [WeightKind(n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in net.named_parameters()]
    return CouplingTrial(make, net, kinds, torch.device("cpu"), **how).run()


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_updates_of_each_element_by_itself(name: str) -> None:
    found = tried(ELEMENTWISE[name])
    assert (found.reach, found.draws, found.unknown) == ("elementwise", False, None)


@pytest.mark.parametrize("name", PER_WEIGHT)
def test_updates_that_couple_the_elements_of_a_weight(name: str) -> None:
    found = tried(PER_WEIGHT[name])
    assert (found.reach, found.draws, found.unknown) == ("per weight", False, None)


@pytest.mark.parametrize("name", ALL_WEIGHTS)
def test_updates_that_couple_weights(name: str) -> None:
    found = tried(ALL_WEIGHTS[name])
    assert (found.reach, found.of_all, found.unknown) == ("all weights", True, None)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_seen_whatever_the_layout(name: str) -> None:
    assert tried(DRAWS[name]).draws
    assert tried(DRAWS[name], divided=False, spread=False).draws


class LargeSidesOnly(torch.optim.SGD):
    """Divides gradients by their rows' norms where two dims have 16 elements and more."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and len(p.shape) > 1 and sorted(p.shape)[-2] >= 16:
                    p.grad = p.grad / p.grad.square().sum(tuple(range(1, p.ndim)), keepdim=True).sqrt()
        return super().step(closure)


class LargeOnly(torch.optim.SGD):
    """Divides gradients by their norm where a weight has 4096 elements and more."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel() >= 4096:
                    p.grad = p.grad / p.grad.norm()
        return super().step(closure)


THIN = nn.Sequential(nn.Linear(2, 900), nn.Linear(900, 2), nn.Linear(20, 24))


@pytest.mark.parametrize(
    ("make", "net"),
    [
        (LargeSidesOnly, nn.Linear(16, 32)),
        (LargeSidesOnly, nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 32, 3), nn.Conv2d(32, 48, 3))),
        (LargeSidesOnly, THIN),
        (LargeOnly, nn.Sequential(nn.LayerNorm(16), nn.LayerNorm(8192))),
        (LargeOnly, nn.Conv2d(40, 60, 3)),
    ],
    ids=["a small matrix", "images", "beside thin ones", "a vector", "an image's"],
)
def test_coupling_that_begins_at_a_size_is_found(make: Callable[..., Any], net: nn.Module) -> None:
    assert tried(lambda weights: make(weights, lr=0.1), net).reach == "per weight"


class RoundsAtRandom(torch.optim.SGD):
    """Draws for weights of half precision alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.dtype == torch.bfloat16:
                    p.grad = p.grad + torch.rand_like(p.grad) * 1e-4
        return super().step(closure)


def test_draws_for_the_dtype_of_the_model_are_seen() -> None:
    assert tried(RoundsAtRandom, model().bfloat16()).draws
    assert not tried(RoundsAtRandom).draws


def test_a_factory_that_wants_a_matrix_is_tried_with_all_kinds() -> None:
    assert tried(matrices_apart(RowNorm)).reach == "per weight"
    assert tried(matrices_apart(GlobalNorm)).reach == "all weights"


def test_a_factory_that_asks_the_model_for_names_finds_the_weights_that_it_gets() -> None:
    net = model()

    def by_name(parameters: Iterable[nn.Parameter]) -> Any:
        names = {id(p): name for name, p in net.named_parameters()}
        decays = {p: names[id(p)].endswith("weight") for p in parameters}
        groups = [[p for p, decay in decays.items() if decay is wanted] for wanted in (True, False)]
        return torch.optim.AdamW([{"params": some, "weight_decay": 0.1 * bool(some)} for some in groups])

    before = dict(net.named_parameters())
    assert tried(by_name, net).reach == "elementwise"
    assert all(p is before[name] for name, p in net.named_parameters())


@pytest.mark.parametrize("asked", ["divided", "spread"])
def test_only_what_matters_is_asked(asked: str) -> None:
    """Without ranks that hold parts, elements of a weight may be coupled."""
    others = {"divided": False, "spread": False, asked: True}
    assert tried(RowNorm, **others).reach == ("per weight" if asked == "divided" else "elementwise")
    assert tried(GlobalNorm, spread=True, divided=False).reach == "all weights"


def fails(parameters: Iterable[nn.Parameter]) -> Any:
    if sum(p.numel() for p in parameters) < 60_000:
        raise ValueError("a small model")
    return torch.optim.AdamW(parameters)


def of_others(parameters: Iterable[nn.Parameter]) -> Any:
    return torch.optim.AdamW(model().parameters())


class Still(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        """Moves nothing."""


@pytest.mark.parametrize(
    ("make", "why"),
    [(fails, "a small model"), (of_others, "no weight of the optimizer"), (Still, "has moved")],
)
def test_what_cannot_be_tried_is_taken_to_couple_all_weights(make: Callable[..., Any], why: str) -> None:
    found = tried(make)
    assert found.of_all
    assert why in str(found.unknown)


@pytest.mark.parametrize(
    ("make", "wants"),
    [
        (torch.optim.LBFGS, "a closure"),
        (Sharpness, "a closure"),
        (Curvature, "gradients of gradients"),
        (torch.optim.AdamW, "gradients"),
    ],
)
def test_what_a_step_wants_is_found(make: Callable[..., Any], wants: str) -> None:
    found = tried(make)
    assert (found.wants, found.unknown) == (wants, None)


def test_a_trial_leaves_nothing_behind(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither draws nor hooks, prints, values or gradients."""
    net, called = model(), list[str]()

    def talks(parameters: Iterable[nn.Parameter]) -> Any:
        print("hello")
        return DRAWS["noise"](parameters)

    before = {name: p.clone() for name, p in net.named_parameters()}
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    drawn = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    handle = register_optimizer_step_pre_hook(lambda *_: called.append("hook"))
    try:
        tried(talks, net)
        torch.optim.SGD(net.parameters()).step()
    finally:
        handle.remove()
    assert torch.equal(torch.rand(3), drawn[0])
    assert (random.random(), np.random.rand()) == drawn[1:]
    assert called == ["hook"]
    assert capsys.readouterr().out == ""
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in net.named_parameters())


def test_a_trial_of_a_usual_optimizer_is_cheap() -> None:
    tried(torch.optim.AdamW)
    start = time.process_time()
    tried(torch.optim.AdamW)
    assert time.process_time() - start < 0.4  # 0.1 s on an idle core
