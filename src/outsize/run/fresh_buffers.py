"""Buffers that no file holds, on the meta device: made anew by the module's own initialiser.

    transformers   the nearest enclosing module's `_init_weights(module)` (rotary frequencies, position ids)
    torch, others  `module.reset_parameters()`

It must have written every such buffer, or the buffer would hold what happened to be in memory. Random ones
are seeded by the module's name, so they are the same in every layout. It runs before weights are loaded,
on parameters that are still on meta.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize.errors import BadWeights
from outsize.run.rng import borrowed_generators, seeder
from outsize.run.weights import places, replace


def make_buffers(model: nn.Module, others: set[str], device: torch.device) -> None:
    """Give values on `device` to each buffer on meta that is not one of `others`. Raises BadWeights."""
    parameters = {id(p) for p in model.parameters()}
    wanted = {
        name: tensor
        for table, key, name in places(model)
        if (tensor := table[key]) is not None and tensor.is_meta
        if name not in others and id(tensor) not in parameters
    }
    if not wanted:
        return
    fresh = {name: torch.empty_like(tensor, device=device) for name, tensor in wanted.items()}
    replace(model, {id(tensor): fresh[name] for name, tensor in wanted.items()})
    for fqn in dict.fromkeys(name.rpartition(".")[0] for name in fresh):
        with borrowed_generators():
            seeder(zlib.crc32(fqn.encode()), 0, 0)(0)
            _make(model, fqn, fresh)


def _make(model: nn.Module, fqn: str, fresh: dict[str, Tensor]) -> None:
    """Try the module's initialisers until one has written all its buffers."""
    left = [name for name in fresh if name.rpartition(".")[0] == fqn]
    failed = "it has neither an _init_weights around it nor a reset_parameters that writes the buffer"
    for initialise in _initialisers(model, fqn):
        try:
            initialise()
        except Exception as error:
            failed = f"its initialiser fails: {type(error).__name__}: {error}"
        left = [name for name in left if _is_untouched(model, name, fresh[name])]
        if not left:
            return
    raise BadWeights(
        f"buffer {left[0]} is on meta and no file holds it",
        numbers=f"in {type(model.get_submodule(fqn)).__name__}: {failed}",
        next_step="build parameters on meta only: accelerate.init_empty_weights(include_buffers=False)",
    )


def _initialisers(model: nn.Module, fqn: str) -> Iterator[Callable[[], Any]]:
    module, parts = model.get_submodule(fqn), fqn.split(".")
    around = [".".join(parts[:depth]) for depth in range(len(parts), -1, -1)]
    found = (getattr(model.get_submodule(name), "_init_weights", None) for name in around)
    nearest = next((function for function in found if callable(function)), None)
    if nearest is not None:
        yield partial(nearest, module)
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        yield reset
    if nearest is not None:  # Falcon-H1's is made when the turn is that of the model around the layers
        yield from (partial(nearest, model.get_submodule(name)) for name in around[1:])


def _is_untouched(model: nn.Module, name: str, made: Tensor) -> bool:
    now = model.get_buffer(name)
    return now.is_meta or (now is made and made._version == 0)
