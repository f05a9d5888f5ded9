"""Tells the user and the callbacks of an engine what was measured and what happens (context/callback.py).

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
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import psutil
import torch
from torch import Tensor
from torch.optim import Optimizer

from outsize.device.accelerators import is_accelerator, peak_bytes
from outsize.errors import BadOption
from outsize.ir.answers.compilation import GraphUse
from outsize.ir.answers.utilisation import Utilisation
from outsize.ir.formatting import whole_number
from outsize.ir.plan import Plan
from outsize.ir.timeline import Timeline
from outsize.run.transport.control_messages import all_gather_json
from outsize.train.context.callback import (
    Callback,
    CheckpointFacts,
    EvaluationFacts,
    ReplanFacts,
    StartFacts,
    StepFacts,
)
from outsize.train.context.run_context import RunContext
from outsize.train.crew.crew import Crew
from outsize.train.crew.optimizer_groups import learning_rate
from outsize.train.engine.executor import Executor
from outsize.train.engine.update import WeightUpdate
from outsize.train.ranks.divided_weights import DividedWeights
from outsize.train.world.world import World

_TELLING_SHARE: Final = 0.01


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


@final
class StepReports:
    """Reports on the steps of one engine."""

    def __init__(
        self,
        run: RunContext,
        crew: Crew,
        executor: Executor,
        update: WeightUpdate,
        tensor: DividedWeights | None,
        callbacks: Callbacks,
    ) -> None:
        self._run, self._crew, self._executor, self._update = run, crew, executor, update
        self._tensor, self._callbacks = tensor, callbacks

    @property
    def device_graphs(self) -> GraphUse | None:
        """Returns whether stages run as graphs of their devices, why, and what is recorded on this rank."""
        use = self._run.options.device_graphs
        return None if use is None else use.model_copy(update={"stages": self._executor.recorded})

    @property
    def imbalance(self) -> float | None:
        """Returns the fullest rank's rows of experts in the last step by the mean rank's; None without ep."""
        calls = None if self._tensor is None else self._tensor.expert_calls
        return None if calls is None else calls.load.imbalance

    def report(self, measured: Timeline) -> Utilisation:
        """Returns where the devices' time of a step went. Raises BadOption before the first step."""
        options, plan = self._run.options, self._run.plan
        if not measured.spans or options.explain is None:
            raise BadOption("no step has been measured", next_step="engine.step(...) of outsize.parallelize")
        names = device_names(plan, self._crew.world_size, measured.ranks)
        utilisation = options.explain(measured, plan, names)
        speculation = self._update.speculation
        undone_and_steps = None if speculation is None else (speculation.taken_back, speculation.steps)
        known: dict[str, Any] = {
            "taken_back": undone_and_steps,
            "compiled": options.compilation,
            "device_graphs": self.device_graphs,
        }
        return utilisation.model_copy(update=known)

    def tell(self, step: int, loss: Tensor, norm: Tensor | None) -> None:
        """Tells the callbacks that want this step of it; all ranks call this together."""

        def report() -> tuple[Timeline, Utilisation | None]:
            measured = self._crew.timeline()
            explains = measured.spans and self._run.options.explain is not None
            return measured, self.report(measured) if explains else None

        self._callbacks.after_step(step, loss, norm, self._update.optimizer, report, self.imbalance)


def device_names(plan: Plan, processes: int, ranks: int) -> list[str]:
    """Returns the device name of each rank; ranks that take turns in one process on the CPU share "cpu"."""
    devices_per_stage = plan.axes.group_size if ranks > plan.axes.pp else 1
    firsts = [plan.stages[plan.ranks.index(r // devices_per_stage)].device for r in range(ranks)]
    names = [
        first if devices_per_stage == 1 else _offset_device(first, r % devices_per_stage)
        for r, first in enumerate(firsts)
    ]
    shared = processes == 1 and all(name.startswith("cpu") for name in names)
    return ["cpu"] * ranks if shared else names


def _offset_device(device: str, offset: int) -> str:
    """Returns the name of the device `offset` places after `device`: a plan names the first device of each
    stage.
    """
    kind, _, number = device.rpartition(":")
    first = whole_number(number)
    return f"{device}+{offset}" if first is None else f"{kind}:{first + offset}"
