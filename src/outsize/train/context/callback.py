"""Defines Callback, which is told what happens in a run: steps, evaluations, checkpoints and new plans.

    outsize.parallelize(model, (x,), ..., callbacks=[MyCallback()])

Every rank has the same callbacks, because the facts of a step are gathered from all ranks; rank 0 alone calls
them, but for `on_start`. Nothing is gathered for steps that no callback wants (`every`, `every_s`);
train/engine/callbacks.py says which steps those are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

from outsize.ir.answers.utilisation import Utilisation
from outsize.ir.plan import Plan
from outsize.ir.timeline import Timeline
from outsize.run.progress import Progress, Straggler
from outsize.train.world.world import World


@final
@dataclass(frozen=True, slots=True)
class StartFacts:
    """A run that begins: its plan, this process's place in it, and where its engine says what it does."""

    plan: Plan
    world: World
    progress: Progress


@final
@dataclass(frozen=True, slots=True)
class StepFacts:
    """Describes one update of the weights, after `step` of them.

    `loss` is that of the last batch, `grad_norm` the norm before clipping (None without clipping),
    `learning_rate` that of the optimizer's first group. `utilisation` has the measured seconds of the step
    and the busy share of each device. `memory_bytes` is measured, one number for each process: the peak of
    its device's tensors, or on a CPU what the process has resident; `planned_bytes` is what the plan expects
    on each rank of the pipeline (P50). `step_s` are the seconds from step to step, the user's code included,
    over the steps since the last ones that were told. `timeline` is that of the step, and `stragglers` are
    those that rank 0's watchdog has named. `expert_imbalance` are the rows of experts of the fullest rank by
    those of the mean one, in the ep group where this is largest; None without ep.
    """

    step: int
    loss: float
    learning_rate: float | None = None
    grad_norm: float | None = None
    utilisation: Utilisation | None = None
    memory_bytes: tuple[int, ...] = ()
    planned_bytes: tuple[int, ...] = ()
    step_s: float = 0.0
    timeline: Timeline | None = None
    stragglers: tuple[Straggler, ...] = ()
    expert_imbalance: float | None = None


@final
@dataclass(frozen=True, slots=True)
class EvaluationFacts:
    """One evaluation, after `step` steps; `loss` is None where there is no target."""

    step: int
    loss: float | None


@final
@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A checkpoint of `step` steps in `folder`; a save that does not wait may still be written."""

    step: int
    folder: Path


@final
@dataclass(frozen=True, slots=True)
class ReplanFacts:
    """A run that goes on after `step` steps by another plan than the one that saved it."""

    step: int
    before: Plan
    after: Plan


class Callback(Protocol):
    """Is told what happens; override what you need. But for `on_start`, rank 0 alone calls it.

    `every` is how many steps are between two calls of `on_step`, 0 for none at all; where `every_s` is above
    0, about so many seconds are, and telling takes at most a hundredth of the time. What `on_start` has set
    counts.
    """

    every: int = 1
    every_s: float = 0.0

    def on_start(self, facts: StartFacts) -> None:
        """Is called by every rank when its engine is ready, and has gone on from a checkpoint if it does."""

    def on_step(self, facts: StepFacts) -> None:
        """Is called after an update of the weights."""

    def on_evaluate(self, facts: EvaluationFacts) -> None:
        """Is called after each `engine.evaluate`."""

    def on_checkpoint(self, facts: CheckpointFacts) -> None:
        """Is called after each `engine.save`, and so by `engine.state.checkpoint` where it saves."""

    def on_replan(self, facts: ReplanFacts) -> None:
        """Is called when a run goes on from a checkpoint by another plan."""
