"""Makes a model of a framework's training step, which an engine can cut: its forward is user code that calls
the user's modules and returns a loss.

    training_step(batch, 0)  ->  {"out": the loss, or a dict with it, "logged": [(name, value, options), ...]}

What the step logs meanwhile is a part of what it returns, because stages that are cut from the step write
nothing into the framework's objects.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from types import CodeType
from typing import Any, final

from torch import nn


@final
class TrainingStep(nn.Module):
    """A user's module with its training step as the forward."""

    def __init__(self, module: nn.Module, *, is_recorded: bool) -> None:
        """`is_recorded`: False refuses to be recorded, so that the module runs in its own Python."""
        super().__init__()
        self.module, self.is_recorded = module, is_recorded
        self._logged: list[tuple[str, Any, dict[str, Any]]] = []
        self._log = self._keep  # One object, because the step reads it.

    def forward(self, batch: Any) -> Any:
        """Returns what the training step returns and logs."""
        if not self.is_recorded:
            # A decision on a weight cannot be in a recorded program.
            return bool(next(self.parameters()).sum() > 0)
        logged = self._logged = []
        step: Any = self.module.training_step
        out = step(batch, 0) if len(inspect.signature(step).parameters) > 1 else step(batch)
        return {"out": out, "logged": logged}

    def _keep(self, name: str, value: Any, **options: Any) -> None:
        self._logged.append((name, value, options))

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Takes what the module logs within the context."""
        vars(self.module)["log"] = self._log
        try:
            yield
        finally:
            del vars(self.module)["log"]


def loss_in(result: Mapping[str, Any]) -> Any:
    """Returns the loss in what a TrainingStep returns."""
    out = result["out"]
    return out["loss"] if isinstance(out, Mapping) else out


def reads_batch_number(step: Callable[..., Any]) -> bool:
    """Returns whether a training step's code reads its argument after the batch, the number of the batch."""
    names = list(inspect.signature(step).parameters)[1:2]
    code = getattr(inspect.unwrap(step), "__code__", None)
    if not names or code is None:
        return bool(names)
    loads = (i.argval for i in dis.get_instructions(code) if i.opname.startswith("LOAD"))
    return any(names[0] in (load if isinstance(load, tuple) else (load,)) for load in loads)


def names_in(module: nn.Module, base: type, first: Collection[str]) -> set[str]:
    """Returns the names of attributes and globals in the code of these methods of a module, and of those of
    its methods that they name; not in methods of `base`, the framework's own class.
    """
    kinds = type(module).__mro__[: type(module).__mro__.index(base)]
    methods = {name: method for kind in reversed(kinds) for name, method in vars(kind).items()}
    found, todo = set[str](), list(first)
    while todo:
        codes = [getattr(inspect.unwrap(methods[name]), "__code__", None) for name in todo if name in methods]
        named = set(chain.from_iterable(_names(code) for code in codes if code is not None)) - found
        found |= named
        todo = list(named)
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
