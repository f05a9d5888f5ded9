"""Calls that cannot be given the copy of a weight: autocast casts it once per step, with the loop's bits."""

from __future__ import annotations

import copy
from typing import Any, final

import pytest
import torch
import torch.nn.functional as F
from cast_counts import Casts
from test_cast_weights import (
    MODELS,
    SIZE,
    Asking,
    Plain,
    autocast,
    batch,
    behind,
    engine_for,
    insist_on_equal,
    insist_on_parity,
    made,
    plain_step,
)
from torch import Tensor, nn
from torch_first import by_torch

from outsize.run.stage import kept_casts


@final
class ByValues(nn.Module):
    """A leaf that decides on its values, and reads its weight in float32 twice and as a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x * self.weight.sum(0), self.weight) * self.weight.mean(1)
        return x if float(x.detach().sum()) < 1e6 else x + 1


@final
class Recurrent(nn.Module):
    """An LSTM has its weights in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(SIZE, SIZE, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.unsqueeze(1))[0].squeeze(1)


@final
class Writing(nn.Module):
    """Bounds its weight through `.data`, which changes neither the version nor the address."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.9)
        x = F.linear(x, self.weight)
        return x if float(x.detach().sum()) < 1e6 else x + 1


@final
class InPython(nn.Module):
    """Decides on its activations in its own forward, so it runs by modules."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.again = Plain(), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        h = self.again(self.body(x))
        if h.sum() < 1e6:
            h = self.again(F.gelu(h))
        return h


def once(counts: dict[str, int]) -> set[int]:
    return {count for name, count in counts.items() if "norms" not in name}


@pytest.mark.parametrize("microbatches", [4, 16])
@pytest.mark.parametrize("leaf", [Asking, ByValues, Recurrent])
@pytest.mark.sample("Asking-16", "ByValues-16")
def test_a_leaf_that_is_given_no_copy(
    monkeypatch: pytest.MonkeyPatch, leaf: type[nn.Module], microbatches: int
) -> None:
    monkeypatch.setitem(MODELS, "leaf", lambda: behind(leaf))
    assert once(insist_on_parity("leaf", microbatches)) == {1}


def test_without_their_rank_among_nodes_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_casts, "YOUNG", 0)
    monkeypatch.setitem(MODELS, "leaf", lambda: behind(ByValues))
    with pytest.raises(AssertionError):
        insist_on_parity("leaf")


def by_modules(microbatches: int) -> dict[str, int]:
    """Three steps of a model that runs by modules in one process; returns the casts of the last."""
    torch.manual_seed(0)
    model, (x, y) = InPython(), batch()
    plain = copy.deepcopy(model)
    expected = by_torch(lambda: plain_step(plain, x, y, microbatches))
    engine = engine_for(model, x, y, microbatches)
    assert engine.plan.form == "modules"
    casts = Casts(dict(model.named_parameters()))
    for _ in range(3):
        model.zero_grad()
        with autocast(), casts:
            casts.clear()
            assert torch.equal(engine.step(x, target=y, update=False).loss, expected)
    insist_on_equal(model, plain)
    return casts.counts


@pytest.mark.parametrize("microbatches", [4, 16])
def test_models_that_run_by_modules(microbatches: int) -> None:
    assert once(by_modules(microbatches)) == {1}


def test_a_weight_that_the_forward_writes_is_cast_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "leaf", lambda: behind(Writing))
    model, (x, y) = made("leaf"), batch()
    by_torch(lambda: plain_step(copy.deepcopy(model), x, y, 4))
    plain, engine = copy.deepcopy(model), engine_for(model, x, y, 4)
    written: Any = plain.get_submodule("1")
    for _ in range(3):
        written.weight.data.copy_(model.get_parameter("1.weight"))
        model.zero_grad()
        plain.zero_grad()
        with autocast():
            loss = engine.step(x, target=y, update=False).loss
        assert torch.equal(loss, plain_step(plain, x, y, 4))
        insist_on_equal(model, plain)
