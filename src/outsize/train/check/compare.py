"""Compares the numbers of a split run with those of the plain loop.

A TrainingSnapshot holds the tensors at the end of a run. Two snapshots are compared tensor by tensor with
`torch.equal`; a gradient that exists in only one of them counts as infinitely different.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, repeat
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outsize.capture.recording.fallbacks import LossFn, record
from outsize.ir.plan import BatchNormMode
from outsize.program.tape import Tape
from outsize.program.values.wrapper_tensors import is_wrapper, plain_parts
from outsize.program.weights.of_loss import with_loss
from outsize.run.stage.batchnorm import DeferredStatistics
from outsize.run.stage.rng import seeder
from outsize.train.batch.batch import Batch
from outsize.train.batch.loss_of_outputs import OutputLoss
from outsize.train.batch.loss_terms import with_fixed_ratios
from outsize.train.batch.loss_trials import LossTrial
from outsize.train.batch.loss_weights import LossShares, counted_each, shares_of, weights_of
from outsize.train.check.reference import TapeOf, WeightsOf, reference_step, tape_for
from outsize.train.engine.engine import Engine

Tensors = Mapping[str, Tensor]


@final
@dataclass(frozen=True)
class TrainingSnapshot:
    """Loss of a step, gradients and buffers after it, and the parameters after the last update; names are the
    user's.
    """

    loss: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Returns the optimizer of parity checks."""
    return torch.optim.AdamW(parameters, lr=1e-3)


@final
@dataclass(frozen=True, slots=True)
class PlainLoop:
    """Describes the plain loop: `steps` AdamW steps on the first batch, in microbatches. Before the last
    update the gradients of the other batches are added.

    Running statistics of BatchNorm are kept as `bn` says, as in every engine.
    """

    microbatches: int
    loss_fn: LossFn | None
    steps: int
    seed: int
    bn: BatchNormMode = "micro"


def reference_snapshot(
    model: nn.Module, tape: Tape | TapeOf, batch: Batch, loop: PlainLoop
) -> TrainingSnapshot:
    """Runs the plain loop on `model`, which is changed in place."""
    return reference_snapshots(model, tape, [batch.split(loop.microbatches)], loop)[0]


def reference_snapshots(
    model: nn.Module, tape: Tape | TapeOf, batches: Sequence[Sequence[Batch]], loop: PlainLoop
) -> list[TrainingSnapshot]:
    """Runs the plain loop on batches that are given as their microbatches; returns a snapshot of each.

    `model` is changed in place.
    """
    whole, optimizer, numbers = with_loss(model, loop.loss_fn), adamw(model.parameters()), count()
    counted = [(parts, counters_of(model, tape, parts, loop.loss_fn)) for parts in batches]
    snapshots = list[TrainingSnapshot]()
    for of_update in _by_updates(counted, loop.steps):
        snapshots.clear()
        for (parts, counters), number in zip(of_update, numbers, strict=False):
            weights = weights_of(counted_each(counters, parts))
            shares: Sequence[float] | WeightsOf = [each.share for each in weights]
            weighed = _weighed_tapes(tape, parts, counters, [each.ratios for each in weights])
            if not weighed(parts[0]).instructions:  # a model that runs by modules
                shares = partial(_shares_of_outputs, OutputLoss(loop.loss_fn), parts)
            seeds = [seeder(loop.seed, number, mb) for mb in range(len(parts))]
            with DeferredStatistics(model).collecting() if loop.bn == "deferred" else nullcontext():
                loss = reference_step(model, weighed, parts, shares, seeds, loop.loss_fn).loss
            snapshots.append(_snapshot(loss, _grads(whole.named_parameters()), whole))
        _make_dense(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return _with_parameters(snapshots, dict(whole.named_parameters()))


def _by_updates(batches: Sequence[Any], steps: int) -> Iterator[Sequence[Any]]:
    """Yields the batches whose gradients are accumulated for each update: the first alone, and at last all.

    So the gradients of other batches do not depend on an update, which makes much of small roundings.
    """
    yield from repeat(batches[:1], steps - 1)
    yield batches


def _shares_of_outputs(loss: OutputLoss, parts: Sequence[Batch], output: Any) -> Sequence[float]:
    return shares_of(loss.counted(output, parts))


def _weighed_tapes(
    tape: Tape | TapeOf,
    parts: Sequence[Batch],
    counters: Sequence[LossShares],
    ratios: Sequence[Sequence[float]],
) -> TapeOf:
    """Returns a function that finds a microbatch's tape, whose terms of the loss weigh by its ratios."""
    tapes = {id(part): tape_for(tape, part) for part in parts}
    for part, counter, of_part in zip(parts, counters, ratios, strict=True):
        if of_part:
            tapes[id(part)] = with_fixed_ratios(tapes[id(part)], counter.sums, of_part)
    return lambda part: tapes[id(part)]


def counters_of(
    model: nn.Module, tape: Tape | TapeOf, parts: Sequence[Batch], loss_fn: LossFn | None
) -> list[LossShares]:
    """Returns for each microbatch the counter of its share of the loss, made from its own tape."""

    def recorded(part: Batch) -> Tape:
        return record(model, part.args, part.kwargs, loss_fn, part.target)

    tapes = [tape_for(tape, part) for part in parts]
    made: dict[int, LossShares] = {}
    for own, part in zip(tapes, parts, strict=True):
        if id(own) not in made:
            trial = LossTrial(loss_fn, part, recorded)
            made[id(own)] = LossShares(own, with_loss(model, loss_fn), trial=trial)
    return [made[id(own)] for own in tapes]


def engine_snapshot(engine: Engine, batch: Batch, *, steps: int) -> TrainingSnapshot:
    """Runs the same steps on an engine; returns this rank's own tensors, each of them whole."""
    return engine_snapshots(engine, [batch], steps=steps)[0]


def engine_snapshots(engine: Engine, batches: Sequence[Batch], *, steps: int) -> list[TrainingSnapshot]:
    """Runs the same steps on an engine; returns a snapshot of each batch, with this rank's own tensors."""
    snapshots = list[TrainingSnapshot]()
    engine.prepare(batches[0])
    for of_update in _by_updates(batches, steps):
        snapshots.clear()
        for batch in of_update:
            loss = engine.step(*batch.args, target=batch.target or None, update=False, **batch.kwargs).loss
            own = [(n, p.grad) for n, p in engine.weights.named_parameters(loss=True) if p.grad is not None]
            grads = {n: engine.weights.whole(n, grad).clone() for n, grad in own}
            snapshots.append(_snapshot(loss, grads, engine.model_with_loss))
        _make_dense(parameter for _, parameter in engine.weights.named_parameters())
        engine.update()
    own = {n: engine.weights.whole(n, p) for n, p in engine.weights.named_parameters(loss=True)}
    return _with_parameters(snapshots, own)


def _make_dense(parameters: Iterable[nn.Parameter]) -> None:
    """Makes sparse gradients dense, because AdamW takes no others; they are compared before."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            parameter.grad = parameter.grad.to_dense()


def _grads(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def _snapshot(loss: Tensor | None, grads: dict[str, Tensor], model: nn.Module) -> TrainingSnapshot:
    assert loss is not None, "a parity check needs a loss"
    buffers = {n: b.detach().clone() for n, b in model.named_buffers() if not b.is_meta}
    return TrainingSnapshot(loss.detach().clone(), grads, buffers)


def _with_parameters(snapshots: Sequence[TrainingSnapshot], parameters: Tensors) -> list[TrainingSnapshot]:
    """Returns the snapshots, the last one with the parameters after the update."""
    copies = {n: p.detach().clone() for n, p in parameters.items()}
    return [*snapshots[:-1], replace(snapshots[-1], parameters=copies)]


@final
@dataclass(frozen=True, slots=True)
class Differences:
    """Largest absolute differences by kind; the parameters whose gradients and the buffers that differ."""

    loss: float
    grads: float
    buffers: float
    parameters: float
    wrong_grads: frozenset[str]
    wrong_buffers: frozenset[str]

    @property
    def bit_equal(self) -> bool:
        """Tells whether all differences are zero."""
        return not (self.loss or self.grads or self.buffers or self.parameters)


def compare(reference: TrainingSnapshot, split_run: TrainingSnapshot) -> Differences:
    """Returns the largest difference per kind; infinite where a tensor is missing or has another shape."""
    return Differences(
        loss=difference(reference.loss, split_run.loss),
        grads=_largest(reference.grads, split_run.grads),
        buffers=_largest(reference.buffers, split_run.buffers),
        parameters=_largest(reference.parameters, split_run.parameters),
        wrong_grads=_wrong(reference.grads, split_run.grads),
        wrong_buffers=_wrong(reference.buffers, split_run.buffers),
    )


def worst(differences: Sequence[Differences]) -> Differences:
    """Returns the largest differences of several comparisons, and all that is wrong in any of them."""
    return Differences(
        loss=max(d.loss for d in differences),
        grads=max(d.grads for d in differences),
        buffers=max(d.buffers for d in differences),
        parameters=max(d.parameters for d in differences),
        wrong_grads=frozenset().union(*(d.wrong_grads for d in differences)),
        wrong_buffers=frozenset().union(*(d.wrong_buffers for d in differences)),
    )


def _wrong(reference: Tensors, split_run: Tensors) -> frozenset[str]:
    return frozenset(n for n in reference.keys() | split_run.keys() if _pair(reference, split_run, n))


def _largest(reference: Tensors, split_run: Tensors) -> float:
    return max((_pair(reference, split_run, n) for n in reference.keys() | split_run.keys()), default=0.0)


def _pair(reference: Tensors, split_run: Tensors, name: str) -> float:
    return difference(reference.get(name), split_run.get(name))


def difference(a: Tensor | None, b: Tensor | None) -> float:
    """Returns 0 for equal bits (NaN equals NaN), else the largest absolute difference, never 0."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if is_wrapper(a) or is_wrapper(b):
        return _difference_of_parts(plain_parts(a), plain_parts(b))
    a, b = (t if t.layout is torch.strided else t.to_dense() for t in (a, b))  # sparse: equal as matrices
    if torch.equal(a, b) or bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all()):
        return 0.0
    gap = (a.cpu().double() - b.cpu().double()).abs()  # A device may have no float64.
    return float(torch.nan_to_num(gap, nan=math.inf).max()) or 5e-324


def _difference_of_parts(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max((difference(a.get(path), b.get(path)) for path in {**a, **b}), default=0.0)


def relative_difference(reference: TrainingSnapshot, split_run: TrainingSnapshot) -> float:
    """Returns the largest difference of loss and gradients, relative to the largest element of each tensor.

    A gradient that is zero but for rounding (of a bias of keys) has no scale of its own: its scale is taken
    to be at least 1e-3 of the largest gradient's.
    """
    if split_run.grads.keys() - reference.grads.keys():
        return math.inf
    scales = {name: _largest_of(grad) for name, grad in reference.grads.items()}
    least = 1e-3 * max(scales.values(), default=0.0)
    gaps = [(difference(reference.loss, split_run.loss), _largest_of(reference.loss))]
    gaps += [
        (difference(grad, split_run.grads.get(name)), max(scales[name], least))
        for name, grad in reference.grads.items()
    ]
    return max(gap / largest if largest else gap for gap, largest in gaps)


def _largest_of(tensor: Tensor) -> float:
    return float(tensor.to_dense().abs().max()) if tensor.numel() else 0.0


def merge(snapshots: Iterable[TrainingSnapshot]) -> TrainingSnapshot:
    """Returns one snapshot from those of all ranks, each of which holds its own tensors."""
    all_snapshots = list(snapshots)
    first = all_snapshots[0]
    for other in all_snapshots[1:]:
        first.grads.update(other.grads)
        first.parameters.update(other.parameters)
        first.buffers.update(other.buffers)
    return first
