"""Tries a loss function on made-up outputs of single samples, to find out what its tape does not say.

    one sample, and the same one twice        does the loss add up over samples?
    two samples, together and one by one      is it a mean over samples, by whatever weights?

For the second question the outputs are drawn several times over the same targets, on which alone the weights
may depend: a loss that is no weighted sum of those of its samples, for any weights, mixes samples with each
other. Complexity: at most 2 x 4 + 3 x 4 x 2 calls of the loss function, on two samples at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn

from outsize.capture.guards.trace.undone_writes import without_writes
from outsize.capture.recording.fallbacks import LossFn
from outsize.errors.interruptions import raise_interruption
from outsize.program.python_reads import LOSS
from outsize.program.tape import Ref, Tape, Weight
from outsize.program.tree import leaves, map_leaves, map_tensors
from outsize.program.weights.lookup import weight_named
from outsize.run.stage.rng import borrowed_generators
from outsize.train.batch.batch import Batch

REJECTIONS: Final = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
"""A loss function raises one of these for shapes and values that it does not take."""
DEVICE_ERRORS: Final = (torch.OutOfMemoryError, torch.AcceleratorError)
_TRIED_SAMPLES: Final = 4
_DRAWS: Final = 4
_MOST_ELEMENTS: Final = 1 << 20
_MIXES: Final = 1e-3
"""The part of a loss that no weights explain, from which on it mixes samples; roundings are below it."""
Tapes = Callable[[Batch], Tape]


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
class Mixed(NamedTuple):
    """Names a loss function that mixes samples."""

    where: str
    name: str


@final
class TrialResult(NamedTuple):
    """Holds what a trial has found: whether the loss of two samples is twice that of one, None where no
    sample says so; whether it mixes samples; and what the loss function raised.
    """

    adds_up: bool | None = None
    mixed: Mixed | None = None
    error: Exception | None = None


def trial_of(trial: LossTrial, tape: Tape, model: nn.Module) -> TrialResult:
    """Tries the loss function on random outputs of the model's shapes. Raises what says that the device is in
    no state to compute.
    """
    loss_fn = trial.loss_fn
    if loss_fn is None or LOSS in tape.live:
        return TrialResult()  # A live one draws from a generator of its own, which a trial would move.
    calls, adds_up, mixes = _Calls(loss_fn, tape, model, trial), None, False
    try:
        with borrowed_generators():
            adds_up = calls.adds_up()
            mixes = any(calls.mixes())
    except DEVICE_ERRORS:
        raise
    except Exception as error:  # any code of the user's may run in a loss function; the engine says what
        raise_interruption(error)
        return TrialResult(adds_up, error=error)
    return TrialResult(adds_up, _place_of(loss_fn) if mixes else None)


@final
class _Calls:
    """Calls of a loss function on made-up outputs of some of the samples of a microbatch."""

    def __init__(self, loss_fn: LossFn, tape: Tape, model: nn.Module, trial: LossTrial) -> None:
        self._loss_fn, self._tape, self._part, self._home = loss_fn, tape, trial.example, trial.home
        self._model, self._draw = model, torch.Generator().manual_seed(0)
        sizes = (prod(tape.metas[slot].shape) for slot in tape.output_slots())
        is_small = sum(sizes) <= _MOST_ELEMENTS * trial.example.size
        self._is_tried = is_small and not any(instruction.random for instruction in tape.instructions)

    def adds_up(self) -> bool | None:
        """Whether the loss of two samples is twice that of one. Every one of the first samples has to say so:
        a divisor with a lower limit does not move where a sample has nothing that counts.
        """
        output, answers = self._outputs(), list[bool]()
        for sample in range(min(self._part.size, _TRIED_SAMPLES)):
            once, twice = self._loss(output, [sample]), self._loss(_joined(output, output), [sample] * 2)
            if once != 0 and math.isfinite(once) and math.isfinite(twice):
                answers.append(math.isclose(twice, 2 * once, rel_tol=1e-3))
        return all(answers) if answers else None

    def mixes(self) -> Iterator[bool]:
        """Yields for pairs of samples whether no weights make their loss of the losses of each. Not for what
        draws random numbers, nor for outputs of many elements, which would take seconds.
        """
        samples = range(min(self._part.size, _TRIED_SAMPLES))
        pairs = list(combinations(samples, 2)) or [(0, 0)]
        for first, second in pairs[:2] if self._is_tried else ():
            rows = [self._of_pair(first, second) for _ in range(_DRAWS)]
            if all(math.isfinite(number) for row in rows for number in row):
                yield _is_unexplained(torch.tensor(rows, dtype=torch.float64))

    def _of_pair(self, first: int, second: int) -> tuple[float, float, float]:
        one, other = self._outputs(), self._outputs()
        both = self._loss(_joined(one, other), [first, second])
        return self._loss(one, [first]), self._loss(other, [second]), both

    def _loss(self, output: Any, samples: list[int]) -> float:
        """The loss of made-up values; what the loss function writes is taken back."""
        target = self._part.take(torch.tensor(samples)).target
        if self._home is not None:
            target = map_tensors(lambda tensor: tensor.to(self._home), target)
        with torch.no_grad(), without_writes(self._loss_fn):
            return float(self._loss_fn(output, *target))

    def _outputs(self) -> Any:
        return map_leaves(self._drawn, self._tape.output)

    def _drawn(self, leaf: Any) -> Any:
        """One sample of an output: between 0 and 1, which is a logit, a probability and a pixel. A weight
        that the model returns is itself.
        """
        if isinstance(leaf, Weight):
            return weight_named(self._model, leaf.name).detach()
        if not isinstance(leaf, Ref):
            return leaf
        meta, samples = self._tape.metas[leaf.slot], self._part.size
        shape = list(meta.shape)
        if samples in shape:
            shape[shape.index(samples)] = 1
        return torch.rand(shape, generator=self._draw).to(meta.device, meta.dtype)


def _is_unexplained(rows: Tensor) -> bool:
    """Whether the third column is no weighted sum of the others."""
    singles, both = rows[:, :2], rows[:, 2:]
    weights = torch.linalg.lstsq(singles, both, driver="gelsd").solution
    missing = (singles @ weights - both).abs().max()
    return bool(missing > _MIXES * rows.abs().max())


def _place_of(loss_fn: LossFn) -> Mixed:
    code = getattr(loss_fn, "__code__", None) or getattr(getattr(loss_fn, "forward", None), "__code__", None)
    where = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"
    return Mixed(where or "the loss function", getattr(loss_fn, "__name__", type(loss_fn).__name__))


def _joined(output: Any, other: Any) -> Any:
    """The outputs of two samples."""
    others = iter(leaves(other))

    def both(leaf: Any) -> Any:
        beside = next(others)
        alone = isinstance(leaf, Tensor) and 1 in leaf.shape
        return torch.cat([leaf, beside], list(leaf.shape).index(1)) if alone else leaf

    return map_leaves(both, output)
