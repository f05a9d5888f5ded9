"""Defines ModelCalls: `model(x)` of a split model, and what its backward needs.

    model(x)            parts of the batch ─ forwards of the schedule ─ outputs joined ─ nodes of autograd
    loss.backward()     the nodes, from the last microbatch to the first: backwards of the schedule

Each call that waits for its backward has a seat: stages and interpreters of its own, which the next call on
the seat uses again. A call whose outputs are dropped gives its seat back with the last reference to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.run.stage.rng import borrowed_generators
from outsize.train.batch.batch import Batch
from outsize.train.context.run_context import RunContext
from outsize.train.crew.weight_ownership import Ownership
from outsize.train.ranks.batch_check import is_checked
from outsize.train.split.nodes import CallNodes, GradInputs, SharedInput
from outsize.train.split.opened_call import CallOutputs, OpenedCall
from outsize.train.split.outputs import OutputJoin, rebuilt
from outsize.train.split.rank_gradients import mark_gradients
from outsize.train.variants.variant import Variants


class CallExecutor(Protocol):
    """What runs the microbatches of a call; `variants` are its programs."""

    variants: Variants

    def open(self, parts: Sequence[Batch], number: int, seat: int) -> OpenedCall:
        """Runs all forwards and keeps their graphs."""
        ...

    def outputs(self, parts: Sequence[Batch], number: int) -> CallOutputs:
        """Runs all forwards without graphs."""
        ...


class BatchSplit(Protocol):
    """What makes microbatches of the arguments of a call."""

    def of_batch(self, batch: Batch) -> list[Batch]:
        """Returns the plan's microbatches."""
        ...

    def compare(self, parts: Sequence[Batch], step: int) -> None:
        """Raises WorldMismatch where ranks were given several batches."""
        ...


@final
class ModelCalls:
    """The calls of one split model."""

    def __init__(
        self, run: RunContext, ownership: Ownership, split: BatchSplit, executor: CallExecutor
    ) -> None:
        crew, self._ownership = ownership.crew, ownership
        self._model, self._crew, self._split, self._executor = run.model, crew, split, executor
        group = None if run.mesh is None else run.mesh.pipeline
        last = crew.rank_of(len(run.plan.stages) - 1)
        self._group = group
        self._join = OutputJoin(executor.variants.output_shapes, group, last, run.device)
        # An optimizer refuses a rank that has no weights, and what sums over ranks must find one on each.
        self.stand_in = nn.Parameter(torch.zeros(0, device=run.device))
        self._seats: set[int] = set()
        self._number = 0

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what the model returns for the whole batch, in the user's graph where gradients are on.

        Raises BadOption, and whatever the model raises.
        """
        if torch.compiler.is_compiling():
            raise BadOption(
                "a split model is called inside of torch.compile",
                next_step="outsize.split(..., compiled=True), which compiles stages, called outside of it",
            )
        number = self._number
        self._number += self._model.training
        with self._crew.progress.of("call", number), borrowed_generators():
            if not torch.is_grad_enabled():
                with torch.inference_mode(False), torch.no_grad():
                    return self._without_graph(args, kwargs, number)
            return self._with_graph(args, kwargs, number)

    def _without_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> Any:
        parts = self._split.of_batch(Batch(args, kwargs))
        outputs = self._executor.outputs(parts, number)
        _, wholes = self._join.join(outputs, parts)
        return rebuilt(outputs, wholes, self._model)

    def _with_graph(self, args: tuple[Any, ...], kwargs: dict[str, Any], number: int) -> Any:
        parts = self._split.of_batch(self._shared(Batch(args, kwargs)))
        if self._group is not None and self._group.size() > 1:
            mark_gradients(self._numbered(), self._group)
        inputs = [_inputs_with_gradient(part) for part in parts]
        own = [part.mapped(_detached) for part in parts]
        if self._crew.mesh is not None and is_checked(number):
            self._split.compare(own, number)
        seat = next(n for n in count() if n not in self._seats)
        self._seats.add(seat)
        try:
            call = self._executor.open(own, number, seat)
        except BaseException:
            self._seats.discard(seat)
            raise
        close = _once(call.close, self._seats, seat)
        call = OpenedCall(call.outputs, call.groups, close)
        joined, wholes = self._join.join(call.outputs, own)
        nodes = CallNodes(call, joined, inputs, self.stand_in)
        weakref.finalize(nodes, close).atexit = False
        return rebuilt(call.outputs, nodes.outputs(wholes), self._model)

    def _numbered(self) -> list[tuple[int, nn.Parameter]]:
        """Returns this rank's parameters with their numbers in the model's order."""
        names = {name: number for number, (name, _) in enumerate(self._model.named_parameters())}
        own = [(names[name], weight) for name, weight in self._ownership.own_parameters()]
        return [*own, (-1, self.stand_in)]

    def _shared(self, batch: Batch) -> Batch:
        """Returns the batch with inputs whose gradients all ranks get."""
        group = self._group
        if group is None or group.size() == 1 or not any(t.requires_grad for t in batch.tensors()):
            return batch

        def leaf(part: Any) -> Any:
            is_wanted = isinstance(part, Tensor) and part.requires_grad
            return SharedInput.apply(group.of_tensor(part), part) if is_wanted else part

        return batch.mapped(leaf)


def _inputs_with_gradient(part: Batch) -> GradInputs:
    return [(position, tensor) for position, tensor in enumerate(part.tensors()) if tensor.requires_grad]


def _detached(part: Any) -> Any:
    return part.detach().requires_grad_() if isinstance(part, Tensor) and part.requires_grad else part


def _once(close: Callable[[], None], seats: set[int], seat: int) -> Callable[[], None]:
    """Returns what ends a call at its first call: the graphs go, and the seat is free."""
    is_open = [True]

    def end() -> None:
        if is_open:
            is_open.clear()
            close()
            seats.discard(seat)

    return end
