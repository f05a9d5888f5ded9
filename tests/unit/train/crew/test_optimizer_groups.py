"""Learning rates of optimizers as people have them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outsize.train.crew.optimizer_groups import learning_rate, learning_rates


@pytest.mark.parametrize(
    ("groups", "rates", "first"),
    [
        ([{"lr": 0.1}, {"lr": 1}], [0.1, 1.0], 0.1),
        ([{"lr": None}, {"lr": 0.5}], [None, 0.5], 0.5),
        ([{"lr": torch.tensor(0.25)}], [0.25], 0.25),
        ([{"weight_decay": 0.1}], [None], None),
        ([{"lr": math.nan}, {"lr": "auto"}, {"lr": True}, {"lr": torch.ones(2)}], [None] * 4, None),
        ([], [], None),
    ],
)
def test_rates(groups: list[dict[str, Any]], rates: list[float | None], first: float | None) -> None:
    optimizer = SimpleNamespace(param_groups=groups)
    assert learning_rates(optimizer) == rates
    assert learning_rate(optimizer) == first


def test_a_pair_of_optimizers_has_none() -> None:
    assert learning_rate(SimpleNamespace(parts=())) is None
    assert learning_rate(None) is None
