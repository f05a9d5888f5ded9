"""What a leaf does beside its arguments: weights of other modules it uses, random numbers it draws unseen."""

from __future__ import annotations

import random
from typing import final

import pytest
import torch
import torch.nn.functional as F
from small_models import batch, linear, two
from splits import check_every_cut, named
from torch import Tensor, nn


@final
class _Decoder(nn.Module):
    """As Perceiver's: it is handed the embedding module whose weight it shares, and has a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor, embedding: nn.Linear) -> Tensor:
        return x @ embedding.weight.t() + self.bias


def test_a_module_that_is_an_argument_shares_its_weights() -> None:
    model = two(lambda m, x: m.decoder(m.b(m.a(x)), m.a), decoder=_Decoder())
    found = check_every_cut(model, batch(), microbatches=4)
    assert "a.weight" in named(found, "decoder").parameters()


@final
class _TwoGenerators(nn.Module):
    """Draws from torch's generator and from Python's, as Wav2Vec2 with dropout and SpecAugment does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.inner(x), 0.5) * random.random()


def test_a_leaf_that_draws_from_both_generators_is_no_draw_of_the_model() -> None:
    model = two(lambda m, x: m.b(m.both(m.a(x))), both=_TwoGenerators())
    found = check_every_cut(model, batch(), steps=2, outputs=False)
    assert named(found, "both").random


@final
class _DecidesThenDraws(nn.Module):
    """The decision stops the fake run before the dropout is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return F.dropout(x, 0.5) if bool(x.abs().sum() >= 0) else x


def test_a_leaf_that_decides_and_then_draws() -> None:
    model = two(lambda m, x: m.b(m.late(m.a(x))), late=_DecidesThenDraws())
    found = check_every_cut(model, batch(), steps=2, outputs=False)
    assert named(found, "late").random


@final
class _Stateful(nn.Module):
    """Adds what it saw last, as a recurrent cell does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        x = x if self.last is None else x + self.last
        self.last = x.detach()
        return x


@final
class _Gate(nn.Module):
    """The same in a module that is a leaf anyway, since it holds a parameter and no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight if self.last is None else x * self.weight + self.last
        self.last = x.detach()
        return x


@final
class _Resets(nn.Module):
    """Sets back the state of its child in its own forward, as RecurrentGemma's block does."""

    def __init__(self, cell: _Stateful | _Gate) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        self.cell.last = None
        return self.cell(x)


@pytest.mark.parametrize("kind", [_Stateful, _Gate])
def test_who_sets_back_the_state_of_a_leaf_is_one_leaf_with_it(kind: type[_Stateful | _Gate]) -> None:
    model = two(lambda m, x: m.b(m.block(m.a(x))), block=_Resets(kind()))
    found = check_every_cut(model, batch(), steps=2, outputs=False)
    assert named(found, "block").is_leaf
    assert "sets the state that block.cell keeps" in " ".join(found.tape.opaque)


def test_state_that_nobody_sets_back_stays_with_its_leaf() -> None:
    model = two(lambda m, x: m.b(m.block(m.a(x))), block=nn.Sequential(_Stateful()))
    found = check_every_cut(model, batch(), steps=2, outputs=False)
    assert named(found, "block.0").is_leaf
