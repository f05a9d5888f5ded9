"""Parity: the numbers of a split run beside those of the plain loop, and the verdict.

A Snapshot is what a run leaves behind after some steps. Two snapshots are compared tensor by tensor with
`torch.equal`; a gradient that exists in one and not in the other counts as infinitely different.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outsize.capture.ladder import LossFn
from outsize.ir.plan import BatchNormMode
from outsize.program.tape import Tape
from outsize.run.rng import seeder
from outsize.run.statistics import Statistics
from outsize.train.batch import Batch
from outsize.train.engine import Engine
from outsize.train.loss import LossShares, is_sum
from outsize.train.reference import TapeOf, reference_step, tape_for

Tensors = Mapping[str, Tensor]


@final
@dataclass(frozen=True)
class Snapshot:
    """Loss and gradients of the last step, buffers and parameters after it; names are the user's."""

    loss: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The optimizer of parity checks."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def reference_snapshot(
    model: nn.Module,
    tape: Tape | TapeOf,
    batch: Batch,
    microbatches: int,
    loss_fn: LossFn | None,
    *,
    steps: int,
    seed: int,
    bn: BatchNormMode = "micro",
) -> Snapshot:
    """The plain loop on `model` (changed in place): `steps` AdamW steps on the same batch.

    Running statistics of BatchNorm are kept as `bn` says, as in every engine.
    """
    parts = batch.split(microbatches)
    first = tape_for(tape, parts[0])
    counter = LossShares(first, model, summed=is_sum(loss_fn, first, parts[0]))
    optimizer = adamw(model.parameters())
    grads: dict[str, Tensor] = {}
    loss: Tensor | None = None
    for step in range(steps):
        shares = counter.of(parts)
        seeds = [seeder(seed, step, mb) for mb in range(microbatches)]
        with Statistics(model).collecting() if bn == "deferred" else nullcontext():
            loss = reference_step(model, tape, parts, shares, seeds, loss_fn).loss
        grads = _grads(model.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert loss is not None, "a parity check needs a loss"
    return _snapshot(loss, grads, model)


def engine_snapshot(engine: Engine, batch: Batch, *, steps: int) -> Snapshot:
    """The same steps on an engine; holds this rank's own tensors, each of them whole."""
    grads: dict[str, Tensor] = {}
    loss: Tensor | None = None
    engine.prepare(batch)
    for _ in range(steps):
        loss = engine.step(*batch.args, target=batch.target or None, update=False, **batch.kwargs).loss
        own = [(n, p.grad) for n, p in engine.named_parameters() if p.grad is not None]
        grads = {n: engine.whole(n, grad).clone() for n, grad in own}
        engine.update()
    assert loss is not None
    own = {n: engine.whole(n, p) for n, p in engine.named_parameters()}
    return _snapshot(loss, grads, engine.model, own)


def _grads(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def _snapshot(
    loss: Tensor, grads: dict[str, Tensor], model: nn.Module, own: Tensors | None = None
) -> Snapshot:
    parameters = own if own is not None else dict(model.named_parameters())
    return Snapshot(
        loss=loss.detach().clone(),
        grads=grads,
        buffers={n: b.detach().clone() for n, b in model.named_buffers() if not b.is_meta},
        parameters={n: p.detach().clone() for n, p in parameters.items()},
    )


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
        """All zero."""
        return not (self.loss or self.grads or self.buffers or self.parameters)


def compare(reference: Snapshot, found: Snapshot) -> Differences:
    """Largest difference per kind; infinite where a tensor is missing or has another shape."""
    return Differences(
        loss=difference(reference.loss, found.loss),
        grads=_largest(reference.grads, found.grads),
        buffers=_largest(reference.buffers, found.buffers),
        parameters=_largest(reference.parameters, found.parameters),
        wrong_grads=_wrong(reference.grads, found.grads),
        wrong_buffers=_wrong(reference.buffers, found.buffers),
    )


def _wrong(reference: Tensors, found: Tensors) -> frozenset[str]:
    return frozenset(n for n in reference.keys() | found.keys() if _pair(reference, found, n))


def _largest(reference: Tensors, found: Tensors) -> float:
    return max((_pair(reference, found, n) for n in reference.keys() | found.keys()), default=0.0)


def _pair(reference: Tensors, found: Tensors, name: str) -> float:
    return difference(reference.get(name), found.get(name))


def difference(a: Tensor | None, b: Tensor | None) -> float:
    """0 for equal bits (NaN equals NaN), else the largest absolute difference, never 0."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    a, b = (t if t.layout is torch.strided else t.to_dense() for t in (a, b))  # sparse: equal as matrices
    if torch.equal(a, b) or bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all()):
        return 0.0
    gap = (a.to(torch.float64) - b.to(torch.float64)).abs()
    return float(torch.nan_to_num(gap, nan=math.inf).max()) or 5e-324


def relative_difference(reference: Snapshot, found: Snapshot) -> float:
    """Of loss and gradients, to the largest element of each tensor.

    A gradient that is zero but for rounding (of a bias of keys) has no scale of its own: it has at least
    1e-3 of the largest gradient's.
    """
    if found.grads.keys() - reference.grads.keys():
        return math.inf
    scales = {name: _largest_of(grad) for name, grad in reference.grads.items()}
    least = 1e-3 * max(scales.values(), default=0.0)
    gaps = [(difference(reference.loss, found.loss), _largest_of(reference.loss))]
    gaps += [
        (difference(grad, found.grads.get(name)), max(scales[name], least))
        for name, grad in reference.grads.items()
    ]
    return max(gap / largest if largest else gap for gap, largest in gaps)


def _largest_of(tensor: Tensor) -> float:
    return float(tensor.to_dense().abs().max()) if tensor.numel() else 0.0


def merge(snapshots: Iterable[Snapshot]) -> Snapshot:
    """One snapshot from those of all ranks, each of which holds its own tensors."""
    found = list(snapshots)
    first = found[0]
    for other in found[1:]:
        first.grads.update(other.grads)
        first.parameters.update(other.parameters)
        first.buffers.update(other.buffers)
    return first
