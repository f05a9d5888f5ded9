"""Does a framework's trainer compute split what it computes plain? Two updates of each, number by number.

    fork 1    the trainer without its split    logged numbers, gradients, weights of each update
    fork 2    the trainer as it is             the same
    compared in the order in which they come: the first that differs has its name and its update

Each run is a fork, so the caller's trainer, its data and its generators stay as they are.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor

from outsize.errors import BadOption
from outsize.ir.answers.verdict import Verdict
from outsize.ir.plan import Plan
from outsize.run.transport.values import read_value, write_value
from outsize.train.check.compare import TrainingSnapshot, difference, relative_difference
from outsize.train.check.worker import Ambient
from outsize.train.world.local_ranks import can_fork, run_in_forks

UPDATES: Final = 2


@final
@dataclass(frozen=True, slots=True)
class TrainerUpdate:
    """Holds what a trainer has logged of one update, its gradients, and the weights after it."""

    logged: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class TrainerRun:
    """Some updates of a trainer; `plan` is None for a plain one. `divides` says whether a batch of the
    trainer is several microbatches.
    """

    updates: Sequence[TrainerUpdate]
    plan: Plan | None
    divides: bool = False


class CheckedTrainer(Protocol):
    """A trainer that runs split, and can run as if it were not."""

    def observed(self, updates: int, *, split: bool) -> TrainerRun:
        """Trains for so many updates, and returns what it has seen; this process is not used again."""
        ...


@final
@dataclass(frozen=True, slots=True)
class _Difference:
    what: str
    size: float
    text: str


def check_trainer(trainer: Any, updates: int = UPDATES) -> Verdict:
    """Returns the verdict on a trainer, which is left as it is.

    Raises BadOption for what is no trainer of outsize's integrations, and where no fork can compute.
    """
    if not callable(getattr(trainer, "observed", None)):
        raise BadOption(
            f"the trainer is a {type(trainer).__name__}, which does not run split",
            next_step="class Split(outsize.integrations.transformers.Trainer, "
            f"{type(trainer).__name__}): ..., and Split(..., outsize={{'stages': 2}})",
        )
    if not can_fork():
        raise BadOption(
            "a trainer is checked in forks of this process, which cannot compute here",
            numbers="an accelerator or a group of ranks is in use, or this is no Linux",
            next_step="check a small model of the same kind where no accelerator is visible",
        )
    with tempfile.TemporaryDirectory(prefix="outsize-check-") as folder:
        start = time.perf_counter()
        plain = _run(trainer, updates, Path(folder), split=False)
        between = time.perf_counter()
        split = _run(trainer, updates, Path(folder), split=True)
        end = time.perf_counter()
    found = list(_differences(plain, split))
    plan = split.plan
    assert plan is not None
    rounds = split.divides or bool(plan.axes.group_size > 1)
    relative = _relative(plain, split) if rounds else None
    sizes = {what: max((d.size for d in found if d.what == what), default=0.0) for what in _KINDS}
    verdict = Verdict(
        model=f"{type(trainer).__name__} of {plan.model}",
        bit_equal=not found,
        loss_diff=sizes["logged"],
        grad_diff=sizes["gradient"],
        buffer_diff=0.0,
        parameter_diff=sizes["weight"],
        first_divergence=None,
        stages=tuple(stage.units for stage in plan.stages),
        schedule=plan.schedule,
        microbatches=plan.microbatches,
        processes=0,
        capture_s=0.0,
        run_s=end - between,
        notes=tuple(_notes(plan, updates, between - start, split.divides)),
        relative_diff=relative,
    )
    return verdict if verdict.holds else verdict.model_copy(update={"first_divergence": found[0].text})


_KINDS: Final = ("logged", "gradient", "weight")


def _notes(plan: Plan, updates: int, plain_s: float, divides: bool) -> Iterator[str]:
    yield f"{updates} updates of the trainer were compared; the plain one took {plain_s:.1f} s with its start"
    if plan.form == "modules":
        yield "the model runs by modules, in its own Python, without overlap"
    if divides:
        yield "a batch is several microbatches, whose sums have another order: gradients of update 1 count"


def _run(trainer: CheckedTrainer, updates: int, folder: Path, *, split: bool) -> TrainerRun:
    ambient, numbers, plan = Ambient.here(), folder / f"{split}.values", folder / "plan.json"

    def work() -> None:
        with ambient.entered():
            run = trainer.observed(updates, split=split)
            seen = [[each.logged, each.gradients, each.weights] for each in run.updates]
            write_value(numbers, [seen, run.divides])
            if run.plan is not None:
                run.plan.save(plan)

    run_in_forks(1, work, joins=False)
    seen, divides = read_value(numbers)
    return TrainerRun([TrainerUpdate(*each) for each in seen], Plan.load(plan) if split else None, divides)


def _differences(plain: TrainerRun, split: TrainerRun) -> Iterator[_Difference]:
    """Yields what differs, in the order in which it came."""
    if len(plain.updates) != len(split.updates):
        yield _Difference("logged", math.inf, f"{len(plain.updates)} updates, {len(split.updates)} split")
    for number, (one, other) in enumerate(zip(plain.updates, split.updates, strict=False), 1):
        at = f"of update {number}"
        # The loss comes before its gradients; other numbers may be of the weights behind them.
        for name in sorted(one.logged.keys() | other.logged.keys(), key=lambda name: (name != "loss", name)):
            a, b = one.logged.get(name), other.logged.get(name)
            if not _is_same(a, b):
                size = abs(a - b) if a is not None and b is not None else math.inf
                yield _Difference("logged", size, f"{name} {at}: {_text(a)} plain, {_text(b)} split")
        yield from _of_tensors("gradient", at, one.gradients, other.gradients)
        yield from _of_tensors("weight", f"after update {number}", one.weights, other.weights)


def _is_same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))


def _text(number: float | None) -> str:
    return "no number" if number is None else f"{number:.9g}"


def _of_tensors(
    what: str, at: str, plain: Mapping[str, Tensor], split: Mapping[str, Tensor]
) -> Iterator[_Difference]:
    for name in [*plain, *(name for name in split if name not in plain)]:
        one, other = plain.get(name), split.get(name)
        if one is None or other is None:
            there = "split alone" if one is None else "in the plain trainer alone"
            yield _Difference(what, math.inf, f"{what} {name} {at}: {there}")
        elif not torch.equal(one, other):
            size = difference(one, other)
            yield _Difference(what, size, f"{what} {name} {at}: {size:.1e} apart")


def _relative(plain: TrainerRun, split: TrainerRun) -> float:
    """Returns how far the gradients of the first update are apart, relative to each one's largest element."""
    nothing = torch.zeros(())
    one, other = (TrainingSnapshot(nothing, run.updates[0].gradients) for run in (plain, split))
    return relative_difference(one, other)
