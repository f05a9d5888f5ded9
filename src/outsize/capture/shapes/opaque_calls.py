"""Calls into which nobody looks: a custom autograd function, a module of the user's that is one leaf.

Their own Python runs at every replay, so what it decides on lengths is no condition of the program: a loop
over pieces of a sequence may have as many pieces as it likes. What counts is which lengths their results
have; that is asked of fakes, once for each kind of call and each set of lengths. What torch can follow
through such code (a norm of the user's) is followed as all else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from outsize.capture.fakes.fake_model import FakeModel, fake_like, fake_of, hidden_fakes, quiet_fakes
from outsize.capture.fakes.grouped_products import grouped_products
from outsize.errors.interruptions import raise_interruption
from outsize.program.replaying.replay import bindings
from outsize.program.tape import Instruction, Meta, Ref, Tape, Weight
from outsize.program.tree import leaves, map_leaves
from outsize.program.weights.lookup import weight_named


def kind_of_code(function: Callable[..., Any]) -> Any:
    """Returns whose code a call runs that recordings do not follow, and replays run as it is: the class of a
    custom autograd function or of a module; None for what is torch's own.
    """
    if isinstance(function, nn.Module):
        return None if type(function).__module__.startswith("torch.nn.") else type(function)
    owner = getattr(function, "__self__", None)
    return owner if isinstance(owner, type) and issubclass(owner, torch.autograd.Function) else None


@final
class OpaqueCalls:
    """The calls of a tape that run code of these `kinds`."""

    def __init__(self, tape: Tape, model: nn.Module, kinds: Collection[Any]) -> None:
        self._model, self._modules = model, dict(model.named_modules()) if kinds else {}
        self._opaque = [i.index for i in tape.instructions if kinds and self._kind(i) in kinds]
        self._known: set[Any] = set()

    def _kind(self, instruction: Instruction) -> Any:
        return kind_of_code(self._target(instruction))

    def _target(self, instruction: Instruction) -> Any:
        target = instruction.target
        return self._modules[target] if isinstance(target, str) else target

    def hold(self, tape: Tape) -> bool:
        """Returns whether each call has results of the shapes that the tape says."""
        return all(self._holds(tape.instructions[index], tape.metas) for index in self._opaque)

    def _holds(self, instruction: Instruction, metas: Sequence[Meta]) -> bool:
        target = self._target(instruction)
        slots = (*instruction.reads(), *instruction.defines())
        others = repr([leaf for leaf in leaves((instruction.args, instruction.kwargs)) if _is_plain(leaf)])
        key = kind_of_code(target), others, tuple((metas[slot].shape, metas[slot].stride) for slot in slots)
        if key not in self._known:
            try:
                if not self._agrees(instruction, metas, target):
                    return False
            except Exception as error:  # Its own code may ask fakes for values.
                raise_interruption(error)
                return False
            self._known.add(key)
        return True

    def _agrees(self, instruction: Instruction, metas: Sequence[Meta], target: Any) -> bool:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        module = target if isinstance(target, nn.Module) else nn.Module()
        # Weights that this rank has freed are on meta.
        device = next((metas[slot].device for slot in instruction.defines()), torch.device("cpu"))
        with (
            mode,
            grouped_products(),
            hidden_fakes(),
            quiet_fakes(),
            FakeModel(module, mode, device) as fakes,
            torch.no_grad(),
        ):

            def value(leaf: Any) -> Any:
                if isinstance(leaf, Ref):
                    return fake_of(metas[leaf.slot], mode)
                if isinstance(leaf, Weight):
                    weight = weight_named(self._model, leaf.name)
                    return fake_like(weight, mode, fakes.device_for(weight))
                return leaf

            arguments = map_leaves(value, (instruction.args, instruction.kwargs))
            found = bindings(instruction.out, target(*arguments[0], **arguments[1]))
        return all(
            isinstance(tensor, Tensor)
            and (tuple(tensor.shape), tensor.stride()) == (metas[slot].shape, metas[slot].stride)
            for slot, tensor in found.items()
        )


def _is_plain(leaf: Any) -> bool:
    return not isinstance(leaf, Ref | Weight | Tensor)
