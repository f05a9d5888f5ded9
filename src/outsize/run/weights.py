"""Whose weights are whose: a rank keeps what its own stages use and frees the rest to meta.

A weight that no stage uses (a head that the loss does not see) stays everywhere: freeing it would save
little and break `evaluate`. Tied names keep pointing at one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from outsize.run.cut import Cut


def owned_parameters(cut: Cut, model: nn.Module, stages: Iterable[int]) -> list[str]:
    """Names, in the model's order, of the parameters whose first user is one of the stages.

    A parameter that no stage uses belongs to stage 0.
    """
    ours = set(stages)
    first: dict[str, int] = {}
    for program in cut.programs:
        for name in program.weights:
            first.setdefault(name, program.stage)
    return [name for name, _ in model.named_parameters() if first.get(name, 0) in ours]


def free_foreign(cut: Cut, model: nn.Module, stages: Iterable[int]) -> int:
    """Replace weights that only other stages use by meta tensors; returns the bytes freed."""
    ours = set(stages)
    kept = {n for p in cut.programs if p.stage in ours for n in p.weights}
    foreign = {n for p in cut.programs if p.stage not in ours for n in p.weights} - kept
    freed, replacement = 0, {}
    for table, key, name in _places(model):
        tensor = table[key]
        if name in foreign and tensor is not None and not tensor.is_meta:
            freed += 0 if id(tensor) in replacement else tensor.numel() * tensor.dtype.itemsize
            table[key] = _on_meta(tensor, replacement)
    return freed


def _places(model: nn.Module) -> list[tuple[dict[str, Tensor | None], str, str]]:
    """(table, key, canonical name) of every parameter and buffer; tied ones share the name."""
    canonical: dict[int, str] = {}
    found = []
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    found.append((table, key, canonical.setdefault(id(tensor), name)))
    return found


def _on_meta(tensor: Tensor, done: dict[int, Tensor]) -> Tensor:
    if id(tensor) not in done:
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        done[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    return done[id(tensor)]


def move_weights(model: nn.Module, device: torch.device) -> None:
    """Bring every weight that still has values to the rank's device; tied ones stay tied."""
    moved: dict[int, Tensor] = {}
    for table, key, _ in _places(model):
        tensor = table[key]
        if tensor is not None and not tensor.is_meta and tensor.device != device:
            table[key] = _moved(tensor, device, moved)


def _moved(tensor: Tensor, device: torch.device, done: dict[int, Tensor]) -> Tensor:
    if id(tensor) not in done:
        there = tensor.detach().to(device)
        is_parameter = isinstance(tensor, nn.Parameter)
        done[id(tensor)] = nn.Parameter(there, requires_grad=tensor.requires_grad) if is_parameter else there
    return done[id(tensor)]
