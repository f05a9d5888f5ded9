"""Problem: a model runs in its own Python, so no tape says what its loss is divided by.

    output = model(part)                 the user's own Python
    loss   = loss_fn(output, target)     recorded on the output of the first microbatch

The loss function alone is recorded, as the loss of a model that returns its argument. What it divides by may
follow from targets, of which all microbatches are known before the first backward; not from outputs, nor can
terms be weighed one by one, since no program runs. A loss that the model computes itself is not seen at all.
Complexity: one recording for each signature of outputs and targets.
Oracle: tests/parity/test_counts.py.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, final

from torch import Tensor, nn

from outsize.capture.recording.fallbacks import LossFn, record
from outsize.errors import OutsizeError
from outsize.program.tape import Tape
from outsize.program.tree import map_leaves, tensors_in
from outsize.train.batch.batch import Batch
from outsize.train.batch.loss_trials import LossTrial
from outsize.train.batch.loss_weights import FROM_LOSS, Counted, Counting, LossShares, counted_each, doubt_of


@final
class _Returned(nn.Module):
    """A model that returns what it is given."""

    def forward(self, output: Any) -> Any:
        return output


@final
class OutputLoss:
    """Counts microbatches by what the loss function divides by.

    `doubt` says why the last ones count by samples; None where that is right.
    """

    def __init__(self, loss_fn: LossFn | None, counting: Counting = FROM_LOSS) -> None:
        self._loss_fn, self._counting = loss_fn, counting
        self._known: dict[Hashable, LossShares] = {}
        self.doubt: str | None = None

    def by_samples(self, parts: Sequence[Batch]) -> list[Counted]:
        """Returns the counts before any output is known."""
        return [Counted(part.size, summed=self._counting == "sum") for part in parts]

    def counted(self, output: Any, parts: Sequence[Batch]) -> list[Counted]:
        """Returns the counts of all microbatches; `output` is what the model returned for the first."""
        self.doubt = None
        if self._counting != FROM_LOSS or len(parts) == 1:
            return self.by_samples(parts)
        if self._loss_fn is None:
            self.doubt = "the model runs by modules and computes its loss itself, which no program shows"
            return self.by_samples(parts)
        if not parts[0].target:
            return self.by_samples(parts)
        returned = Batch((map_leaves(_detached, output),), {})
        try:
            examples = [self._example(returned, part) for part in parts]
            each = [self._shares(example) for example in examples]
            if any(place < len(tensors_in(output)) for shares in each for place in shares.inputs):
                self.doubt = "it divides by what follows from outputs of the model"
                return self.by_samples(parts)
            counted = counted_each(each, examples)
        except OutsizeError as error:
            self.doubt = f"the loss function cannot be recorded ({error.what})"
            return self.by_samples(parts)
        self.doubt = doubt_of(each, counted)
        return counted

    def _example(self, returned: Batch, part: Batch) -> Batch:
        """Returns the arguments of the loss for a microbatch, with outputs in the place of its own."""
        output = returned.resized(part.size).args if tensors_in(returned.args) else returned.args
        return Batch(output, {}, part.target)

    def _shares(self, example: Batch) -> LossShares:
        kind = tuple((tensor.shape, tensor.dtype) for tensor in example.tensors())
        known = self._known.get(kind)
        if known is None:
            known, guarded = self._made(example)
            if not guarded:
                self._known[kind] = known
        return known

    def _made(self, example: Batch) -> tuple[LossShares, bool]:
        """Returns the counter of an example, and whether it is right for its values alone."""
        tape = self._recorded(example)
        trial = LossTrial(self._loss_fn, example, self._recorded)
        shares = LossShares(tape, _Returned(), FROM_LOSS, trial, runs=replace(tape, instructions=()))
        return shares, bool(tape.guards)

    def _recorded(self, example: Batch) -> Tape:
        return record(_Returned(), example.args, {}, self._loss_fn, example.target)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
