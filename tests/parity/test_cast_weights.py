"""Under autocast each weight is cast once per step, whatever the number of microbatches, with the plain loop's
bits: those of a loop in which each microbatch enters its own autocast region.
"""

from __future__ import annotations

import copy
from typing import Any, final

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import outsize

SIZE = 8


@final
class Casts(TorchDispatchMode):
    """Counts the casts of each of a model's weights, and of their copies' gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {p.untyped_storage().data_ptr(): n for n, p in model.named_parameters()}
        self.counts = dict.fromkeys(self._names.values(), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype is torch.bfloat16:
            name = self._names.get(args[0].untyped_storage().data_ptr())
            if name is not None:
                self.counts[name] += 1
        return out


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(SIZE, SIZE))


def batch(samples: int = 16) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(samples, SIZE, generator=draw), torch.randn(samples, SIZE, generator=draw)


def plain_step(model: nn.Module, x: Tensor, y: Tensor, microbatches: int, **how: Any) -> Tensor:
    """Gradient accumulation as a user writes it."""
    total = torch.zeros(())
    for a, b in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        with torch.autocast("cpu", torch.bfloat16, **how):
            loss = F.mse_loss(model(a), b)
        (loss / microbatches).backward()
        total += loss.detach() / microbatches
    return total


def engine_for(model: nn.Module, x: Tensor, y: Tensor, microbatches: int, **how: Any) -> outsize.Engine:
    given: dict[str, Any] = {"loss_fn": F.mse_loss, "target": y}
    plan = outsize.plan(model, (x,), cluster="2xcpu", **{"stages": 2, "microbatches": microbatches} | how, **given)
    return outsize.parallelize(model, (x,), plan=plan, **given)


def insist_on_equal(model: nn.Module, plain: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name


@pytest.mark.parametrize("microbatches", [4, 16])
def test_each_weight_is_cast_once_per_step(microbatches: int) -> None:
    model, (x, y) = network(), batch()
    plain, engine = copy.deepcopy(model), engine_for(model, x, y, microbatches)
    for _ in range(2):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), Casts(model) as casts:
            loss = engine.step(x, target=y, update=False).loss
    assert torch.equal(loss, plain_step(plain, x, y, microbatches))
    insist_on_equal(model, plain)
    assert casts.counts == {n: int(casts.counts[n] > 0) for n in casts.counts}
    assert sum(casts.counts.values()) == 10
