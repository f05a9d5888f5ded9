"""Weights that few models have, over two ranks: trained, gathered, saved, gone on with as in one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("parity", "unit"))

from forked import on_ranks

import outsize
from outsize.train.engine.engine import Engine

pytestmark = pytest.mark.dist
X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 4


class ComplexWeights(nn.Module):
    """Has conjugated weights and buffers, whose memory is not changed yet, and sends such values on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(0.3 * torch.randn(8, 8, dtype=torch.complex128))
        self.second = nn.Parameter((0.3 * torch.randn(8, 8, dtype=torch.complex128)).conj())
        self.register_buffer("phase", torch.randn(8, dtype=torch.complex64).conj())
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = (torch.tanh(x.to(torch.complex128) @ self.first) * self.phase).conj()
        return self.last((hidden @ self.second).abs().float())


def complex_weights() -> nn.Module:
    return ComplexWeights()


def compiled() -> nn.Module:
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]
    return torch.compile(nn.Sequential(*layers), backend="eager")  # pyright: ignore


def engine_of(build: Callable[[], nn.Module], **options: Any) -> Engine:
    torch.manual_seed(0)
    given = {"target": Y, "loss_fn": F.cross_entropy, "microbatches": 4, "stages": 2, **options}
    return outsize.parallelize(build(), (X,), optimizer=torch.optim.SGD, **given)


def trained(build: Callable[[], nn.Module], root: Path | None) -> tuple[list[float], dict[str, Tensor]]:
    """Two steps before a checkpoint is saved, and two after."""
    engine = engine_of(build)
    losses = [float(engine.step(X, target=Y).loss) for _ in range(2)]
    if root is not None:
        engine.save(root)
    losses += [float(engine.step(X, target=Y).loss) for _ in range(2)]
    return losses, engine.weights.full_state_dict()


@pytest.mark.parametrize("build", [complex_weights, compiled])
def test_two_ranks_train_save_and_go_on_as_one_process(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    first, second = on_ranks(tmp_path, 2, lambda group: trained(build, tmp_path / "run"))
    losses, state = trained(build, None)
    assert first[0] == second[0] == losses
    assert second[1] == {}
    assert first[1].keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in first[1].items())
    again = engine_of(build, resume=tmp_path / "run", stages=1)
    assert [float(again.step(X, target=Y).loss) for _ in range(2)] == losses[2:]
