"""Counts what the loss of each microbatch was divided by, and what a plain loop of means would make of it.

    for part in parts:  (loss_fn(model(part)) / len(parts)).backward()        a mean of means

Where counts are unequal that is another loss than the batch's. It is computed here on the user's own model,
so that a check can say by how much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor, nn

from outsize.capture.recording.fallbacks import LossFn
from outsize.ir.answers.verdict import LossCounts, MeanOfMeans, TermCounts
from outsize.program.objects import model_copy
from outsize.train.batch.batch import Batch
from outsize.train.batch.loss_denominators import Measure, Samples, Targets, Term
from outsize.train.batch.loss_weights import LossShares, counted_each, doubt_of
from outsize.train.check.compare import TrainingSnapshot, relative_difference
from outsize.train.check.reference import undivided_loss

DividedBy = Literal["targets", "class weights", "samples", "values"]


@final
@dataclass(frozen=True, slots=True)
class CountedParts:
    """The microbatches of a batch, and the counter of each one's share of the loss."""

    parts: Sequence[Batch]
    counters: Sequence[LossShares]

    @property
    def doubt(self) -> str | None:
        """Returns why no weights give the loss of the batch; None where they do."""
        return doubt_of(self.counters, counted_each(self.counters, self.parts))

    def loss_counts(self, plain: MeanOfMeans | None) -> LossCounts | None:
        """Returns what the microbatches count; None where all count equally much."""
        counted = counted_each(self.counters, self.parts)
        counts = [part.denominators for part in counted]
        terms = [self._of_term(number, counts) for number in range(self._count)]
        uneven = [term for term in terms if term is not None and len(set(term.counts)) > 1]
        if not uneven:
            return None
        return LossCounts(terms=tuple(term for term in terms if term is not None), plain=plain)

    @property
    def _count(self) -> int:
        return min(len(counter.terms) for counter in self.counters)

    def _of_term(self, number: int, denominators: Sequence[Sequence[float | None]]) -> TermCounts | None:
        counts = [each[number] for each in denominators]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            return None  # it adds up
        return TermCounts(divided_by=_divided_by(self.counters[0].terms[number]), counts=tuple(known))


def mean_of_means(
    model: nn.Module, whole: TrainingSnapshot, parts: Sequence[Batch], loss_fn: LossFn | None
) -> MeanOfMeans:
    """Returns what a loop that divides each mean by the number of microbatches makes of the batch, beside the
    loss and gradients of the batch in one piece.
    """
    copy, total = model_copy(model), 0.0
    for part in parts:
        total += float(undivided_loss(copy, part.copied(), loss_fn, 1 / len(parts))) / len(parts)
    gradients = {n: p.grad for n, p in copy.named_parameters() if p.grad is not None}
    distance = relative_difference(whole, TrainingSnapshot(whole.loss, gradients))
    return MeanOfMeans(
        batch_loss=float(whole.loss), loss=_finite(total), gradients=_finite(distance), steps=len(parts)
    )


def whole_snapshot(model: nn.Module, loss: Tensor) -> TrainingSnapshot:
    """Returns the loss of the batch in one piece and its gradients."""
    return TrainingSnapshot(loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None})


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _divided_by(term: Term) -> DividedBy:
    measures: Sequence[Measure] = term.measures
    if all(isinstance(measure, Samples) for measure in measures):
        return "samples"
    last = measures[-1]
    if isinstance(last, Targets):
        return "targets" if last.class_weights is None else "class weights"
    return "values"
