"""Defines ModelCalls: `model(x)` of a split model, and what its backward needs.

    model(x)            parts of the batch ─ forwards of the schedule ─ outputs joined ─ nodes of autograd
    loss.backward()     the nodes, from the last microbatch to the first: backwards of the schedule

Calls that do not wait for each other run together, as those of the batches of one update: the forwards of all
are one pipeline, each has outputs and nodes of its own, and their backwards come in the order of the calls.

What waits for its backward has a seat: stages and interpreters of its own, which the next calls on the seat
use again. Calls whose outputs are dropped give their seat back with the last reference to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import accumulate, count
from typing import Any, Protocol, final

import torch
from torch import Tensor

from outsize.axes.registry import AXES, PAIRING
from outsize.errors import UnsupportedPlan
from outsize.ir.findings import CaptureNote
from outsize.ir.plan import Plan
from outsize.policies.precisions import precision_policy
from outsize.program.source_line import warn_user
from outsize.run.stage.rng import borrowed_generators
from outsize.train.batch.batch import Batch
from outsize.train.context.run_context import RunContext
from outsize.train.crew.weight_ownership import Ownership
from outsize.train.split.gradient_sums import PartSums, WholeSums
from outsize.train.split.nodes import CallGradientSum, CallNodes, GradInputs, SharedInput, SummedWeights
from outsize.train.split.opened_call import CallOutputs, OpenedCall
from outsize.train.split.outputs import OutputJoin, Outputs
from outsize.train.split.rank_gradients import RankGradients
from outsize.train.split.refused_calls import insist_on_a_plain_call, insist_on_first_run
from outsize.train.variants.results import rebuilt
from outsize.train.variants.variant import Variants

Active = Callable[[], AbstractContextManager[None]]
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of one call of the model."""


class CallExecutor(Protocol):
    """What runs the microbatches of a call; `variants` are its programs."""

    variants: Variants

    def open(
        self, parts: Sequence[Batch], number: int, seat: int, order: Sequence[int] | None = None
    ) -> OpenedCall:
        """Runs all forwards and keeps their graphs; backwards come in this order of the microbatches, or the
        last one first.
        """
        ...

    def outputs(self, parts: Sequence[Batch], number: int) -> CallOutputs:
        """Runs all forwards without graphs."""
        ...


class BatchSplit(Protocol):
    """What makes microbatches of the arguments of a call."""

    def of_batch(self, batch: Batch, count: int | None = None) -> list[Batch]:
        """Returns the plan's microbatches, or so many."""
        ...

    def compare_rarely(self, what: str, parts: Sequence[Batch]) -> None:
        """Raises WorldMismatch where ranks were given several batches, in the first of such calls and then in
        ever rarer ones.
        """
        ...


@final
class SplitByModules(UserWarning):
    """Says why the calls of a split model do not overlap."""


def tell_of_modules(plan: Plan, rank: int) -> None:
    """Says on rank 0 of a plan by modules, with the reason, that nothing overlaps."""
    if plan.form == "modules" and rank == 0:
        reasons = (reason.note for reason in plan.reasons if isinstance(reason, CaptureNote))
        warn_user("; ".join([f"stages of the split {plan.model} take turns", *reasons]), SplitByModules)


@final
class ByModuleCalls:
    """The calls of a model that runs by modules, in its own Python: each module where its weights are.

    `active` is the context of such a call. Nothing overlaps, the batch is not divided, and every rank has the
    outputs.
    """

    is_last = True

    def __init__(self, run: RunContext, ownership: Ownership, split: BatchSplit, active: Active) -> None:
        self._model, self._split, self._active = run.model, split, active
        self.gradients = RankGradients(run, ownership)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Outputs = "all") -> Any:
        """Returns what the model returns. Raises BadOption, and whatever the model raises."""
        self.gradients.agree_on_trained()
        self._split.compare_rarely(_kind_of_call(), [Batch(args, kwargs)])
        if torch.is_grad_enabled():
            self.gradients.mark()
            self.gradients.touch_stand_in()
        with self._active():
            return self._model(*args, **kwargs)

    def compare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises WorldMismatch where ranks are about to call a module with other values than each other, in
        the first of such calls and then in ever rarer ones. Every rank calls this.
        """
        self._split.compare_rarely("call by modules", [Batch(args, kwargs)])

    def together(self, calls: Sequence[Call], microbatches: int = 1) -> list[Any]:
        """Returns what the calls return, which run one after the other, each in one piece."""
        return [self(*call) for call in calls]


def insist_on_calls(plan: Plan, local_replicas: int = 1) -> None:
    """Raises UnsupportedPlan for a plan whose calls cannot be a part of the user's graph."""
    others = [axis for axis in AXES if axis.joins_states and plan.shards]
    reasons = [f"{name} {size}" for name, size in plan.axes.used_of(others).items()]
    reasons += [f"weights {plan.weights!r}"] if plan.streams or plan.host_stages else []
    reasons += [f"slices {plan.slices}"] if plan.slices > 1 else []
    reasons += [f"precision {plan.precision!r}"] if precision_policy(plan.precision).sums else []
    reasons += [f"{local_replicas} replicas in one process"] if local_replicas > 1 else []
    if reasons:
        raise UnsupportedPlan(
            "a split model has no shards over ranks that share tokens or experts, no weights on the host, "
            "no slices of sequences, one replica in a process, and sums in float32",
            numbers=", ".join(reasons),
            next_step="outsize.parallelize(..., loss_fn=loss_fn) and engine.step(x, target=y), or axes='pp'",
        )


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
        self._mesh = run.mesh
        self._pairs = bool(run.plan.axes.used_of(PAIRING))
        self._join = OutputJoin(executor.variants.output_shapes, run.mesh, last, run.device)
        self.gradients = RankGradients(run, ownership)
        self._sums: dict[Hashable, CallGradientSum] = {}
        self._seats: set[int] = set()
        self._number = 0

    @property
    def is_last(self) -> bool:
        """Returns whether this rank has the outputs of the last stage."""
        return self._join.is_last

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: Outputs = "all") -> Any:
        """Returns what the model returns for the whole batch, in the user's graph where gradients are on;
        `ranks` get the outputs, the others zeros.

        Raises BadOption, and whatever the model raises.
        """
        return self._run([Batch(args, kwargs)], None, ranks)[0]

    def compare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises WorldMismatch where ranks are about to call a module with other values than each other, in
        the first of such calls and then in ever rarer ones. Every rank calls this.
        """
        self._split.compare_rarely("call by modules", [Batch(args, kwargs)])

    def together(self, calls: Sequence[Call], microbatches: int = 1) -> list[Any]:
        """Returns what each of these calls returns, all of whose forwards are one pipeline, with so many
        microbatches of each; they are in one mode, with gradients or without.

        Backwards come in the order of the calls. The bits are those of calls one after the other. Replicas
        share the microbatches of all calls out among them; where they compute microbatches together, each has
        a part of every call, and calls run one after the other.
        """
        batches = [Batch(*call) for call in calls]
        if self._pairs:
            return [self._run([batch], microbatches, "all")[0] for batch in batches]
        return self._run(batches, microbatches, "all")

    def _run(self, batches: Sequence[Batch], microbatches: int | None, ranks: Outputs) -> list[Any]:
        insist_on_a_plain_call()
        number = self._number
        self._number += self._model.training
        with self._crew.progress.of("forward", number), borrowed_generators():
            if not torch.is_grad_enabled():
                with torch.inference_mode(False), torch.no_grad():
                    return self._without_graph(batches, microbatches, number, ranks)
            return self._with_graph(batches, microbatches, number, ranks)

    def _without_graph(
        self, batches: Sequence[Batch], microbatches: int | None, number: int, ranks: Outputs
    ) -> list[Any]:
        each = [self._split.of_batch(batch, microbatches) for batch in batches]
        self._split.compare_rarely(_kind_of_call(), [part for parts in each for part in parts])
        outputs = self._executor.outputs([part for parts in each for part in parts], number)
        returned: list[Any] = []
        for own, parts in self._of_calls(outputs, each):
            _, wholes = self._join.join(own, parts, ranks)
            returned.append(rebuilt(own.variants[0], wholes, self._model))
        return returned

    def _with_graph(
        self, batches: Sequence[Batch], microbatches: int | None, number: int, ranks: Outputs
    ) -> list[Any]:
        self.gradients.agree_on_trained()
        given = [self._split.of_batch(self._shared(batch), microbatches) for batch in batches]
        self.gradients.mark()
        each = [[part.mapped(_detached) for part in parts] for parts in given]
        every = [part for parts in each for part in parts]
        self._split.compare_rarely(_kind_of_call(), every)
        seat = next(n for n in count() if n not in self._seats)
        self._seats.add(seat)
        try:
            opened = self._executor.open(every, number, seat, _order_of(each))
        except BaseException:
            self._seats.discard(seat)
            raise
        close_all = _once(opened.close, self._seats, seat)
        left = [len(batches)]
        running = partial(self._crew.progress.of, "backward", number)
        returned: list[Any] = []
        try:
            insist_on_first_run(opened.outputs.variants)
            summed = SummedWeights(opened.weights(), self._sums_of, self.gradients.arrivals(len(batches)))
            calls = zip(self._of_calls(opened.outputs, each), given, strict=True)
            for place, ((outputs, parts), inputs) in enumerate(calls):
                joined, wholes = self._join.join(outputs, parts, ranks)
                close = _last_of(left, close_all)
                call = OpenedCall(replace(outputs, values=()), opened.groups, close, running)
                wanted = [_inputs_with_gradient(part) for part in inputs]
                nodes = CallNodes(call, place, joined, wanted, self.gradients.stand_in)
                weakref.finalize(nodes, close).atexit = False
                values = nodes.outputs(wholes, summed)
                returned.append(rebuilt(outputs.variants[0], values, self._model))
        except BaseException:
            close_all()
            raise
        return returned

    def _of_calls(
        self, outputs: CallOutputs, each: Sequence[Sequence[Batch]]
    ) -> Iterator[tuple[CallOutputs, Sequence[Batch]]]:
        """Yields the outputs of each call, with its microbatches."""
        if len(each) == 1:
            yield outputs, each[0]
            return
        first = 0
        for parts in each:
            yield outputs.of_parts(first, first + len(parts)), parts
            first += len(parts)

    def _sums_of(self, name: str) -> CallGradientSum | None:
        """Returns what adds up gradients over the ranks that hold a weight for other samples or rows."""
        gathered = self._crew.moves.gathered
        if gathered is not None and gathered.gathers(name):
            return self._sums.setdefault(gathered, PartSums(gathered))
        if self._mesh is None:
            return None
        of_experts = self._ownership.of_experts(name)
        group = self._mesh.expert_holders if of_experts else self._mesh.holders
        if group is None or group.size() == 1:
            return None
        return self._sums.setdefault(group, WholeSums(group))

    def _shared(self, batch: Batch) -> Batch:
        """Returns the batch with inputs whose gradients all ranks get."""
        sums = None if self._mesh is None else self._mesh.holders
        groups = [group for group in (self._group, sums) if group is not None and group.size() > 1]
        if not groups or not any(t.requires_grad for t in batch.tensors()):
            return batch

        def leaf(part: Any) -> Any:
            is_wanted = isinstance(part, Tensor) and part.requires_grad
            return SharedInput.apply(groups, part) if is_wanted else part

        return batch.mapped(leaf)


def _kind_of_call() -> str:
    return "call" if torch.is_grad_enabled() else "call without gradients"


def _inputs_with_gradient(part: Batch) -> GradInputs:
    return [(position, tensor) for position, tensor in enumerate(part.tensors()) if tensor.requires_grad]


def _detached(part: Any) -> Any:
    return part.detach().requires_grad_() if isinstance(part, Tensor) and part.requires_grad else part


def _order_of(each: Sequence[Sequence[Batch]]) -> list[int] | None:
    """Returns in which order backwards come to the microbatches of several calls: call by call, and to the
    last one of a call first. None for a call by itself.
    """
    if len(each) == 1:
        return None
    ends = accumulate(len(parts) for parts in each)
    return [end - 1 - at for end, parts in zip(ends, each, strict=True) for at in range(len(parts))]


def _last_of(left: list[int], close: Callable[[], None]) -> Callable[[], None]:
    """Returns what ends one of several calls: the last of them ends all."""
    is_open = [True]

    def end() -> None:
        if is_open:
            is_open.clear()
            left[0] -= 1
            if not left[0]:
                close()

    return end


def _once(close: Callable[[], None], seats: set[int], seat: int) -> Callable[[], None]:
    """Returns what ends calls at its first call: the graphs go, and the seat is free."""
    is_open = [True]

    def end() -> None:
        if is_open:
            is_open.clear()
            close()
            seats.discard(seat)

    return end
