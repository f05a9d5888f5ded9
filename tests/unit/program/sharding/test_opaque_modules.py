"""A user's norm is tried on a small copy, once for all modules that are built the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from outsize.program.sharding import opaque_modules
from outsize.program.sharding.opaque_modules import works_by_vector

SHAPE = (2, 8, 16)


class Norm(nn.Module):
    """By the vector, or over the tokens where `over` says so."""

    def __init__(self, over: int) -> None:
        super().__init__()
        self.over = over
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.norm(dim=self.over, keepdim=True)


class Opaque(Norm):
    """Holds an object that nobody can compare."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.held = [1.0]


def test_modules_that_are_built_the_same_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[nn.Module] = []
    plain = opaque_modules._works_by_vector

    def counted(module: nn.Module, sizes: Sequence[int], dim: int) -> bool:
        tried.append(module)
        return plain(module, sizes, dim)

    monkeypatch.setattr(opaque_modules, "_works_by_vector", counted)
    monkeypatch.setattr(opaque_modules, "_KNOWN", {})
    assert [works_by_vector(Norm(-1), shape, 1) for shape in (SHAPE, (4, 32, 16))] == [True, True]
    assert len(tried) == 1
    assert not works_by_vector(Norm(1), SHAPE, 1), "another attribute, another answer"
    assert [works_by_vector(Opaque(), SHAPE, 1) for _ in range(2)] == [True, True]
    assert len(tried) == 4
    hooked = Norm(-1)
    hooked.register_forward_hook(lambda _module, _args, out: out.sum(1, keepdim=True).expand(out.shape))
    assert not works_by_vector(hooked, SHAPE, 1)
