"""Frees or moves weights, so that a rank holds only those that its own stages use.

A weight that no stage uses (a head that the loss does not see) stays on every rank: freeing it would save
little and break `evaluate`. Tied names continue to refer to one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outsize.device.accelerators import is_accelerator
from outsize.program.tree import map_leaves
from outsize.program.values.wrapper_tensors import is_wrapper
from outsize.program.weights.beside import beside_weights, freed_beside
from outsize.run.stage.cut import Cut
from outsize.run.weights.freed import FreedWeight, empty_for_others, freed, still_freed

_HELD = ("_parameters", "_buffers", "_modules")
Place = tuple[dict[str, Any], str, str]


def first_stages(cut: Cut, model: nn.Module) -> dict[str, int]:
    """Maps each parameter and buffer to the first stage that uses it, or to stage 0 where none does.

    Tied tensors are listed under their first name. A buffer that the forward writes belongs to one stage.
    """
    first: dict[str, int] = {}
    for program in cut.programs:
        for name in program.weights:
            first.setdefault(name, program.stage)
    return {name: first.get(name, 0) for _, _, name in places(model)}


def free_foreign(model: nn.Module, foreign: Mapping[str, str], home: torch.device) -> None:
    """Replaces these weights, and what is beside them, by stand-ins without values; who else holds one that
    is trained has no values of it either.

    `foreign` maps names of weights to who has them; `home` is the device of this rank.
    """
    for found in freed_beside(model):
        if found.owner in foreign and not isinstance(found.tensor, FreedWeight):
            found.put(freed(found.tensor, f"{found.owner} ({found.key})", foreign[found.owner], home))
    wanted = [(n, t) for n, t in _tensors(model).items() if n in foreign and not isinstance(t, FreedWeight)]
    stand_ins = {id(t): freed(t, n, foreign[n], home) for n, t in wanted}
    replace(model, stand_ins)
    for _, weight in wanted:
        if type(weight) is nn.Parameter and weight.requires_grad:  # What is frozen stays what it was.
            empty_for_others(weight, stand_ins[id(weight)])


def move_weights(model: nn.Module, devices: Mapping[str, torch.device]) -> None:
    """Moves every weight that has values, and what is beside it, to the device given for its name."""
    targets = [(t, devices[n]) for n, t in _tensors(model).items() if n in devices and not t.is_meta]
    moving = [(t, device) for t, device in targets if t.device != device]
    moved = {id(t): like(t, t.detach().to(device)) for t, device in moving}
    same = {_memory(t): moved[id(t)].detach() for t, _ in moving if not is_wrapper(t)}
    replace(model, moved)
    move_beside(model, devices, same)
    if moving:
        _flatten_recurrent(model)


def move_beside(
    model: nn.Module, devices: Mapping[str, torch.device], moved: Mapping[Any, Tensor] | None = None
) -> None:
    """Moves what is beside weights to the devices given for these; `moved` maps memory of weights, as
    `_memory` names it, to the tensors that have taken its place.
    """
    for found in [*beside_weights(model)]:
        device = devices.get(found.owner)
        if device is not None and not found.tensor.is_meta and found.tensor.device != device:
            same = None if moved is None or is_wrapper(found.tensor) else moved.get(_memory(found.tensor))
            found.put(found.tensor.to(device) if same is None else same)


def _memory(tensor: Tensor) -> Any:
    """Returns what two tensors have in common that are one: place, shape and type."""
    place = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *place, tensor.shape, tensor.stride(), tensor.dtype


def _flatten_recurrent(model: nn.Module) -> None:
    """Lets each LSTM, GRU and RNN whose weights are on one accelerator lay them in one piece of memory.

    `module.to(device)` does the same; else cuDNN copies them together in every forward. The parameters stay
    the same objects. torch leaves out what cuDNN does not take, and weights that are tied within a module.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            weights = list(module.parameters(recurse=False))
            devices = {weight.device for weight in weights}
            if len(devices) == 1 and is_accelerator(devices.pop()):
                module.flatten_parameters()


def places(model: nn.Module) -> list[Place]:
    """Returns (table, key, name) of every parameter and buffer; tied ones share their first name."""
    canonical: dict[int, str] = {}
    entries: list[Place] = []
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    entries.append((table, key, canonical.setdefault(id(tensor), name)))
    return entries


def like(old: Tensor, values: Tensor) -> Tensor:
    """Returns `values` as a parameter with the attributes of `old`, or as a plain tensor where
    `old` is one.
    """
    if isinstance(old, FreedWeight) and values.is_meta:
        return still_freed(old, values)
    if not isinstance(old, nn.Parameter):
        return values
    made = nn.Parameter(values, requires_grad=old.requires_grad)
    inner = vars(made).keys() if is_wrapper(values) else ()  # codes and scales, which are those of `values`
    vars(made).update({name: value for name, value in vars(old).items() if name not in inner})
    return made


def replace(model: nn.Module, successor: Mapping[int, Tensor]) -> None:
    """Replaces tensors, given by id, in the tables of modules and in their plain attributes.

    An LSTM, for example, lists its weights in an attribute as well.
    """

    def swap(leaf: Any) -> Any:
        return successor.get(id(leaf), leaf)

    for table, key, _ in places(model):
        table[key] = swap(table[key])
    for module in model.modules():
        attributes = vars(module)
        for name in [n for n, value in attributes.items() if n not in _HELD and _holds(value, successor)]:
            attributes[name] = map_leaves(swap, attributes[name])


def _holds(value: Any, successor: Mapping[int, Tensor]) -> bool:
    """Returns whether the value, or an item of a list, tuple or dict, is one of the tensors.

    Dataclasses are not searched, since they may be configs whose fields refuse to be read.
    """
    if isinstance(value, list | tuple | dict):
        return any(_holds(item, successor) for item in (value.values() if isinstance(value, dict) else value))
    return id(value) in successor


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for table, key, name in places(model) if (tensor := table[key]) is not None}
