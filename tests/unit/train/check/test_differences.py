"""What counts as a difference between two runs."""

from __future__ import annotations

import math

import pytest
import torch

from outsize.train.check.compare import TrainingSnapshot, difference, relative_difference

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


def test_differences_are_relative_to_each_gradient_but_not_to_rounding() -> None:
    loss = torch.tensor(1.0)
    reference = TrainingSnapshot(
        loss, {"w": torch.tensor([4.0, -2.0]), "keys.bias": torch.tensor([1e-9, 0.0])}
    )
    rounded = TrainingSnapshot(loss, {"w": torch.tensor([4.0, -2.0]), "keys.bias": torch.tensor([2e-9, 0.0])})
    assert relative_difference(reference, rounded) == pytest.approx(1e-9 / 4e-3)
    wrong = TrainingSnapshot(loss, {"w": torch.tensor([4.0, -2.5]), "keys.bias": torch.tensor([1e-9, 0.0])})
    assert relative_difference(reference, wrong) == 0.125
    assert relative_difference(reference, TrainingSnapshot(torch.tensor(1.5), reference.grads)) == 0.5
    assert (
        relative_difference(reference, TrainingSnapshot(loss, {"w": torch.tensor([4.0, -2.0])})) == math.inf
    )
    assert (
        relative_difference(reference, TrainingSnapshot(loss, {**reference.grads, "more": loss})) == math.inf
    )
