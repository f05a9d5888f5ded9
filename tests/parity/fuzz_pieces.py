"""The parts that fuzzed models are made of: each takes [samples, WIDTH] and gives [samples, WIDTH].

`piece` draws one from the grammar

    piece := affine | normed | viewed | written in place | tied to another's weight | decided by its values
           | reads a Python value | counts its calls | appends to a list | moves a buffer
           | residual(piece) | branches(piece, piece) | gated(piece, piece) | checkpointed(piece)
           | repeated(piece) | chosen(piece, piece) | an earlier piece once more

so every model is a function of its seed alone.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, final

import torch
import torch.nn.functional as F
from guard_models import KINDS, WIDTH, Change, Switch, Use
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ENVIRONMENT = "OUTSIZE_FUZZED_SCALE"
ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (torch.tanh, F.relu, F.gelu, torch.sigmoid, F.silu)


def _set_environment(_: Switch) -> None:
    os.environ[ENVIRONMENT] = "0.5"


# The kinds have a fixed order, since every seed draws from them.
_KINDS = """
number, list, new list, longer list, tuple, dict, dict get, set, namespace, new namespace, dataclass, slots,
named tuple, thread local, property, numpy scalar, numpy array, function, partial, none, getattr, class,
global, global tensor, tensor in an object, closure, default
"""
READS: dict[str, tuple[Use, Change]] = {
    **{kind: KINDS[kind] for kind in " ".join(_KINDS.split()).split(", ")},
    "environment": (lambda s, x: x * float(os.environ.get(ENVIRONMENT, "1.0")), _set_environment),
}


class Affine(nn.Module):
    """A linear layer and an activation that is a plain function in an attribute."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), draw.choice(ACTIVATIONS)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


class Normed(nn.Module):
    """A normalisation between two linear layers; `batched` has statistics of the samples."""

    def __init__(self, draw: random.Random, *, batched: bool) -> None:
        super().__init__()
        norms: list[Callable[[], nn.Module]] = [lambda: nn.LayerNorm(WIDTH), lambda: nn.GroupNorm(2, WIDTH)]
        norms += [lambda: nn.BatchNorm1d(WIDTH)] * batched
        self.first, self.norm, self.second = (
            nn.Linear(WIDTH, WIDTH),
            draw.choice(norms)(),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu())


class Viewed(nn.Module):
    """Attention of two tokens, by views of one projection."""

    def __init__(self, _: random.Random) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(len(x), 2, -1).chunk(3, dim=2)
        return ((q @ k.transpose(1, 2)).softmax(-1) @ v).flatten(1)


class Table(nn.Module):
    """Adaptive scale and shift: a parameter plus a projection, whose backward may give both one storage."""

    def __init__(self, _: random.Random) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, WIDTH))
        self.project, self.linear = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shift, scale = (self.table[None] + self.project(x).reshape(len(x), 2, -1)).chunk(2, dim=1)
        return self.linear(x) * (1 + scale[:, 0].tanh()) + shift[:, 0]


class InPlace(nn.Module):
    """Writes into its own intermediate values."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.linear, self.bias, self.way = (
            nn.Linear(WIDTH, WIDTH),
            nn.Parameter(torch.zeros(2)),
            draw.randrange(4),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.way == 0:
            y += x
            return y.relu_()
        if self.way == 1:
            y = y.clone()
            y[:, :2] += self.bias
            return F.leaky_relu(y, 0.2, inplace=True)
        out = torch.zeros_like(y)
        if self.way == 2:
            out[:, :2] = y[:, 2:]
            out[:, 2:] += y[:, :2] * 2
            return out
        return out.index_add_(1, torch.tensor([1, 0, 3, 0]), y)


class Tied(nn.Module):
    """Uses the weight of another module's linear layer."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.scale = weight, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t()).tanh() * self.scale


class Decided(nn.Module):
    """Takes one of two ways by the values of its input."""

    def __init__(self, _: random.Random) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) if x.mean() > 0 else self.second(x).tanh()


class Reads(nn.Module):
    """Reads a Python value, which the loop may change."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.switch, self.use = nn.Linear(WIDTH, WIDTH), Switch(), READS[kind][0]

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.switch, self.linear(x))


class Counts(nn.Module):
    """Warms up: the result depends on how often it was called."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.linear, self.calls, self.state = nn.Linear(WIDTH, WIDTH), 0, SimpleNamespace(calls=0)
        self.inside = draw.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        if self.inside:
            self.state.calls += 1
        else:
            self.calls += 1
        return self.linear(x) * min(1.0, (self.calls + self.state.calls) / 4)


class Appends(nn.Module):
    """Notes its calls in a list, which nothing reads but the comparison at the end."""

    def __init__(self, _: random.Random) -> None:
        super().__init__()
        self.linear, self.notes = nn.Linear(WIDTH, WIDTH), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.notes.append(len(x))
        return self.linear(x).tanh()


class Moves(nn.Module):
    """Subtracts a running mean that each call moves."""

    def __init__(self, _: random.Random) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y - self.mean


class Residual(nn.Module):
    """x + inner(x)"""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Branches(nn.Module):
    """Two ways beside each other, joined."""

    def __init__(self, draw: random.Random, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right, self.join = left, right, nn.Linear(2 * WIDTH, WIDTH)
        self.way = draw.choice(["cat", "add", "maximum", "stack"])

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x), self.right(x)
        if self.way == "cat":
            return self.join(torch.cat([left, right], dim=1))
        if self.way == "add":
            return left + right
        return torch.maximum(left, right) if self.way == "maximum" else torch.stack([left, right]).mean(0)


class Gated(nn.Module):
    """One way opens and closes the other; the gate goes through a dict."""

    def __init__(self, gate: nn.Module, value: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"gate": gate, "value": value})

    def forward(self, x: Tensor) -> Tensor:
        results = {name: part(x) for name, part in self.parts.items()}
        return results["gate"].sigmoid() * results["value"]


class Checkpointed(nn.Module):
    """Computes its part again in the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


class Repeated(nn.Module):
    """Calls one part several times; how often is a number that the loop may change."""

    def __init__(self, draw: random.Random, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.times = inner, draw.randint(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.inner(x).tanh()
        return x


class Chosen(nn.Module):
    """Calls the part whose name stands in its settings."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.parts, self.settings = nn.ModuleDict({"first": first, "second": second}), {"part": "first"}

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[self.settings["part"]](x)


PLAIN: tuple[Callable[[random.Random], nn.Module], ...] = (Affine, Affine, Viewed, Table, InPlace)
STATEFUL: tuple[Callable[[random.Random], nn.Module], ...] = (Decided, Counts, Appends, Moves)


@final
class Grammar:
    """Draws pieces; `made` holds those that may be used once more."""

    def __init__(self, draw: random.Random, *, batched: bool) -> None:
        self.draw, self.batched = draw, batched
        self.made: list[nn.Module] = []

    def piece(self, depth: int = 2) -> nn.Module:
        chance = self.draw.random()
        if self.made and chance < 0.1:
            return self.draw.choice(self.made)
        piece = self._compound(depth) if depth and chance < 0.45 else self._simple()
        self.made.append(piece)
        return piece

    def _simple(self) -> nn.Module:
        chance, draw = self.draw.random(), self.draw
        if chance < 0.2:
            return Reads(draw.choice(list(READS)))
        if chance < 0.35:
            return draw.choice(STATEFUL)(draw)
        if chance < 0.5:
            return Normed(draw, batched=self.batched)
        linears = [m for p in self.made for m in p.modules() if isinstance(m, nn.Linear)]
        square = [m.weight for m in linears if m.weight.shape == (WIDTH, WIDTH)]
        return Tied(draw.choice(square)) if square and chance < 0.6 else draw.choice(PLAIN)(draw)

    def _compound(self, depth: int) -> nn.Module:
        draw = self.draw
        kind = draw.choice(["residual", "branches", "gated", "checkpointed", "repeated", "chosen"])
        inner = self.piece(depth - 1)
        if kind == "residual":
            return Residual(inner)
        if kind == "checkpointed":
            return Checkpointed(Affine(draw))
        if kind == "repeated":
            return Repeated(draw, inner)
        other = self.piece(depth - 1)
        if kind == "branches":
            return Branches(draw, inner, other)
        return Gated(inner, other) if kind == "gated" else Chosen(inner, other)
