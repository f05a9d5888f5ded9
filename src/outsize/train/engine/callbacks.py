"""Defines Callback, which is told what happens in a run: steps, evaluations, checkpoints and new plans.

    outsize.parallelize(model, (x,), ..., callbacks=[MyCallback()])

Every rank has the same callbacks, because the facts of a step are gathered from all ranks; rank 0 alone calls
them, but for `on_start`. Nothing is gathered for steps that no callback wants (`every`, `every_s`).

    rank 0's clock   |0.0 s      |0.5 s            |1.0 s                           |2.0 s
    steps            1           2  3              4  5  6  7                       8  ...
    told             1           2                 4                                8        every_s = 1

Which steps a clock chooses is agreed upon without a message of its own: with the facts of a step that is told
come rank 0's seconds of a step, and all ranks reckon from them which step is told next. The number of steps
between two of them at most doubles, and telling takes at most a hundredth of the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol, final

import psutil
import torch
from torch import Tensor
from torch.optim import Optimizer

from outsize.device.accelerators import is_accelerator, peak_bytes
from outsize.ir.answers.utilisation import Utilisation
from outsize.ir.plan import Plan
from outsize.ir.timeline import Timeline
from outsize.run.progress import Progress, Straggler
from outsize.run.transport.control_messages import all_gather_json
from outsize.train.crew.crew import Crew
from outsize.train.crew.optimizer_groups import learning_rate
from outsize.train.world.world import World

_TELLING_SHARE: Final = 0.01


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
        """Is called after each `engine.save`, and so by `engine.checkpoint` where it saves."""

    def on_replan(self, facts: ReplanFacts) -> None:
        """Is called when a run goes on from a checkpoint by another plan."""


@final
class _Clock:
    """Chooses the steps of callbacks with an `every_s`; all ranks choose the same ones."""

    def __init__(self, least_s: float) -> None:
        self._least_s, self._next, self._stride = least_s, 0, 1

    def is_due(self, step: int) -> bool:
        """Tells whether so much time has passed at this step; steps begin anew where a run goes back."""
        return step >= self._next or step < self._next - self._stride

    def told(self, step: int, step_s: float, telling_s: float) -> None:
        """Takes rank 0's seconds of a step, and those that telling took last."""
        steps = math.ceil(max(self._least_s, telling_s / _TELLING_SHARE) / max(step_s, 1e-9))
        self._stride = max(1, min(steps, 2 * self._stride))
        self._next = step + self._stride


@final
class _RankFigures(NamedTuple):
    """Holds what a process tells of a step: its memory, seconds of step and telling, its experts' balance."""

    memory_bytes: int
    step_s: float
    telling_s: float
    imbalance: float | None


@final
class Callbacks:
    """The callbacks of one engine."""

    def __init__(self, callbacks: Sequence[Callback], crew: Crew, plan: Plan) -> None:
        self._callbacks, self._crew, self._plan = tuple(callbacks), crew, plan
        self._clocks = self._made_clocks()
        self._told: tuple[int, float] | None = None  # the last step that was told, and when that was over
        self._telling_s = 0.0

    def _made_clocks(self) -> list[tuple[Callback, _Clock | None]]:
        """Returns the callbacks that are told of steps, with the clocks of those that have one."""
        of_steps = [one for one in self._callbacks if one.every]
        return [(one, _Clock(one.every_s) if one.every_s > 0 else None) for one in of_steps]

    def start(self, world: World) -> None:
        """Tells all on every rank that the run begins; each may then say that it wants no steps."""
        facts = StartFacts(self._plan, world, self._crew.progress)
        for callback in self._callbacks:
            if hasattr(callback, "on_start"):  # One that is like a Callback, but none, may not know it.
                callback.on_start(facts)
        self._clocks = self._made_clocks()

    def after_step(
        self,
        step: int,
        loss: Tensor,
        norm: Tensor | None,
        optimizer: Optimizer | None,
        report: Callable[[], tuple[Timeline, Utilisation | None]],
        imbalance: float | None = None,
    ) -> None:
        """Tells those that want this step; all ranks call this together."""
        due = [
            (callback, clock)
            for callback, clock in self._clocks
            if (step % callback.every == 0 if clock is None else clock.is_due(step))
        ]
        if not due:
            return
        begin_s = time.perf_counter()
        timeline, utilisation = report()
        every = self._gathered(self._step_s(step, begin_s), imbalance)
        step_s, telling_s = every[0].step_s, every[0].telling_s
        imbalances = [one.imbalance for one in every if one.imbalance is not None]
        facts = StepFacts(
            step=step,
            loss=float(loss),
            learning_rate=learning_rate(optimizer),
            grad_norm=None if norm is None else float(norm),
            utilisation=utilisation,
            memory_bytes=tuple(one.memory_bytes for one in every),
            planned_bytes=_planned(self._plan),
            step_s=step_s,
            timeline=timeline if timeline.spans else None,
            stragglers=tuple(self._crew.progress.stragglers),
            expert_imbalance=max(imbalances, default=None),
        )
        for callback, clock in due:
            if self._is_first:
                callback.on_step(facts)
            if clock is not None:
                clock.told(step, step_s, telling_s)
        end_s = time.perf_counter()
        self._told, self._telling_s = (step, end_s), end_s - begin_s

    def _step_s(self, step: int, now_s: float) -> float:
        """Returns the seconds from step to step since the last one that was told."""
        if self._told is None or step <= self._told[0]:
            return now_s - self._crew.progress.began_s
        return (now_s - self._told[1]) / (step - self._told[0])

    def after_evaluation(self, step: int, loss: Tensor | None) -> None:
        """Tells of an evaluation."""
        if self._callbacks and self._is_first:
            facts = EvaluationFacts(step, None if loss is None else float(loss))
            for callback in self._callbacks:
                callback.on_evaluate(facts)

    def after_save(self, step: int, folder: Path) -> None:
        """Tells of a checkpoint."""
        for callback in self._callbacks if self._is_first else ():
            callback.on_checkpoint(CheckpointFacts(step, folder))

    def after_replan(self, step: int, before: Plan) -> None:
        """Tells of a new plan."""
        for callback in self._callbacks if self._is_first else ():
            callback.on_replan(ReplanFacts(step, before, self._plan))

    @property
    def _is_first(self) -> bool:
        return self._crew.global_rank == 0

    def _gathered(self, step_s: float, imbalance: float | None) -> list[_RankFigures]:
        """Returns the figures of each process."""
        places = {self._crew.device_of(stage) for stage in self._crew.stages} - {None}
        devices = [place for place in places if place is not None and is_accelerator(place)]
        own = _most(devices) if devices else psutil.Process().memory_info().rss
        figures = _RankFigures(own, step_s, self._telling_s, imbalance)
        if self._crew.mesh is None:
            return [figures]
        every = all_gather_json(tuple(figures), self._crew.mesh.group.host, "figures of a step")
        return [_RankFigures(*one) for one in every]


def _most(devices: Sequence[torch.device]) -> int:
    return max(map(peak_bytes, devices))


def _planned(plan: Plan) -> tuple[int, ...]:
    """Returns the bytes that the plan expects on each rank's device; none for a plan without figures."""
    if plan.expected is None:
        return ()
    by_rank = {rank: row.p50_bytes for rank, row in zip(plan.ranks, plan.expected.stages, strict=True)}
    return tuple(by_rank[rank] for rank in sorted(by_rank))
