"""Replays by interpretation, for guards and small slices (stages use `generate` instead), and adapts
instructions to another device than the one that they were recorded on.

    recorded on cpu                              for a stage on cuda:1
    torch.arange(9, device=cpu)                  torch.arange(9, device=cuda:1)
    mask.to("cpu")                               mask.to(cuda:1)

A check of the user's own code must let the code continue at replay as while recording (`insist`).

Other devices that the user's code names are unchanged. Oracle: tests/unit/run/stage/test_to_device.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

from outsize.device.accelerators import moving_methods
from outsize.errors import ReplayMismatch
from outsize.program.python_reads import NumberInput
from outsize.program.tape import Instruction, Ref, Tape, Weight
from outsize.program.tree import leaves, map_leaves, part_at, paths

Env = dict[int, Any]

# torch's own list of functions that create tensors, on the CPU unless `device` is given; `normal` takes a
# device, too, where it is given no tensors.
_FACTORIES: Final[frozenset[Callable[..., Any]]] = frozenset({*_device_constructors(), torch.normal})


def resolve(tree: Any, env: Mapping[int, Any], weights: Mapping[str, Any]) -> Any:
    """Returns arguments with every Ref, Weight and NumberInput replaced by its value."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return env[leaf.slot]
        if isinstance(leaf, NumberInput):
            return leaf.value()
        return weights[leaf.name] if isinstance(leaf, Weight) else leaf

    return map_leaves(value, tree)


def evaluate(instructions: Iterable[Instruction], env: Env, weights: Mapping[str, Tensor]) -> None:
    """Runs glue instructions in order; fills `env` with their results. Leaves are not run here."""
    for instruction in instructions:
        assert callable(instruction.target), instruction.name
        args = resolve(instruction.args, env, weights)
        kwargs = resolve(instruction.kwargs, env, weights)
        with torch.set_grad_enabled(False):
            out = instruction.target(*args, **kwargs)
        env.update(bindings(instruction.out, out))


def bindings(tree: Any, out: Any) -> Env:
    """Maps slots to values, by walking the recorded structure of a result and the real one together."""
    values: Env = {}
    for steps, ref in paths(tree, lambda leaf: isinstance(leaf, Ref)):
        values[ref.slot] = part_at(out, steps)
    return values


class Relocatable(ABC):
    """Defines a target that holds instructions of its own."""

    @abstractmethod
    def relocated(self, move: Callable[[Instruction], Instruction]) -> Any:
        """Returns the target with its instructions moved."""


def relocated(instruction: Instruction, tape: Tape, home: torch.device, device: torch.device) -> Instruction:
    """Returns an instruction that was recorded at `home` as it is on another device."""
    if instruction.is_leaf:
        return instruction

    def swap(leaf: Any) -> Any:
        return device if isinstance(leaf, torch.device) and _is(leaf, home) else leaf

    if isinstance(instruction.target, Relocatable):
        moved = instruction.target.relocated(lambda inner: relocated(inner, tape, home, device))
        instruction = replace(instruction, target=moved)
    target, kwargs = instruction.target, dict(instruction.kwargs)
    args: tuple[Any, ...] = tuple(instruction.args)
    at_home = all(tape.metas[slot].device == home for slot in instruction.defines())
    if at_home and target in moving_methods():
        return replace(instruction, target=Tensor.to, args=(args[0], device), kwargs={})
    if isinstance(kwargs.get("device"), str | int):
        kwargs["device"] = torch.device(kwargs["device"])
    if target is Tensor.to and len(args) > 1 and isinstance(args[1], str | int):
        args = (args[0], torch.device(args[1]), *args[2:])
    if _makes_tensors(instruction) and at_home and kwargs.get("device") is None:
        kwargs["device"] = device
    return replace(instruction, args=map_leaves(swap, args), kwargs=map_leaves(swap, kwargs))


def relocated_constants(
    constants: Mapping[int, Tensor], home: torch.device, device: torch.device
) -> dict[int, Tensor]:
    """Returns the constants with copies on another device of those that were at `home`."""
    return {slot: t.to(device) if t.device == home else t for slot, t in constants.items()}


def _makes_tensors(instruction: Instruction) -> bool:
    """Returns whether the function creates a tensor from nothing, on the CPU unless it is given a device."""
    if instruction.target is not torch.normal:
        return instruction.target in _FACTORIES
    operands = leaves((instruction.args, instruction.kwargs))
    return not any(isinstance(leaf, Ref | Weight) for leaf in operands)


def _is(named: torch.device, home: torch.device) -> bool:
    """Returns whether the device is the tape's home; `cuda` names the current GPU, which home is."""
    return named.type == home.type and (named.index is None or named.index == (home.index or 0))


def insist(value: Tensor, expected: bool, where: str) -> None:
    """Raises ReplayMismatch where the user's own code raises, because `value` is not as its check expects."""
    if bool(value) is not expected:
        raise ReplayMismatch(
            "a check in the model's own code fails",
            numbers=f"at {where}",
            next_step="call the model itself on this batch: it raises there, with its own message",
        )
