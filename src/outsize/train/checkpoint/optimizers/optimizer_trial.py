"""Finds out by trial whether an optimizer goes on from what it saves.

    one small model   step step step | step step step        the run that nobody interrupts
    another one                      | step step step        goes on from what the first has saved there

Both have the same gradients and draw the same random numbers. Where their weights differ, the optimizer keeps
something that its `state_dict()` does not have, and a run that goes on would be another one without a word.
What the factory cannot be called for (small weights, on the CPU) is not tried, and neither is an optimizer
whose steps differ from run to run anyway.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from outsize.errors import BadOption
from outsize.run.stage.rng import borrowed_generators, seed_all
from outsize.train.checkpoint.optimizers.optimizer_states import NamedOptimizer, merged
from outsize.train.checkpoint.regions import Division, Located, Sizes, located

MakeOptimizer = Callable[[Any], Any]
_BEFORE, _AFTER = 7, 7  # more than the five or six steps after which slow weights follow
# Some optimizers take matrices alone.
_SHAPES: Final[Sequence[Sequence[Sizes]]] = (((6, 4), (6,), (4, 6), (4,)), ((8, 4), (4, 8), (8, 8)))


def insist_on_resumable(make: MakeOptimizer) -> None:
    """Raises BadOption where the optimizer that `make` makes would not go on as it was.

    It is made of small weights a few times; generators are left as they were.
    """
    with borrowed_generators(), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        for shapes in _SHAPES:
            trial = _OptimizerTrial(make, shapes)
            try:
                optimizer = trial.begun()
            except Exception:
                # The factory is the user's code: it may want names of its model or a GPU, and raise anything
                # without. The run itself calls it too, and says better what is wrong.
                continue
            trial.insist(optimizer)
            return


Run = tuple[list[nn.Parameter], Any]


@final
class _OptimizerTrial:
    """An optimizer over weights of some shapes."""

    def __init__(self, make: MakeOptimizer, shapes: Sequence[Sizes]) -> None:
        self._make, self._shapes = make, shapes

    def begun(self) -> Run:
        """Returns weights and their optimizer after the first steps; raises what these raise."""
        return _stepped(self._fresh(), 0, _BEFORE)

    def insist(self, run: Run) -> None:
        """Raises BadOption where steps after going on are others than without."""
        weights, optimizer = run
        named = NamedOptimizer(optimizer, _SmallWeights(weights), "optimizer")
        facts = json.loads(json.dumps(merged([named.facts()])))
        tensors = _SavedTensors({part.name: part.tensor.detach().clone() for part in named.parts()})
        other, again = self._fresh()
        for weight, saved in zip(other, weights, strict=True):
            weight.data.copy_(saved.data)
        NamedOptimizer(again, _SmallWeights(other), "optimizer").restore(facts, tensors)
        lost = _differing_values(optimizer, again)
        try:
            _stepped((other, again), _BEFORE, _AFTER)
        except Exception as error:
            raise _not_resumable(named.kind, f"its next step raises {error!r}", lost) from error
        distance = _distance(_stepped(run, _BEFORE, _AFTER)[0], other)
        if distance and not _distance(weights, _stepped(self.begun(), _BEFORE, _AFTER)[0]):
            raise _not_resumable(named.kind, f"weights are off by {distance:.1e}", lost)

    def _fresh(self) -> tuple[list[nn.Parameter], Any]:
        draws = torch.Generator().manual_seed(1)
        weights = [nn.Parameter(torch.randn(shape, generator=draws)) for shape in self._shapes]
        seed_all(2)
        # One that exists already must not take these weights for its own.
        make = getattr(self._make, "tried", self._make)
        return weights, make(list(weights))


def _stepped(run: Run, first: int, count: int) -> Run:
    """Takes steps with gradients, a loss and draws that follow from the number of the step alone."""
    weights, optimizer = run
    begin_training = getattr(optimizer, "train", None)
    if callable(begin_training):
        begin_training()  # as those without a schedule want it
    for step in range(first, first + count):
        seed_all(step)
        draws = torch.Generator().manual_seed(step)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draws)
        loss = torch.rand((), generator=draws)
        optimizer.step(lambda loss=loss: loss)
    return weights, optimizer


@final
class _SmallWeights:
    """Names small weights of one rank, which has all of each."""

    rank = 0

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = {str(number): weight for number, weight in enumerate(weights)}

    def tensors(self) -> Mapping[str, Tensor]:
        return self._weights

    def division(self, name: str) -> Division | None:
        return None

    def placed(self, name: str, tensor: Tensor, division: Division | None) -> Located:
        return located(tensor)


@final
class _SavedTensors:
    """Tensors in memory, as those of a checkpoint are read."""

    folder = Path("memory")

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> Sizes:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].dtype

    def read(self, name: str, offsets: Sizes | None = None, sizes: Sizes | None = None) -> Tensor:
        tensor = self._tensors[name]
        for dim, (start, size) in enumerate(zip(offsets or (), sizes or (), strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor


def _distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Returns the largest difference of two lists of weights; infinity where one alone is not finite."""
    gaps = (torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=0.0) for a, b in _equal_nan(one, other))
    return max(float(gap.max()) for gap in gaps)


def _equal_nan(one: Sequence[Tensor], other: Sequence[Tensor]) -> Iterable[tuple[Tensor, Tensor]]:
    for a, b in zip(one, other, strict=True):
        apart = a.isnan() != b.isnan()
        yield a.detach().masked_fill(apart, torch.inf), b.detach().masked_fill(apart, 0.0)


def _differing_values(one: Any, other: Any) -> list[str]:
    """Returns the plain attributes of an optimizer that are others after it was loaded."""
    values = {key: value for key, value in vars(one).items() if isinstance(value, bool | int | float | str)}
    there = {key: getattr(other, key, None) for key in values}
    return [f"{key} {value!r} -> {there[key]!r}" for key, value in values.items() if there[key] != value]


def _not_resumable(kind: str, what: str, lost: Sequence[str]) -> BadOption:
    hint = f"; not in it: {', '.join(lost[:3])}" if lost else ""
    return BadOption(
        f"a run that goes on with {kind} would be another one: its state_dict() does not have all that its "
        "steps need",
        numbers=f"small weights, {_BEFORE} steps, saved and loaded, {_AFTER} more: {what}{hint}",
        next_step="a state_dict() and a load_state_dict() with all of it; "
        "engine.weights.full_state_dict(to=FOLDER) "
        "saves the weights alone",
    )
