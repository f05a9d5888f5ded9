"""Containers whose class refuses changes, such as a frozen configuration, are restored all the same."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outsize
from outsize.program.objects import snapshot
from outsize.program.tree import map_leaves
from outsize.program.values.containers import refill


def _refuse(*_: Any, **__: Any) -> Any:
    raise TypeError("frozen")


class FrozenDict(dict[str, Any]):
    """Refuses all changes; a copy is made from its items."""

    __setitem__ = __delitem__ = update = pop = clear = setdefault = popitem = _refuse

    def __reduce__(self) -> Any:
        return type(self), (dict(self),)


class FrozenOrder(OrderedDict[str, Any]):
    """The same with an order of its own; each item is an attribute too."""

    def __init__(self, **items: Any) -> None:
        for name, value in items.items():
            OrderedDict.__setitem__(self, name, value)
            vars(self)[name] = value

    __setitem__ = __delitem__ = update = pop = clear = setdefault = popitem = _refuse

    def __reduce__(self) -> Any:
        return _frozen_order, (dict(self),)


def _frozen_order(items: dict[str, Any]) -> FrozenOrder:
    return FrozenOrder(**items)


class FrozenList(list[Any]):
    """Refuses all changes; a copy is made from its items."""

    __setitem__ = append = clear = extend = _refuse

    def __reduce__(self) -> Any:
        return type(self), (list(self),)


class Configured(nn.Module):
    """Reads its configuration in forward; `fails` is a forward that raises."""

    def __init__(self, config: Any, *, fails: bool = False) -> None:
        super().__init__()
        self.config, self.sizes, self.fails = config, FrozenList([4, 4]), fails
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).view(-1, *self.sizes[1:]) * self.config["scale"]
        if self.fails:
            raise ValueError("this forward fails")
        return self.second(x)


MAKE = [lambda: FrozenDict(scale=0.5, name="a"), lambda: FrozenOrder(scale=0.5, name="a")]


@pytest.mark.parametrize("make", MAKE)
def test_a_model_with_a_frozen_configuration_is_trained(make: Any) -> None:
    torch.manual_seed(0)
    model = Configured(make())
    verdict = outsize.check(
        model, (torch.randn(4, 4),), target=torch.randn(4, 4), loss_fn=nn.MSELoss(), stages=2, microbatches=2
    )
    assert verdict.bit_equal
    assert model.config == make()


@pytest.mark.parametrize("make", MAKE)
def test_a_capture_that_fails_restores_a_frozen_configuration(make: Any) -> None:
    model = Configured(make(), fails=True)
    with pytest.raises(outsize.OutsizeError, match="this forward fails"):
        outsize.capture(model, (torch.randn(4, 4),))
    assert model.config == make()
    assert list(model.config.items()) == list(make().items())
    assert vars(model.config) == vars(make())
    assert model.sizes == [4, 4]


@pytest.mark.parametrize("make", MAKE)
def test_what_was_changed_past_the_class_is_taken_back(make: Any) -> None:
    config = make()
    before = snapshot([config])
    refill(config, {"name": "b"})
    before.restore()
    assert list(config.items()) == [("scale", 0.5), ("name", "a")]


@pytest.mark.parametrize("make", MAKE[1:])
def test_leaves_of_a_frozen_dict_are_mapped(make: Any) -> None:
    doubled = map_leaves(lambda leaf: leaf * 2, make())
    assert type(doubled) is FrozenOrder
    assert doubled == {"scale": 1.0, "name": "aa"}
