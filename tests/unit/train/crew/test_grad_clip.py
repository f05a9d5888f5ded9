from __future__ import annotations

from collections.abc import Callable
from typing import final

import pytest
import torch
from parity_runs import fresh
from torch import Tensor, nn
from zoo_case import causal_batch

from outsize.train.crew.crew import LocalCrew
from outsize.train.crew.grad_clip import clip_by_global_norm


@final
class Recording:
    """What a second rank would see: sums that arrive from the first."""

    gradient_device = torch.device("cpu")

    def __init__(self, first: list[Tensor]) -> None:
        self.first = first

    def sum(self, value: Tensor) -> Tensor:
        return value + self.first.pop(0)


@final
class Listening:
    """The first rank's contributions, kept."""

    gradient_device = torch.device("cpu")

    def __init__(self) -> None:
        self.said: list[Tensor] = []

    def sum(self, value: Tensor) -> Tensor:
        self.said.append(value.clone())
        return value


def trained() -> nn.Module:
    model = fresh("gpt2")
    model(**causal_batch(4)[1]).loss.backward()
    return model


def mixed() -> nn.Module:
    """Layers of three dtypes with gradients."""
    torch.manual_seed(0)
    kinds = (torch.float64, torch.float32, torch.bfloat16)
    model = nn.ModuleList(nn.Linear(7, 5).to(dtype) for dtype in kinds)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def double() -> nn.Module:
    return mixed()[0]  # type: ignore[index]


def over_two_ranks(model: nn.Module, max_norm: float) -> tuple[Tensor, dict[str, nn.Parameter]]:
    """The norm on the second rank, and its clipped parameters."""
    everything = dict(model.named_parameters())
    half = len(everything) // 2
    ranks = [dict(list(everything.items())[:half]), dict(list(everything.items())[half:])]
    listening = Listening()
    clip_by_global_norm(ranks[0], everything, float("inf"), listening)  # type: ignore[arg-type]
    hearing = Recording(listening.said)
    return clip_by_global_norm(ranks[1], everything, max_norm, hearing), ranks[1]  # type: ignore[arg-type]


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
@pytest.mark.parametrize("make", [trained, mixed, double])
def test_two_ranks_get_the_norm_of_one_process_to_the_bit(
    make: Callable[[], nn.Module], max_norm: float
) -> None:
    plain = make()
    norm, clipped = over_two_ranks(make(), max_norm)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
    assert norm.dtype == expected.dtype
    assert torch.equal(norm, expected)
    parameters = dict(plain.named_parameters())
    assert all(torch.equal(p.grad, parameters[n].grad) for n, p in clipped.items())  # type: ignore[arg-type]


def test_parameters_without_gradients_do_not_count() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.grad = torch.full((2, 2), 2.0)
    crew, everything = LocalCrew.__new__(LocalCrew), dict(layer.named_parameters())
    assert float(clip_by_global_norm(everything, everything, 1.0, crew)) == 4.0
    assert layer.bias.grad is None
    torch.testing.assert_close(layer.weight.grad, torch.full((2, 2), 0.5))


def test_no_gradients_at_all_have_norm_zero() -> None:
    everything = dict(nn.Linear(2, 2).named_parameters())
    assert float(clip_by_global_norm(everything, everything, 1.0, LocalCrew.__new__(LocalCrew))) == 0.0


@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_gradients_of_a_norm_that_is_small_enough_are_not_touched(max_norm: float) -> None:
    """A pass over all gradients that multiplies with 1 takes a hundredth of a step."""
    crew, alone = LocalCrew.__new__(LocalCrew), dict(trained().named_parameters())
    before = {name: _writes(parameter) for name, parameter in alone.items()}
    clip_by_global_norm(alone, alone, max_norm, crew)
    scales = max_norm < 1
    assert all((_writes(parameter) > before[name]) == scales for name, parameter in alone.items())
    fresh_one = trained()
    counts = [_writes(parameter) for parameter in fresh_one.parameters()]
    _, clipped = over_two_ranks(fresh_one, max_norm)
    known = dict(zip(dict(fresh_one.named_parameters()), counts, strict=True))
    assert all((_writes(parameter) > known[name]) == scales for name, parameter in clipped.items())


def _writes(parameter: nn.Parameter) -> int:
    assert parameter.grad is not None
    return parameter.grad._version
