"""A weight of another rank: what needs no values works, and what does raises."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outsize.errors import BadOption
from outsize.run.weights.freed import FreedParameter, freed


@pytest.fixture
def elsewhere() -> nn.Linear:
    """A layer whose weights are on another rank."""
    layer = nn.Linear(3, 3)
    for name, weight in list(layer.named_parameters()):
        setattr(layer, name, freed(weight, name, "rank 1", torch.device("cpu")))
    return layer


def test_a_model_that_is_moved_to_where_it_is_stays(elsewhere: nn.Linear) -> None:
    weight = elsewhere.weight
    assert elsewhere.to("cpu").to(torch.device("cpu")).to(torch.float32).weight is weight
    assert type(weight) is FreedParameter


@pytest.mark.parametrize("place", [torch.float16, "meta"])
def test_one_that_becomes_another_is_refused(place: torch.dtype | str, elsewhere: nn.Linear) -> None:
    with pytest.raises(BadOption, match="weight is a weight of rank 1"):
        elsewhere.to(place)
