"""What leaf modules gave out, call by call, in the plain loop and in an engine's step.

A module may be called by several stages, which take turns as the schedule says, so the order of its calls is
none to rely on: every call of the plain loop must be found again among the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.capture.intercept import Watcher, watching
from outsize.capture.ladder import LossFn
from outsize.program.tape import Instruction
from outsize.program.tree import leaves
from outsize.run.rng import Seed, borrowed_generators
from outsize.train.batch import Batch
from outsize.train.reference import TapeOf, eager, tape_for

Calls = dict[str, list[list[Tensor]]]  # module -> its calls -> the tensors that each gave out


def eager_calls(
    model: nn.Module, tape: TapeOf, parts: Sequence[Batch], seeds: Sequence[Seed], loss_fn: LossFn | None
) -> Calls:
    """Forwards of all microbatches as the reference runs them, in the order of the tape."""
    found: Calls = {}

    def visit(instruction: Instruction, result: Any) -> None:
        if isinstance(instruction.target, str):
            found.setdefault(instruction.target, []).append(_copies(result))

    # With gradients, as in a step: some kernels are others without.
    with borrowed_generators():
        for part, seed in zip(parts, seeds, strict=True):
            eager(model, tape_for(tape, part), part, seed, loss_fn, visit)
    return found


@contextmanager
def watched_modules(model: nn.Module) -> Iterator[Calls]:
    """The calls of the model's modules while the context lasts."""
    found: Calls = {}
    with watching(_Modules(model, found), dispatch=False):
        yield found


def first_other_call(expected: Calls, found: Calls) -> str | None:
    """The first module, in the order of `expected`, one of whose calls is not among those found."""
    for name, calls in expected.items():
        others = found.get(name, [])
        if not all(any(_same(call, other) for other in others) for call in calls):
            return name
    return None


@final
class _Modules(Watcher):
    def __init__(self, model: nn.Module, found: Calls) -> None:
        self._fqn = {id(m): fqn for fqn, m in reversed(dict(model.named_modules()).items())}
        self._found = found

    def on_module(self, module: nn.Module, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        out = fn(module, *args, **kwargs)
        name = self._fqn.get(id(module))
        if name is not None:
            self._found.setdefault(name, []).append(_copies(out))
        return out

    def on_function(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    def on_aten(self, op: Any, args: Any, kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def on_saved(self, tensor: Tensor) -> None:
        """Nothing to count."""


def _copies(result: Any) -> list[Tensor]:
    return [t.detach().clone() for t in leaves(result) if isinstance(t, Tensor)]


def _same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
