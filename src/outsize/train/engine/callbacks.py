"""Defines Callback, which is told what happens in a run: steps, evaluations, checkpoints and new plans.

    outsize.parallelize(model, (x,), ..., callbacks=[MyCallback()])

Every rank has the same callbacks, because the facts of a step are gathered from all ranks; rank 0 alone calls
them. Nothing is gathered for steps that no callback wants (`every`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

import psutil
import torch
from torch import Tensor
from torch.optim import Optimizer

from outsize.device.accelerators import is_accelerator, peak_bytes
from outsize.ir.answers.utilisation import Utilisation
from outsize.ir.plan import Plan
from outsize.run.transport.control_messages import all_gather_json
from outsize.train.crew.crew import Crew


@final
@dataclass(frozen=True, slots=True)
class StepFacts:
    """Describes one update of the weights, after `step` of them.

    `loss` is that of the last batch, `grad_norm` the norm before clipping (None without clipping),
    `learning_rate` that of the optimizer's first group. `utilisation` has the measured seconds of the step
    and the busy share of each device. `memory_bytes` is measured, one number for each process: the peak of
    its device's tensors, or on a CPU what the process has resident; `planned_bytes` is what the plan expects
    on each rank of the pipeline (P50).
    """

    step: int
    loss: float
    learning_rate: float | None = None
    grad_norm: float | None = None
    utilisation: Utilisation | None = None
    memory_bytes: tuple[int, ...] = ()
    planned_bytes: tuple[int, ...] = ()


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
    """Is told what happens; override what you need. Rank 0 alone calls it.

    `every` is how many steps are between two calls of `on_step`.
    """

    every: int = 1

    def on_step(self, facts: StepFacts) -> None:
        """Is called after an update of the weights."""

    def on_evaluate(self, facts: EvaluationFacts) -> None:
        """Is called after each `engine.evaluate`."""

    def on_checkpoint(self, facts: CheckpointFacts) -> None:
        """Is called after each `engine.save`, and so by `engine.checkpoint` where it saves."""

    def on_replan(self, facts: ReplanFacts) -> None:
        """Is called when a run goes on from a checkpoint by another plan."""


@final
class Callbacks:
    """The callbacks of one engine."""

    def __init__(self, callbacks: Sequence[Callback], crew: Crew, plan: Plan) -> None:
        self._callbacks, self._crew, self._plan = tuple(callbacks), crew, plan

    def after_step(
        self,
        step: int,
        loss: Tensor,
        norm: Tensor | None,
        optimizer: Optimizer | None,
        report: Callable[[], Utilisation | None],
    ) -> None:
        """Tells those that want this step; all ranks call this together."""
        due = [callback for callback in self._callbacks if step % callback.every == 0]
        if not due:
            return
        facts = StepFacts(
            step=step,
            loss=float(loss),
            learning_rate=None if optimizer is None else float(optimizer.param_groups[0]["lr"]),
            grad_norm=None if norm is None else float(norm),
            utilisation=report(),
            memory_bytes=self._memory(),
            planned_bytes=_planned(self._plan),
        )
        if self._is_first:
            for callback in due:
                callback.on_step(facts)

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

    def _memory(self) -> tuple[int, ...]:
        places = {self._crew.device_of(stage) for stage in self._crew.stages} - {None}
        devices = [place for place in places if place is not None and is_accelerator(place)]
        own = _most(devices) if devices else psutil.Process().memory_info().rss
        mesh = self._crew.mesh
        return (own,) if mesh is None else tuple(all_gather_json(own, mesh.group.host, "memory of a step"))


def _most(devices: Sequence[torch.device]) -> int:
    return max(map(peak_bytes, devices))


def _planned(plan: Plan) -> tuple[int, ...]:
    """Returns the bytes that the plan expects on each rank's device; none for a plan without figures."""
    if plan.expected is None:
        return ()
    by_rank = {rank: row.p50_bytes for rank, row in zip(plan.ranks, plan.expected.stages, strict=True)}
    return tuple(by_rank[rank] for rank in sorted(by_rank))
