"""Looks weights up by name at each call and copies them to one device where they are elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.program.tree import FIELD, Steps, accessor, part_at, paths


def weight_named(model: nn.Module, name: str) -> Tensor:
    """Returns a parameter, a buffer or a tensor in an attribute (`cfg.rates[0]`, `weight.scale`) by name.

    Callers look it up at each call, since it may have been replaced. Raises KeyError where there is none.
    """
    path, _, key = name.rpartition(".")
    with suppress(AttributeError):  # `cfg.rates[0]` has no module in front of its last point.
        owner = model.get_submodule(path)
        found = owner._parameters.get(key)
        found = owner._buffers.get(key) if found is None else found
        if found is not None:
            return found
    table, key, steps = attribute_place(dict(model.named_modules()), name)
    return part_at(table[key], steps)


def attribute_place(modules: Mapping[str, nn.Module], name: str) -> tuple[dict[str, Any], str, Steps]:
    """Returns the table of a module (its attributes, parameters or buffers), the key in it, and the steps
    from there that lead to a tensor of this name.

    Raises KeyError where there is none.
    """
    for fqn, module in modules.items():
        prefix = f"{fqn}." if fqn else ""
        if not name.startswith(prefix):
            continue
        for table in (module.__dict__, module._parameters, module._buffers):
            for key, value in table.items():
                if not name.startswith(prefix + key):
                    continue
                for steps in _steps_to_tensors(value):
                    if name == f"{prefix}{key}{accessor(steps)}":
                        return table, key, steps
    raise KeyError(name)


def _steps_to_tensors(value: Any) -> Iterator[Steps]:
    """Yields the steps to the tensors in a value, and in the attributes of a tensor."""
    for steps, tensor in paths(value, lambda leaf: isinstance(leaf, Tensor)):
        yield steps
        for name, held in vars(tensor).items():
            inner = paths(held, lambda leaf: isinstance(leaf, Tensor))
            yield from ((*steps, (FIELD, name), *further) for further, _ in inner)


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
