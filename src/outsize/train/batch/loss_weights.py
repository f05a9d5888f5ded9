"""Computes the share of the batch's loss that each microbatch has, by counts of samples or targets.

A mean over the batch is the mean over microbatches weighted by what each mean was taken over: samples, the
targets that count, or a denominator of the loss's own. loss_denominators.py reads these off the tape; they
are evaluated on each microbatch before the step. A loss that adds up over samples weighs each by 1. Where the
terms of the loss ask for different weights, a microbatch weighs by its samples, and the program weighs each
term relative to that (loss_terms.py). Where it cannot, or no weights follow from the tape, samples alone are
counted, and `doubt_of` says so.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Final, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from outsize.device.accelerators import is_accelerator, widest_float
from outsize.device.readback import host_numbers
from outsize.errors import OutsizeError
from outsize.program.reader import SlotReader, SlotValues, buffers_behind
from outsize.program.source_line import warn_user
from outsize.program.tape import Ref, Tape, Weight
from outsize.train.batch.batch import Batch
from outsize.train.batch.loss_denominators import (
    Denominators,
    Limit,
    Measure,
    Number,
    Samples,
    SlotSum,
    SlotValue,
    Targets,
    Term,
    Underivable,
)
from outsize.train.batch.loss_terms import NONE, can_weigh, terms_apart
from outsize.train.batch.loss_trials import REJECTIONS, LossTrial, trial_of


@final
class UnknownShares(UserWarning):
    """Says that no weights of the microbatches were found that give the loss of the undivided batch."""


Counting = Literal["auto", "samples", "sum"]
FROM_LOSS: Final[Counting] = "auto"


@final
class Counted(NamedTuple):
    """The counts from which the shares of microbatches follow.

    `samples` are those of the microbatch, `denominators` what each term of its loss was divided by (empty
    where no weights follow from the tape), `limits` the lower limits and constants that were applied to each
    of them. `summed` says that the loss adds up over samples. A denominator is None for a term that does,
    beside others that do not. `weighs` says that the program can weigh its terms one by one.
    """

    samples: int
    denominators: tuple[float | None, ...] = ()
    limits: tuple[tuple[Limit, ...], ...] = ()
    summed: bool = False
    weighs: bool = False


@final
class PartWeights(NamedTuple):
    """The share of a microbatch in the loss, and the ratios to it of the shares of single terms; none where
    its program weighs no terms.
    """

    share: float
    ratios: tuple[float, ...] = ()


@final
class LossShares:
    """Computes the weights of microbatches for one tape; what follows from the tape alone is computed once.

    `doubt` is the instruction after which no weights follow from the tape; None where they all do. `buffers`
    are those that `counted` reads. `trial_error` is what the loss function raised when it was tried.
    """

    def __init__(
        self,
        tape: Tape,
        model: nn.Module,
        counting: Counting = FROM_LOSS,
        trial: LossTrial | None = None,
        home: torch.device | None = None,
        runs: Tape | None = None,
    ) -> None:
        """`home` is where the tape is; without a `trial` no loss is taken for a sum. `runs` is the form of
        the tape that is run.
        """
        whole, tape = tape, _detailed(tape)
        found = _interpreted(tape, trial) if counting == FROM_LOSS else None
        summands = () if found is None else found.loss
        terms = [term for term in summands if isinstance(term, Term)]
        self.doubt = next((x for x in summands if isinstance(x, Underivable)), None)
        self.summed, self.trial_error = counting == "sum", None
        if counting == FROM_LOSS and trial is not None:
            tried = trial_of(trial, tape, model)
            self.trial_error = tried.error
            self.summed = _is_sum(tape, terms, self.doubt, trial, tried.adds_up)
            is_one_mean = all(term.weighs_as(terms[0]) for term in terms if not term.constant)
            if tried.mixed is not None and self.doubt is None and is_one_mean:
                self.doubt = Underivable(tried.mixed.where, tried.mixed.name)
        apart = None if self.summed or found is None or tape is not whole else terms_apart(found)
        if apart is not None and not can_weigh(tape, apart[1], runs):
            apart = None
        self.sums = NONE if apart is None else apart[1]
        self._terms = [] if self.summed else [term for term in terms if term.measures]
        if apart is not None:
            self._terms = [_scaled(term, tape, trial) for term in apart[0]]
        measures = [measure for term in self._terms for measure in term.measures]
        class_weights = [m.class_weights for m in measures if isinstance(m, Targets)]
        buffers = {weight.name for weight in class_weights if isinstance(weight, Weight)}
        self._read = partial(SlotReader, model=model, slots=_slots(measures), buffers=buffers, home=home)
        self._reader = self._read(tape)
        self.buffers = buffers_behind(tape, _slots(measures)) | buffers
        # A number that a term was divided by may be a length.
        self.holds_at_all_lengths = tape is whole and all(term.number is None for term in terms)

    def at(self, tape: Tape) -> LossShares:
        """Returns the same for the same program at other lengths, where it holds there."""
        other = copy.copy(self)
        other._reader = self._read(tape)
        return other

    def of(self, parts: Sequence[Batch], each: Sequence[LossShares] | None = None) -> list[float]:
        """Returns weights that add up to 1, equal for equal microbatches; 1 for each when the loss is a sum.

        `each` holds the LossShares of the microbatches, where they have tapes of their own.
        """
        return shares_of(counted_each(each or [self] * len(parts), parts))

    @property
    def ratios(self) -> int:
        """Returns how many terms the program can weigh one by one; 0 where it weighs none."""
        return len(self._terms) if self.sums else 0

    @property
    def inputs(self) -> Sequence[int]:
        """Returns the places of the inputs from which the counts follow."""
        return self._reader.places

    @property
    def terms(self) -> Sequence[Term]:
        """Returns the terms whose counts `measured` measures."""
        return self._terms

    @property
    def divides(self) -> tuple[bool, ...]:
        """Returns which terms are divided by something."""
        return tuple(bool(term.measures) for term in self._terms)

    def measured(self, part: Batch) -> list[list[float | Tensor]]:
        """Returns the measures of each term in one microbatch, without limits; tensors are 0-dim."""
        if not self._terms:
            return []
        values = self._reader.read(part.tensors())
        return [[_measured(m, part, values) for m in term.measures] for term in self._terms]

    @property
    def limits(self) -> tuple[tuple[Limit, ...], ...]:
        """Returns the lower limits and constants of each term."""
        return tuple(term.limits for term in self._terms)


def counted_each(each: Sequence[LossShares], parts: Sequence[Batch]) -> list[Counted]:
    """Returns the counts of microbatches, each by its own LossShares.

    All numbers are read from a device at once, so the host waits for it once.
    """
    measured = [shares.measured(part) for shares, part in zip(each, parts, strict=True)]
    numbers = iter(host_numbers([m for terms in measured for m in chain.from_iterable(terms)]))
    # Each divisor was divided by the measures before it, so the numerator of the last is the product.
    counts = [tuple(math.prod(next(numbers) for _ in term) for term in terms) for terms in measured]
    known = [
        tuple(n if divides else None for n, divides in zip(count, shares.divides, strict=True))
        for shares, count in zip(each, counts, strict=True)
    ]
    return [
        Counted(part.size, count, shares.limits, shares.summed, bool(shares.sums))
        for shares, part, count in zip(each, parts, known, strict=True)
    ]


def _measured(measure: Measure, part: Batch, values: SlotValues) -> float | Tensor:
    """Returns one measure; an integer, or a tensor of integers, where it counts."""
    if isinstance(measure, Samples):
        return part.size
    if isinstance(measure, Number):
        return measure.value
    if isinstance(measure, SlotValue):
        return values.slots[measure.slot]
    if isinstance(measure, SlotSum):
        return values.slots[measure.slot].sum()
    targets, weights = values.slots[measure.target], measure.class_weights
    counts = targets != measure.ignore_index
    if weights is None:
        return torch.count_nonzero(counts)
    table = values.slots[weights.slot] if isinstance(weights, Ref) else values.buffers[weights.name]
    if is_accelerator(targets.device):  # The length of a selection is a number for which the host waits.
        return (table.to(widest_float(table.device))[targets.masked_fill(~counts, 0)] * counts).sum()
    return table.double()[targets[counts]].sum()


def _slots(measures: Sequence[Measure]) -> list[int]:
    slots: list[int] = []
    for measure in measures:
        if isinstance(measure, SlotValue | SlotSum):
            slots.append(measure.slot)
        if isinstance(measure, Targets):
            weights = measure.class_weights
            slots += [measure.target, weights.slot] if isinstance(weights, Ref) else [measure.target]
    return slots


def shares_of(counted: Sequence[Counted]) -> list[float]:
    """Weights of all microbatches of a batch, as `LossShares.of` gives them."""
    return [weights.share for weights in weights_of(counted)]


def weights_of(counted: Sequence[Counted]) -> list[PartWeights]:
    """Shares of all microbatches of a batch, with the ratios of terms where their programs weigh these."""
    if counted[0].summed:
        return [PartWeights(1.0)] * len(counted)
    all_columns = _columns(counted)
    columns = [column for column in all_columns if column is not None]
    # A mean over nothing in all of the batch is NaN, as it is of the undivided one.
    ones = tuple(math.nan if column is None else 1.0 for column in all_columns)
    equal = [(ones or (1.0,) * len(part.denominators)) if part.weighs else () for part in counted]
    if columns and not terms_disagree(counted):
        return list(map(PartWeights, columns[0], equal))
    by_samples = _shares([part.samples for part in counted], ())
    if not columns or not _weigh_terms(counted):
        return list(map(PartWeights, by_samples, equal))
    nothing = [math.nan] * len(counted)
    ratios = ([a / b for a, b in zip(each or nothing, by_samples, strict=True)] for each in all_columns)
    return list(map(PartWeights, by_samples, zip(*ratios, strict=True)))


def terms_disagree(counted: Sequence[Counted]) -> bool:
    """Whether the terms of the loss ask for different weights: means over samples and over tokens, say."""
    first, *others = [column for column in _columns(counted) if column is not None] or [[]]
    return any(not math.isclose(a, b, rel_tol=1e-9) for o in others for a, b in zip(first, o, strict=True))


def _weigh_terms(counted: Sequence[Counted]) -> bool:
    """Whether all microbatches have programs that weigh their terms."""
    return all(part.weighs for part in counted)


def _columns(counted: Sequence[Counted]) -> list[list[float] | None]:
    """The weights that each term asks for, None where nothing counts for it; no terms where microbatches have
    different ones.
    """
    kinds = {(tuple(n is None for n in part.denominators), part.limits) for part in counted}
    if len(kinds) > 1:
        return []
    columns = zip(*(part.denominators for part in counted), strict=True)
    return [_column(c, limits) for c, limits in zip(columns, counted[0].limits, strict=True)]


def _column(counts: Sequence[float | None], limits: Sequence[Limit]) -> list[float] | None:
    known = [count for count in counts if count is not None]
    if not known:
        return [1.0] * len(counts)
    return _shares(known, limits) if sum(known) or limits else None


def _shares(counts: Sequence[float], limits: Sequence[Limit]) -> list[float]:
    """Under a lower limit, what was divided counts also where there was nothing to divide it by: the negative
    samples of a focal loss beside a number of positives.
    """
    whole = _limited(sum(counts), limits)
    return [_limited(count, limits) / whole if count or limits else 0.0 for count in counts]


def _limited(count: float, limits: Sequence[Limit]) -> float:
    for kind, number in limits:
        count = max(count, number) if kind == "min" else count + number
    return count


def doubt_of(each: Sequence[LossShares], counted: Sequence[Counted]) -> str | None:
    """Why the weights may not give the loss of the undivided batch; None where they do."""
    if len(counted) == 1:
        return None
    unsure = next((shares for shares in each if shares.doubt is not None), None)
    if unsure is not None and unsure.doubt is not None:
        tried = "" if unsure.trial_error is None else f", and {trial_text(unsure.trial_error)}"
        return f"{unsure.doubt.name} ({unsure.doubt.where}) does not add up over samples{tried}"
    if not counted[0].summed and terms_disagree(counted) and not _weigh_terms(counted):
        return "its terms are means over different counts, such as samples and tokens"
    return None


@final
class ShareWarnings:
    """Says once that the shares of microbatches in the loss cannot be derived."""

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        self._of_doubt = self._of_trial = False

    def warn(self, doubt: str | None, unexpected: Exception | None = None) -> None:
        """Says once, on rank 0, that the weights of the microbatches do not follow from the loss."""
        if unexpected is not None and not self._of_trial and self._speaks:
            warn_user(f"{trial_text(unexpected)}; its tape decided", UnknownShares)
        self._of_trial |= unexpected is not None
        if doubt is not None and not self._of_doubt and self._speaks:
            warn_user(
                f"the share of each microbatch in the loss cannot be derived: {doubt}; they count by their "
                "samples, which may not give the loss of the whole batch. outsize check shows by how much; "
                "model = outsize.split(model, (x,)) and a loss of model(x) in your loop is that of the batch",
                UnknownShares,
            )
        self._of_doubt |= doubt is not None


def unexpected_of(each: Sequence[LossShares]) -> Exception | None:
    """Returns the first error of a loss trial that shapes and values do not explain, or None."""
    errors = (shares.trial_error for shares in each if shares.trial_error is not None)
    return next((error for error in errors if not isinstance(error, REJECTIONS)), None)


def trial_text(error: Exception) -> str:
    """Returns the words that name an error which the loss function raised in its trial."""
    return f"a trial of the loss function raised {type(error).__name__}: {error}"


# -- does the loss add up over samples? ------------------------------------------------------------------


def _detailed(tape: Tape) -> Tape:
    """The tape on which the loss is recorded op by op, also where it runs live."""
    return tape.loss_detail or tape


def _interpreted(tape: Tape, trial: LossTrial | None) -> Denominators:
    """The interpretation of the tape; where a summand of the loss is no term, or a sum beside others, a tape
    of more samples shows where samples lie, and what all samples share.
    """
    found = Denominators(tape)
    terms = [summand for summand in found.loss if isinstance(summand, Term)]
    is_known = len(terms) == len(found.loss) and not (len(terms) > 1 and any(t.adds_up for t in terms))
    if trial is None or is_known:
        return found
    try:
        grown = _doubled_tape(trial)
    except OutsizeError:  # the user's forward takes no other number of samples
        return found
    return Denominators(tape, grown)


def _scaled(term: Term, tape: Tape, trial: LossTrial | None) -> Term:
    """A sum over samples by a number that grows with them is a mean."""
    if not term.adds_up or term.number is None or trial is None:
        return term
    return replace(term, measures=(Samples(),)) if _scale([term.number], tape, trial) else term


def _doubled_tape(trial: LossTrial) -> Tape:
    return _detailed(trial.record_again(trial.example.resized(2 * trial.example.size)))


def _is_sum(
    tape: Tape, terms: Sequence[Term], doubt: Underivable | None, trial: LossTrial, tried: bool | None
) -> bool:
    """Whether every summand adds up over samples; where the tape does not say, what was `tried` does."""
    if doubt is None and any(kind == "min" for term in terms for kind, _ in term.limits):
        return False  # A trial does not see through a lower limit.
    if tried is not None and (tried or doubt is not None):
        return tried
    if doubt is not None or not terms or any(t.measures or t.constant for t in terms):
        return False
    numbers = [term.number for term in terms if term.number is not None]
    if not numbers:
        return True
    return tried is None and not _scale(numbers, tape, trial)


def _scale(numbers: Sequence[tuple[int, float]], tape: Tape, trial: LossTrial) -> bool:
    """Whether any of these numbers on the tape is another one where there are twice as many samples."""
    other = _doubled_tape(trial)
    if len(other.instructions) != len(tape.instructions):
        return True
    return any(number not in other.instructions[index].args for index, number in numbers)
