"""Modules whose forward is a function, for tests that need many small ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

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
