"""What comes out of a leaf, and what goes in and changes afterwards."""

from __future__ import annotations

from typing import Any

import torch
from small_models import batch, linear, two
from splits import captured, check_every_cut
from torch import Tensor, nn


class Scale(nn.Module):
    """Decides on its input, has no trained weight, and only one of its results has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = nn.Buffer(torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.largest == 0:
            self.largest += x.detach().abs().max()
        return x / self.largest, x.detach().mean()


def test_a_result_of_an_opaque_leaf_requires_grad_as_the_real_one_does() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y, mean = m.scale(m.a(x))
        return m.b(y) * mean

    found = check_every_cut(two(run, scale=Scale()), batch())
    (leaf,) = [i for i in found.tape.instructions if i.target == "scale"]
    assert [found.tape.metas[slot].requires_grad for slot in leaf.defines()] == [True, False]


class Memory:
    """An object that a forward fills, as a cache of keys."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class Shifted(nn.Embedding):
    """A layer that looks into the memory."""

    def forward(self, input: Tensor, memory: Memory | None = None) -> Tensor:
        return super().forward(input) * (1 if memory is None or not memory.kept else 100)


class Remembering(nn.Module):
    """Fills the memory after a leaf has looked into it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.a, self.b = Shifted(7, 4), linear(), linear()

    def forward(self, ids: Tensor) -> Tensor:
        memory = Memory()
        y = self.a(self.embedding(ids, memory))
        memory.kept.append(y)
        return self.b(y) + memory.kept[0]


def test_an_object_that_is_filled_after_a_leaf_saw_it_is_not_given_to_the_leaf() -> None:
    ids = torch.arange(8).reshape(4, 2) % 7
    found = check_every_cut(Remembering(), ids)
    assert [u.name for u in found.graph.units][1] == "a"


class Converting(nn.Module):
    """Converts a layer in its forward to what it is already, as the routers of some experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), nn.Sequential(linear(), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        self.b = self.b.to(torch.float32)
        return self.b(self.a.float()(x))


def test_a_conversion_of_a_module_that_changes_nothing_is_nothing() -> None:
    check_every_cut(Converting(), batch())
    names = [u.name for u in captured(Converting(), batch()).graph.units]
    assert names == ["a", "b.0", "b.1", "sum"]
