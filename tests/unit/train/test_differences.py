"""What counts as a difference between two runs."""

from __future__ import annotations

import math

import pytest
import torch

from outsize.train.parity import difference

NAN = float("nan")


@pytest.mark.parametrize("values", [[1.0, 0.0], [NAN, 2.0]])
@pytest.mark.parametrize("sparse", [False, True])
def test_equal_bits_are_no_difference(values: list[float], sparse: bool) -> None:
    a, b = torch.tensor(values), torch.tensor(values)
    assert difference(*((a.to_sparse(), b.to_sparse()) if sparse else (a, b))) == 0.0


@pytest.mark.parametrize("sparse", [False, True])
def test_the_largest_difference_counts(sparse: bool) -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 0.0])
    assert difference(*((a.to_sparse(), b.to_sparse()) if sparse else (a, b))) == 2.0


def test_what_is_missing_or_of_another_form_is_infinitely_different() -> None:
    one = torch.ones(2)
    assert difference(one, None) == math.inf
    assert difference(one, torch.ones(3)) == math.inf
    assert difference(one, torch.ones(2, dtype=torch.float64)) == math.inf
    assert difference(one, torch.tensor([1.0, NAN])) == math.inf
