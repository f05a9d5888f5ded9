"""Weights that change inside of a backward: one microbatch is the plain loop, several are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import outsize
from outsize.errors import BadOption

Register = Callable[[nn.Module], None]


def through_the_weight(model: nn.Module) -> None:
    """GaLore layer by layer, torch's own tutorial."""
    for weight in model.parameters():
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step(_: Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        weight.register_post_accumulate_grad_hook(step)


def through_data(model: nn.Module) -> None:
    """Writes that no version counter sees."""
    for weight in model.parameters():

        def step(weight: Tensor) -> None:
            assert weight.grad is not None
            weight.data.add_(weight.grad, alpha=-0.1)
            weight.grad = None

        weight.register_post_accumulate_grad_hook(step)


def through_a_plain_hook(model: nn.Module) -> None:
    """LOMO: the hook has the gradient, and `grad` is never used."""
    for weight in model.parameters():

        def step(gradient: Tensor, weight: Any = weight) -> Tensor:
            weight.data.add_(gradient, alpha=-0.1)
            return torch.zeros_like(gradient)

        weight.register_hook(step)


def through_a_module(model: nn.Module) -> None:
    """A hook that is on no weight."""

    def step(module: nn.Module, *_: Any) -> None:
        module.weight.data.mul_(0.5)  # type: ignore[operator,union-attr]

    model[0].register_full_backward_hook(step)  # type: ignore[index]


WRITERS = [through_the_weight, through_data, through_a_plain_hook, through_a_module]


def model_of(register: Register) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    register(model)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=draw), torch.randint(3, (8,), generator=draw)


def engine_of(register: Register, stages: int, microbatches: int) -> outsize.Engine:
    x, y = batch(0)
    return outsize.parallelize(
        model_of(register),
        (x,),
        target=y,
        loss_fn=F.cross_entropy,
        stages=stages,
        microbatches=microbatches,
    )


@pytest.mark.parametrize("register", WRITERS)
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_several_microbatches_are_refused(register: Register, stages: int) -> None:
    engine = engine_of(register, stages, 2)
    x, y = batch(0)
    with pytest.raises(
        BadOption, match=r"a microbatch has changed \d\.(weight|bias).*weights of the stage"
    ) as raised:
        engine.step(x, target=y)
    assert "microbatches=1" in str(raised.value)


@pytest.mark.parametrize("register", [through_the_weight, through_data, through_a_plain_hook])
@pytest.mark.parametrize("stages", [2, 3])
def test_one_microbatch_is_the_plain_loop(register: Register, stages: int) -> None:
    model = model_of(register)
    engine = engine_of(register, stages, 1)
    for step in range(3):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        assert torch.equal(engine.step(x, target=y).loss, loss.detach())
    for mine, other in zip(model.parameters(), engine.weights.module.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_a_later_hook_is_seen_and_hooks_that_only_look_are_no_reason() -> None:
    seen: list[float] = []

    def looking(model: nn.Module) -> None:
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(lambda w: seen.append(float(w.grad.abs().max())))

    engine = engine_of(looking, 2, 2)
    for step in range(2):
        x, y = batch(step)
        engine.step(x, target=y)
        for weight in engine.weights.module.parameters():
            weight.grad = None
    assert len(seen) == 24
    through_data(engine.weights.module)
    with pytest.raises(BadOption, match="an optimizer steps inside of the backward"):
        engine.step(x, target=y)
