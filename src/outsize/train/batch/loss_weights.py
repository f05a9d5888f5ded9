"""Computes the share of the batch's loss that each microbatch has, by counts of samples or targets.

A mean over the batch is the mean over microbatches weighted by what each mean was taken over: samples, the
targets that count, or a denominator of the loss's own. loss_denominators.py reads these off the tape; they
are evaluated on each microbatch before the step. A loss that adds up over samples weighs each by 1.
Where no weights follow from the tape, or the terms of the loss ask for different ones, samples are counted,
and `LossShares.doubt` or `terms_disagree` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from outsize.capture.guards.trace import without_writes
from outsize.capture.recording.fallbacks import LossFn
from outsize.device.accelerators import is_accelerator, widest_float
from outsize.device.readback import host_numbers
from outsize.errors import OutsizeError
from outsize.errors.interruptions import raise_interruption
from outsize.program.python_reads import LOSS
from outsize.program.reader import SlotReader, SlotValues, buffers_behind
from outsize.program.tape import Ref, Tape, Weight
from outsize.program.tree import map_leaves, map_tensors
from outsize.train.batch.batch import Batch
from outsize.train.batch.loss_denominators import (
    Denominators,
    Limit,
    Measure,
    Number,
    Samples,
    SlotValue,
    Targets,
    Term,
    Underivable,
)


@final
class UnknownShares(UserWarning):
    """Says that no weights of the microbatches were found that give the loss of the undivided batch."""


REJECTIONS: Final = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
"""A loss function raises one of these for shapes and values that it does not take."""
DEVICE_ERRORS: Final = (torch.OutOfMemoryError, torch.AcceleratorError)
_TRIED_SAMPLES: Final = 4
Counting = Literal["auto", "samples", "sum"]
FROM_LOSS: Final[Counting] = "auto"
Tapes = Callable[[Batch], Tape]


@final
class Counted(NamedTuple):
    """The counts from which the shares of microbatches follow.

    `samples` are those of the microbatch, `denominators` what each term of its loss was divided by (empty
    where no weights follow from the tape), `limits` the lower limits and constants that were applied to each
    of them. `summed` says that the loss adds up over samples.
    """

    samples: int
    denominators: tuple[float, ...] = ()
    limits: tuple[tuple[Limit, ...], ...] = ()
    summed: bool = False


@final
@dataclass(frozen=True, slots=True)
class LossTrial:
    """How to find out what a tape does not say: whether the loss adds up over samples.

    `example` is a microbatch of the tape; `record_again` records the tape of another number of samples. The
    loss function is tried on the devices that it computes on, where its own tensors are: those of the tape,
    with the target at `home` where there is one.
    """

    loss_fn: LossFn | None
    example: Batch
    record_again: Tapes
    home: torch.device | None = None


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
    ) -> None:
        """`home` is where the tape is; without a `trial` no loss is taken for a sum."""
        tape = _detailed(tape)
        summands = _summands(tape, trial) if counting == FROM_LOSS else ()
        terms = [term for term in summands if isinstance(term, Term)]
        self.doubt = next((x for x in summands if isinstance(x, Underivable)), None)
        self.summed, self.trial_error = counting == "sum", None
        if counting == FROM_LOSS and trial is not None:
            tried, self.trial_error = _adds_up(trial.loss_fn, tape, trial)
            self.summed = _is_sum(tape, terms, self.doubt, trial, tried)
        self._terms = [] if self.summed else [term for term in terms if term.measures]
        measures = [measure for term in self._terms for measure in term.measures]
        class_weights = [m.class_weights for m in measures if isinstance(m, Targets)]
        buffers = {weight.name for weight in class_weights if isinstance(weight, Weight)}
        self._reader = SlotReader(tape, model, _slots(measures), buffers, home)
        self.buffers = buffers_behind(tape, _slots(measures)) | buffers

    def of(self, parts: Sequence[Batch], each: Sequence[LossShares] | None = None) -> list[float]:
        """Returns weights that add up to 1, equal for equal microbatches; 1 for each when the loss is a sum.

        `each` holds the LossShares of the microbatches, where they have tapes of their own.
        """
        return shares_of(counted_each(each or [self] * len(parts), parts))

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
    return [
        Counted(part.size, count, shares.limits, shares.summed)
        for shares, part, count in zip(each, parts, counts, strict=True)
    ]


def _measured(measure: Measure, part: Batch, values: SlotValues) -> float | Tensor:
    """Returns one measure; an integer, or a tensor of integers, where it counts."""
    if isinstance(measure, Samples):
        return part.size
    if isinstance(measure, Number):
        return measure.value
    if isinstance(measure, SlotValue):
        return values.slots[measure.slot]
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
        if isinstance(measure, SlotValue):
            slots.append(measure.slot)
        if isinstance(measure, Targets):
            weights = measure.class_weights
            slots += [measure.target, weights.slot] if isinstance(weights, Ref) else [measure.target]
    return slots


def shares_of(counted: Sequence[Counted]) -> list[float]:
    """Weights of all microbatches of a batch, as `LossShares.of` gives them."""
    if counted[0].summed:
        return [1.0] * len(counted)
    columns = _columns(counted)
    if not columns or terms_disagree(counted):
        return _shares([part.samples for part in counted], ())
    return columns[0]


def terms_disagree(counted: Sequence[Counted]) -> bool:
    """Whether the terms of the loss ask for different weights: means over samples and over tokens, say."""
    first, *others = _columns(counted) or [[]]
    return any(not math.isclose(a, b, rel_tol=1e-9) for o in others for a, b in zip(first, o, strict=True))


def _columns(counted: Sequence[Counted]) -> list[list[float]]:
    """The weights that each term asks for; none where microbatches have different terms."""
    if len({(len(part.denominators), part.limits) for part in counted}) > 1:
        return []
    columns = zip(*(part.denominators for part in counted), strict=True)
    return [
        _shares(c, limits) for c, limits in zip(columns, counted[0].limits, strict=True) if sum(c) or limits
    ]


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
    if not counted[0].summed and terms_disagree(counted):
        return "its terms are means over different counts, such as samples and tokens"
    return None


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


def _summands(tape: Tape, trial: LossTrial | None) -> tuple[Term | Underivable, ...]:
    """The summands of the loss; where one is no term, a tape of more samples shows where samples lie."""
    summands = Denominators(tape).loss
    if trial is None or all(isinstance(summand, Term) for summand in summands):
        return summands
    try:
        grown = _doubled_tape(trial)
    except OutsizeError:  # the user's forward takes no other number of samples
        return summands
    return Denominators(tape, grown).loss


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


def _adds_up(loss_fn: LossFn | None, tape: Tape, trial: LossTrial) -> tuple[bool | None, Exception | None]:
    """Whether the loss of two samples is twice that of one. Tried on random outputs of the model's shapes.

    Every one of the first samples has to say so: a divisor with a lower limit does not move where a sample
    has nothing that counts. None, and what it raised, for a loss function that takes no such outputs, and
    where no sample says anything. Raises what says that the device is in no state to compute.
    """
    if loss_fn is None or LOSS in tape.live:
        return None, None  # A live one draws from a generator of its own, which a trial would move.
    draw, part = torch.Generator().manual_seed(0), trial.example
    output = map_leaves(lambda leaf: _drawn(leaf, tape, part.size, draw), tape.output)
    answers = list[bool]()
    for sample in range(min(part.size, _TRIED_SAMPLES)):
        try:
            once = _tried(loss_fn, output, _samples(part, [sample], trial.home))
            twice = _tried(loss_fn, map_leaves(_doubled, output), _samples(part, [sample] * 2, trial.home))
        except DEVICE_ERRORS:
            raise
        except Exception as error:  # any code of the user's may run in a loss function; the engine says what
            raise_interruption(error)
            return None, error
        if once != 0 and math.isfinite(once) and math.isfinite(twice):
            answers.append(math.isclose(twice, 2 * once, rel_tol=1e-3))
    return (all(answers) if answers else None), None


def _tried(loss_fn: LossFn, output: Any, target: tuple[Any, ...]) -> float:
    """The loss of made-up values; what the loss function writes is taken back."""
    with torch.no_grad(), without_writes(loss_fn):
        return float(loss_fn(output, *target))


def _drawn(leaf: Any, tape: Tape, samples: int, draw: torch.Generator) -> Any:
    """One sample of an output: between 0 and 1, which is a logit, a probability and a pixel."""
    if not isinstance(leaf, Ref):
        return leaf
    meta, shape = tape.metas[leaf.slot], list(tape.metas[leaf.slot].shape)
    if samples in shape:
        shape[shape.index(samples)] = 1
    return torch.rand(shape, generator=draw).to(meta.device, meta.dtype)


def _doubled(leaf: Any) -> Any:
    alone = isinstance(leaf, Tensor) and 1 in leaf.shape
    return torch.cat([leaf, leaf], list(leaf.shape).index(1)) if alone else leaf


def _samples(part: Batch, numbers: list[int], device: torch.device | None) -> tuple[Any, ...]:
    """The target of these samples, on a device."""
    target = part.take(torch.tensor(numbers)).target
    return target if device is None else map_tensors(lambda tensor: tensor.to(device), target)
