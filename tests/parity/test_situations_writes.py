"""Weights that the forward itself or the user writes past autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from situations import BARE, Note, Trainer, insist_on_parity, train
from situations_models import WIDTH, TiedEnds, on_features, on_tokens
from torch import Tensor, nn
from zoo import Case
from zoo_case import CLASSES

from outsize.train.batch.batch import Batch


class Layered(nn.Module):
    """Layers with a running mean in front of the last, where the last stage is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("mean", torch.ones(WIDTH))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        self.update(x)
        return self.head(x * self.mean)

    def update(self, x: Tensor) -> None:
        """Nothing."""


class ByDataCopy(Layered):
    def update(self, x: Tensor) -> None:
        self.mean.data.copy_(self.mean * 0.9 + 0.1 * x.detach().mean(0))


class ByDataAssignment(Layered):
    def update(self, x: Tensor) -> None:
        self.mean.data = self.mean * 0.9 + 0.1 * x.detach().mean(0)


class ByView(Layered):
    def update(self, x: Tensor) -> None:
        with torch.no_grad():
            self.mean[: WIDTH // 2].mul_(0.9)


class ByName(Layered):
    def update(self, x: Tensor) -> None:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)


class ClampedData(Layered):
    def update(self, x: Tensor) -> None:
        self.head.weight.data.clamp_(-0.2, 0.2)


class ClampedWeight(Layered):
    def update(self, x: Tensor) -> None:
        with torch.no_grad():
            self.head.weight.clamp_(-0.2, 0.2)


KINDS = (ByDataCopy, ByDataAssignment, ByView, ByName, ClampedData, ClampedWeight)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_the_forward_writes_through_data_or_a_view_is_written(kind: type[Layered]) -> None:
    insist_on_parity(BARE, on_features(kind.__name__, kind))


def assigning(trainer: Trainer, batches: Sequence[Batch], note: Note) -> None:
    """Other parameters take the places of the old ones, and a new optimizer holds them."""
    for batch in batches:
        train(trainer, [batch], note)
        model = trainer.model
        found = {n: nn.Parameter(p.detach() * 0.9) for n, p in model.named_parameters(remove_duplicate=False)}
        found = {n: found[_first(model, n)] for n in found}
        model.load_state_dict(found, strict=False, assign=True)
        trainer.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def _first(model: nn.Module, name: str) -> str:
    wanted = model.get_parameter(name)
    return next(n for n, p in model.named_parameters() if p is wanted)


@pytest.mark.parametrize("known", [on_tokens("tied_ends", TiedEnds), on_features("layered", Layered)])
@pytest.mark.parametrize("stages", [2, 3])
def test_parameters_that_were_replaced_between_steps_are_used(known: Case, stages: int) -> None:
    insist_on_parity(replace(BARE, loop=assigning, stages=stages), known)
