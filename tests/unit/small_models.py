"""Modules whose forward is a function, for tests that need many small ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

Forward = Callable[..., Any]


@final
class Written(nn.Module):
    """Layers under names, and a forward as a function of (self, *inputs)."""

    def __init__(self, run: Forward, **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def two(run: Forward, **parts: Any) -> Written:
    torch.manual_seed(0)
    return Written(run, a=linear(), b=linear(), **parts)


def batch() -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


class Sum(nn.Module):
    """Adds what an adapter computes to a weight."""

    def __init__(self, added: Tensor) -> None:
        super().__init__()
        self.added = added

    def forward(self, weight: Tensor) -> Tensor:
        """The sum."""
        return weight + self.added


class Wrapped(nn.Module):
    """Puts another weight into a layer during its own call, as peft does for adapters of experts."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.factor = base, nn.Parameter(torch.ones(base.weight.shape[0], 1))

    def forward(self, x: Tensor) -> Tensor:
        """The layer with the sum of both."""
        register_parametrization(self.base_layer, "weight", Sum(self.factor * 2))
        tables: Any = self.base_layer.parametrizations
        tables["weight"].original.requires_grad_(True)
        try:
            with parametrize.cached():
                return self.base_layer(x)
        finally:
            remove_parametrizations(self.base_layer, "weight", leave_parametrized=False)
