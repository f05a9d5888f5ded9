"""Small models written for the situations, and what users do to a model before they train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import Case, case
from zoo_case import CLASSES, VOCABULARY, classes, cross_entropy, features, tokens

WIDTH = 12


def named(*names: str) -> tuple[Case, ...]:
    """Cases of the zoo."""
    return tuple(case(name) for name in names)


def on_features(name: str, make: Callable[[], nn.Module]) -> Case:
    """A classifier of 12 features."""
    return Case(name, make, lambda n: ((features(n, WIDTH),), {}), cross_entropy, classes)


def on_tokens(name: str, make: Callable[[], nn.Module]) -> Case:
    """A next-token model of ids [n, 16]; the loss is over all positions."""
    return Case(name, make, lambda n: ((tokens(n),), {}), token_loss, lambda n: tokens(n, seed=9))


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


# -- tied and shared -------------------------------------------------------------------------------


@final
class TiedEnds(nn.Module):
    """A language model whose embedding, middle and head are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.embedding(ids)).tanh()
        x = x + self.head(x).softmax(-1) @ self.embedding.weight
        return self.head(self.second(x).tanh())


@final
class Looped(nn.Module):
    """One block called five times, with BatchNorm in it (its buffers are written five times a forward)."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.block = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(5):
            x = x + self.block(self.norm(x)).relu()
        return self.head(x)


SHARING = (
    on_tokens("tied_ends", TiedEnds),
    on_features("looped", Looped),
    on_features("looped_layernorm", lambda: Looped(norm=False)),
)


# -- what users put into a model -------------------------------------------------------------------


@final
class LoraLinear(nn.Module):
    """`base(x) + scale * dropout(x) A^T B^T`, the base frozen (arXiv:2106.09685)."""

    def __init__(self, base: nn.Module, rank: int = 2, drop: float = 0.1) -> None:
        super().__init__()
        wide, out = sizes(base)
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, wide) / wide)
        self.b = nn.Parameter(torch.zeros(out, rank))
        self.dropout, self.scale, self.enabled = nn.Dropout(drop), 2.0, True

    @property
    def weight(self) -> Tensor:
        """Libraries look at `linear.weight.dtype`."""
        return self.base.weight  # pyright: ignore[reportReturnType]

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        if not self.enabled:
            return out
        return out + self.scale * F.linear(F.linear(self.dropout(x), self.a), self.b)


@final
class Gated(nn.Module):
    """A Linear with a second one beside it, used while `on` is set."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.extra, self.on = base, nn.Linear(*sizes(base)), True

    @property
    def weight(self) -> Tensor:
        """Libraries look at `linear.weight.dtype`."""
        return self.base.weight  # pyright: ignore[reportReturnType]

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.1 * self.extra(x) if self.on else self.base(x)


def sizes(linear: Any) -> tuple[int, int]:
    """(in, out) of a Linear, or of transformers' Conv1D."""
    if isinstance(linear, nn.Linear):
        return linear.in_features, linear.out_features
    return linear.nx, linear.nf


def linears(model: nn.Module) -> list[str]:
    """Names of the Linears and Conv1Ds whose weight is no embedding's."""
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return [
        name
        for name, m in model.named_modules()
        if type(m).__name__ in ("Linear", "Conv1D") and id(m.weight) not in tied
    ]


def with_replaced(model: nn.Module, names: list[str], make: Callable[[Any], nn.Module]) -> nn.Module:
    """`model.name = make(model.name)` for each name."""
    for name in names:
        model.set_submodule(name, make(model.get_submodule(name)))
    return model
