"""Shapes that follow from values of the inputs, and modules that keep state and decide by inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.errors import NotCapturable


class Split(nn.Module):
    """Parts an activation by sizes of the input, and writes into another, which is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        x = self.first(x)
        left = x.narrow(1, 0, sizes[0, 0])
        left *= 2
        right = x.split([sizes[0, 0], sizes[0, 1]], dim=1)[1]
        grid = right.reshape(len(x), sizes[0, 1] // 2, -1)
        return self.second(x) + grid.sum((1, 2))[:, None] + left.mean()


class Scale(nn.Module):
    """Makes a tensor of numbers that are tensors, of activations too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) * torch.tensor([x.mean(), sizes[0, 1], 1.0, x.max()])


class Remembering(nn.Module):
    """A submodule that stores a tensor for later calls, and asks its input for a number."""

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.linear, self.reads, self.last = nn.Linear(4, 4), reads, None
        self.last: Any

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        if self.reads and self.last is not None:
            x = x + self.last.float().mean()
        self.last = sizes.max() + 1
        return self.linear(x) * int(sizes[0, 0])


class Parent(nn.Module):
    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.inner, self.head = Remembering(reads=reads), nn.Linear(4, 4)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        return self.head(self.inner(x, sizes))


def check(model: nn.Module) -> Any:
    x, sizes = torch.randn(6, 4), torch.tensor([[2, 2]]).expand(6, 2).contiguous()
    return outsize.check(
        model, (x, sizes), target=torch.randn(6, 4), loss_fn=nn.MSELoss(), stages=2, microbatches=2
    )


@pytest.mark.parametrize("make", [Split, Scale, Parent])
def test_the_numbers_are_the_plain_loops(make: Any) -> None:
    torch.manual_seed(0)
    assert check(make()).bit_equal


def test_state_that_matters_is_not_dropped() -> None:
    torch.manual_seed(0)
    try:
        verdict = check(Parent(reads=True))
    except NotCapturable:
        return
    assert verdict.bit_equal
