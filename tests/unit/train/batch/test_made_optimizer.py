"""The optimizer of a rank, which owns some of the model's weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from outsize.errors import BadOption
from outsize.train.batch.checks import made_optimizer


def by_form(parameters: Any) -> Any:
    """Returns two optimizers, as scripts build them around Muon: torch refuses the one without a weight."""
    weights = list(parameters)
    matrices = torch.optim.SGD([p for p in weights if p.ndim == 2], lr=0.1)
    matrices.others = torch.optim.AdamW([p for p in weights if p.ndim != 2], lr=0.1)  # pyright: ignore
    return matrices


def test_a_group_that_is_empty_on_a_rank_has_stand_ins() -> None:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    made: Any = made_optimizer(by_form, [vector], [matrix, vector])
    assert [p.shape for p in made.param_groups[0]["params"]] == [(0, 0)]
    assert [p is vector for p in made.others.param_groups[0]["params"]] == [True]
    vector.grad = torch.ones(2)
    made.step()
    made.others.step()
    assert float(vector.detach().max()) < 1


def test_in_one_process_torchs_own_error_stays() -> None:
    vector = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="empty parameter list"):
        made_optimizer(by_form, [vector], [vector])


def test_weights_of_another_model_are_refused() -> None:
    own, foreign = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    with pytest.raises(BadOption, match="no weight of the optimizer is one of the model's"):
        made_optimizer(lambda _: torch.optim.SGD([foreign], lr=0.1), [own], [own])
    both = made_optimizer(lambda own: torch.optim.SGD([*own, foreign], lr=0.1), [own], [own])
    assert len(both.param_groups[0]["params"]) == 2
