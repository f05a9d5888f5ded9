"""Describes each unit by a text such that equal texts mean equal work: copies are timed once, caches hit.

The text holds per instruction the leaf module's class, code and configuration with the shapes of its weights,
or the function with its plain arguments; shape, strides, dtype and requires_grad of every tensor, numbered in
order of appearance; grad and autocast modes; which results leave the unit. It does not hold names or values
of weights. What cannot be described (an object whose repr holds an address) makes texts differ, never agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from inspect import getattr_static
from itertools import pairwise
from types import CodeType
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.capture.graph.build import Captured, required_slots
from outsize.program.liveness import last_reads, live
from outsize.program.tape import Instruction, Ref, Tape, Weight
from outsize.program.tree import map_leaves

_PLAIN = (int, float, bool, str, type(None))


def unit_keys(captured: Captured, model: nn.Module) -> tuple[str, ...]:
    """Returns one hex digest per unit of the graph."""
    tape, modules = captured.tape, dict(model.named_modules())
    required = required_slots(tape)
    alive = live(tape, required)
    last = last_reads(tape, alive) | dict.fromkeys(required, len(tape.instructions))
    texts = (
        _UnitTextWriter(tape, model, modules).text(
            [i for i in tape.instructions[start:stop] if alive[i.index]],
            {slot for slot, read in last.items() if read >= stop},
        )
        for start, stop in pairwise(captured.starts)
    )
    return tuple(hashlib.sha256(text.encode()).hexdigest()[:24] for text in texts)


@final
class _UnitTextWriter:
    """Writes the text of one unit."""

    def __init__(self, tape: Tape, model: nn.Module, modules: dict[str, nn.Module]) -> None:
        self._tape, self._model, self._modules = tape, model, modules
        self._numbers: dict[int, int] = {}

    def text(self, body: Sequence[Instruction], needed: set[int]) -> str:
        """Returns all instructions, then which of their results are needed later."""
        lines = [self._line(instruction) for instruction in body]
        leaving = [self._numbers[s] for i in body for s in i.defines() if s in needed]
        return "\n".join([*lines, f"return {leaving}"])

    def _line(self, instruction: Instruction) -> str:
        target = instruction.target
        called = module_text(self._modules[target]) if isinstance(target, str) else _function_text(target)
        parts = (instruction.args, instruction.kwargs, instruction.out)
        args, kwargs, out = (repr(map_leaves(self._leaf, part)) for part in parts)
        return f"{out} = {called}({args}, {kwargs}) {instruction.modes} {instruction.random}"

    def _leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return self._slot(leaf.slot)
        if isinstance(leaf, Weight):
            return f"{leaf.kind} {_tensor_text(_find(self._model, leaf))}"
        if isinstance(leaf, Tensor):
            return _tensor_text(leaf)
        return _function_text(leaf) if callable(leaf) else repr(leaf)

    def _slot(self, slot: int) -> str:
        known = slot in self._numbers
        number = self._numbers.setdefault(slot, len(self._numbers))
        if known:
            return f"v{number}"
        meta = self._tape.metas[slot]
        return f"v{number} {meta.shape} {meta.stride} {meta.dtype} {meta.device.type} {meta.requires_grad}"


def module_text(module: nn.Module) -> str:
    """Describes class, code, configuration and weights of a module with all inside it."""
    return "; ".join(_module_parts(module))


def _module_parts(module: nn.Module) -> Iterator[str]:
    for name, part in module.named_modules():
        kind = type(part)
        # The lookup is static because the class of a scripted module resolves attributes for its instances
        # only.
        code = _code_text(getattr_static(kind, "forward", None)) or getattr(part, "code", "")
        yield f"{name}: {kind.__module__}.{kind.__qualname__}({part.extra_repr()}) {code}"
        yield repr([(k, v) for k, v in sorted(vars(part).items()) if _is_plain(v)])
        tensors = (*part._parameters.items(), *part._buffers.items())
        yield repr([(key, _tensor_text(t)) for key, t in tensors if t is not None])


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


def _tensor_text(tensor: Any) -> str:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    return (
        f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype} {tensor.device.type} {tensor.requires_grad}"
    )


def _find(model: nn.Module, weight: Weight) -> Any:
    path, _, name = weight.name.rpartition(".")
    owner = model.get_submodule(path) if path else model
    return getattr(owner, name, None)


def _function_text(function: Any) -> str:
    """Returns a function's name and, for a function in Python, its code; of an autograd function those of its
    forward and backward.
    """
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return f"{_function_text(owner.forward)} {_function_text(owner.backward)}"
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', repr(function))}"
    return f"{name} {_code_text(function)}"


def _code_text(function: Any) -> str:
    """Returns a digest of the byte code, so that an edited forward is timed again; builtins have none."""
    code = getattr(function, "__code__", None)
    return hashlib.sha256("".join(_code_parts(code)).encode()).hexdigest()[:12] if code is not None else ""


def _code_parts(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex() + repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_parts(constant)
        else:
            yield repr(constant)
