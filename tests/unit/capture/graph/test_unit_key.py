"""Unit keys: equal work has equal keys, and each thing that changes the work changes the key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from splits import captured
from torch import Tensor, nn

from outsize.capture.graph.unit_key import module_text, unit_keys


def keys(model: nn.Module, x: Tensor | None = None) -> tuple[str, ...]:
    x = torch.zeros(2, 4) if x is None else x
    return unit_keys(captured(model, x), model)


def pair(**options: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, **options), nn.Linear(4, 4), nn.Linear(4, 4))


def test_names_and_values_do_not_matter_but_the_input_s_gradient_does() -> None:
    first, second, third, *_ = keys(pair())
    assert second == third != first
    other = nn.Sequential()
    for name, layer in zip("wxyz", pair(), strict=True):
        other.add_module(name, layer)
    assert keys(other) == keys(pair())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.__setitem__(1, nn.Linear(4, 4, bias=False)),
        lambda m: m.__setitem__(1, nn.LayerNorm(4)),
        lambda m: m[1].requires_grad_(False),
        lambda m: m.double(),
        lambda m: m.__setitem__(1, Scaled(2.0)),
    ],
)
def test_what_changes_the_work_changes_the_key(change: Callable[[nn.Module], object]) -> None:
    model = pair()
    before = keys(model)
    change(model)
    x = torch.zeros(2, 4, dtype=model[0].weight.dtype)
    assert keys(model, x)[1] != before[1]


def test_the_shape_of_the_input_is_part_of_it() -> None:
    assert not set(keys(pair())[:3]) & set(keys(pair(), torch.zeros(3, 4)))


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.factor


class Shifted(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * self.factor


def test_configuration_code_and_mode_of_a_module_of_the_user_s() -> None:
    texts = {module_text(m) for m in (Scaled(1.0), Scaled(2.0), Shifted(1.0), Scaled(1.0).eval())}
    assert len(texts) == 4
    assert module_text(Scaled(1.0)) == module_text(Scaled(1.0))


def test_a_scripted_module_has_its_own_code() -> None:
    scripts = [torch.jit.script(m) for m in (Scaled(1.0), Scaled(1.0), Shifted(1.0))]
    same, again, other = map(module_text, scripts)
    assert same == again != other


def test_an_edited_forward_is_another_one() -> None:
    def model_of(source: str) -> type[nn.Module]:
        names: dict[str, type[nn.Module]] = {}
        exec(f"from torch import nn\nclass M(nn.Module):\n    def forward(self, x): return {source}", names)
        return names["M"]

    before, same, edited = (module_text(model_of(s)()) for s in ("x * 2", "x * 2", "x * 3"))
    assert before == same != edited


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0] * 2


class Clipped(Doubled):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0].clamp(-1, 1)


class Applying(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def test_autograd_functions_with_other_code_are_other_work() -> None:
    doubled, again, clipped = (keys(Applying(f)) for f in (Doubled.apply, Doubled.apply, Clipped.apply))
    assert doubled == again != clipped
