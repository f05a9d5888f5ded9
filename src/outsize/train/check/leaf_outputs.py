"""Records the outputs of leaf modules, call by call, in the plain loop and in an engine's step.

A module may be called by several stages, which take turns as the schedule says, so the order of its calls is
not fixed: each call of the plain loop must be among the engine's calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.capture.recording.fallbacks import LossFn
from outsize.capture.recording.intercept import Watcher, watching
from outsize.program.tape import Instruction
from outsize.program.tree import leaves
from outsize.run.stage.rng import Seed, borrowed_generators
from outsize.train.batch.batch import Batch
from outsize.train.check.reference import TapeOf, eager, tape_for

Calls = dict[str, list[list[Tensor]]]  # module -> its calls -> the tensors that each call returned


def eager_calls(
    model: nn.Module, tape: TapeOf, parts: Sequence[Batch], seeds: Sequence[Seed], loss_fn: LossFn | None
) -> Calls:
    """Returns the calls of the forwards of all microbatches as the reference runs them, in the order of
    the tape.
    """
    calls: Calls = {}

    def visit(instruction: Instruction, result: Any) -> None:
        if isinstance(instruction.target, str):
            calls.setdefault(instruction.target, []).append(_copies(result))

    # Grad mode is on as in a step: some ops choose other kernels without it.
    with borrowed_generators():
        for part, seed in zip(parts, seeds, strict=True):
            eager(model, tape_for(tape, part), part, seed, loss_fn, visit)
    return calls


@contextmanager
def watched_modules(model: nn.Module) -> Iterator[Calls]:
    """Yields the calls of the model's modules while the context lasts."""
    calls: Calls = {}
    with watching(_Modules(model, calls), dispatch=False):
        yield calls


def first_other_call(expected: Calls, observed: Calls) -> str | None:
    """Returns the first module, in the order of `expected`, one of whose calls is not among the `observed`
    ones.
    """
    for name, calls in expected.items():
        observed_calls = observed.get(name, [])
        if not all(any(_same(call, other) for other in observed_calls) for call in calls):
            return name
    return None


@final
class _Modules(Watcher):
    def __init__(self, model: nn.Module, calls: Calls) -> None:
        self._fqn = {id(m): fqn for fqn, m in reversed(dict(model.named_modules()).items())}
        self._found = calls

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
