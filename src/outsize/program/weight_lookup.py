"""Looks weights up by name at each call and copies them to one device where they are elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import final

import torch
from torch import Tensor, nn


def weight_named(model: nn.Module, name: str) -> Tensor:
    """Returns a parameter or buffer by name; callers look it up at each call, since it may have been
    replaced.
    """
    path, _, key = name.rpartition(".")
    owner = model.get_submodule(path)
    parameter = owner._parameters.get(key)
    return owner.get_buffer(key) if parameter is None else parameter


@final
class CopiedWeights(Mapping[str, Tensor]):
    """Maps names to weights on `device` as they are now (None: where they are).

    A change through `.data` is not detected.
    """

    def __init__(self, model: nn.Module, names: Iterable[str], device: torch.device | None) -> None:
        self._model, self._names, self._device = model, tuple(names), device
        self._copies: dict[str, tuple[Tensor, int, Tensor]] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        weight = weight_named(self._model, name)
        if self._device is None or weight.device == self._device:
            return weight
        known = self._copies.get(name)
        if known is None or known[0] is not weight or known[1] != weight._version:
            known = self._copies[name] = (weight, weight._version, weight.detach().to(self._device))
        return known[2]
