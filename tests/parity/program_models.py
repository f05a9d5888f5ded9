"""A model whose forward becomes another program between two steps: other exits, another order of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from guard_models import WIDTH
from torch import Tensor, nn


class Layers(nn.Module):
    """Residual layers, a norm and a head that all exits share, and a frozen scale beside a buffer.

    The last weight and the first are one. `mode` says which program the forward is.
    """

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mode = "plain"
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)) for _ in range(4)
        )
        self.norm, self.head = Scaled(), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return FORWARDS[self.mode](self, self.embed(x))


class Scaled(nn.Module):
    """A norm with a frozen parameter and a buffer, which only its own stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.frozen + self.shift


def _exit(m: Any, h: Tensor) -> Tensor:
    return m.head(m.norm(h))


def _plain(m: Any, h: Tensor) -> Tensor:
    for layer in m.layers:
        h = h + layer(h)
    return _exit(m, h)


def _all_exits(m: Any, h: Tensor) -> Tensor:
    exits = []
    for layer in m.layers:
        h = h + layer(h)
        exits.append(_exit(m, h))
    return sum(exits) / len(exits)


def _first_exit_feeds_the_rest(m: Any, h: Tensor) -> Tensor:
    h = h + m.layers[0](h)
    h = h + torch.tanh(_exit(m, h))
    for layer in m.layers[1:]:
        h = h + layer(h)
    return _exit(m, h)


def _twice(m: Any, h: Tensor) -> Tensor:
    for layer in (*m.layers, *m.layers):
        h = h + layer(h)
    return _exit(m, h)


def _fewer(m: Any, h: Tensor) -> Tensor:
    for layer in (m.layers[0], m.layers[3]):
        h = h + layer(h)
    return _exit(m, h)


def _backwards(m: Any, h: Tensor) -> Tensor:
    for layer in reversed(m.layers):
        h = h + layer(h)
    return _exit(m, h)


FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": _plain,
    "all exits": _all_exits,
    "an exit that feeds the rest": _first_exit_feeds_the_rest,
    "layers twice": _twice,
    "fewer layers": _fewer,
    "layers backwards": _backwards,
}
OTHERS = tuple(mode for mode in FORWARDS if mode != "plain")


def changing(model: Layers, first: str, other: str) -> Callable[[int], None]:
    """Returns what sets the mode before each step: the second and the third run the other program."""
    return lambda step: setattr(model, "mode", other if step in (1, 2) else first)
