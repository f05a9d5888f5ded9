"""Writes the state of a run for `outsize top` and the dashboard, about once a second (decision 130)."""

from __future__ import annotations

import atexit
import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from outsize.files.run_folders import (
    LAUNCH,
    STATE,
    TIMELINE,
    WATCHED,
    RunFolder,
    make_run_folder,
    remove_run_folder,
)
from outsize.files.strict_json import BadJson
from outsize.ir.answers.run_state import RunDevice, RunLaunch, RunState, SavedStep, SlowRank
from outsize.ir.answers.utilisation import Utilisation
from outsize.ir.formatting import axes_text
from outsize.ir.hardware.memory_share import split_share
from outsize.ir.plan import Plan, StageFigures
from outsize.ir.timeline import Timeline
from outsize.train.context.callback import (
    Callback,
    CheckpointFacts,
    EvaluationFacts,
    ReplanFacts,
    StartFacts,
    StepFacts,
)
from outsize.train.world.variables import PUBLISHED

PUBLISH_S: Final = 1.0
_MOST_SPANS: Final = 20_000  # A page with more is no picture.


@final
class Publisher(Callback):
    """Replaces the state of a run in a folder after steps: its launcher's folder, or one of this process.

    Without a launcher of ours a run is published where that is `wanted`. Every rank has a publisher, since
    the facts of a step are gathered; rank 0's writes. `total_steps` is how many steps the run will have,
    where its user has said so.
    """

    every_s = PUBLISH_S

    def __init__(self, *, wanted: bool = False, total_steps: int | None = None) -> None:
        self._wanted, self._total_steps = wanted, total_steps
        self._place: tuple[RunFolder, Plan] | None = None  # where the run is published, and its plan
        self._saved: SavedStep | None = None
        self._evaluation_loss: float | None = None
        self._replans = 0

    def on_start(self, facts: StartFacts) -> None:
        """Finds the folder; where nobody publishes the run, no step is gathered for it on any rank."""
        launched = facts.world.variables.get(PUBLISHED)
        if launched is None and not self._wanted:
            self.every = 0
            return
        folder = RunFolder.of(Path(launched)) if launched else None
        if launched is None and facts.world.rank == 0:
            folder = _own_folder()
        self._place = None if folder is None else (folder, facts.plan)
        before = _state_in(folder)  # of an attempt of this run that has ended
        if before is not None:
            self._saved, self._evaluation_loss = before.checkpoint, before.evaluation_loss
            self._replans += before.replans

    def on_step(self, facts: StepFacts) -> None:
        """Writes the figures of a step."""
        if self._place is None:
            return
        folder, plan = self._place
        with suppress(OSError):  # The folder is gone, or its disk is full: the run does not need it.
            folder.put(STATE, self._state(facts, plan).model_dump_json())
            if facts.timeline is not None and len(facts.timeline.spans) <= _MOST_SPANS:
                self._put_timeline(folder, facts.timeline)

    def _put_timeline(self, folder: RunFolder, timeline: Timeline) -> None:
        """Writes the timeline of the step where a dashboard shows it."""
        if (folder.path / WATCHED).exists():
            folder.put(TIMELINE, timeline.model_dump_json())

    def on_evaluate(self, facts: EvaluationFacts) -> None:
        """Remembers the loss of an evaluation."""
        self._evaluation_loss = _finite(facts.loss)

    def on_checkpoint(self, facts: CheckpointFacts) -> None:
        """Remembers the newest checkpoint."""
        self._saved = SavedStep(step=facts.step, folder=str(facts.folder), saved_unix_s=time.time())

    def on_replan(self, facts: ReplanFacts) -> None:
        """Counts the plans that followed the first one."""
        self._replans += 1

    def _state(self, facts: StepFacts, plan: Plan) -> RunState:
        used, expected = facts.utilisation, plan.expected
        return RunState(
            model=plan.model,
            layout=axes_text(plan.axes.used),
            schedule=plan.schedule,
            step=facts.step,
            total_steps=self._total_steps,
            batch_size=plan.batch_size,
            loss=_finite(facts.loss),
            evaluation_loss=self._evaluation_loss,
            learning_rate=_finite(facts.learning_rate),
            grad_norm=_finite(facts.grad_norm),
            expert_imbalance=facts.expert_imbalance,
            step_s=facts.step_s,
            planned_step_s=None if expected is None else expected.step_s,
            bubble=None if used is None else used.bubble,
            planned_bubble=None if expected is None else expected.bubble,
            devices=tuple(_devices(plan, used, facts.memory_bytes)),
            slow_ranks=tuple(
                SlowRank(rank=s.rank, cause=s.cause, own=s.own, others=s.others, step=s.step, peer=s.peer)
                for s in facts.stragglers
            ),
            checkpoint=self._saved,
            replans=self._replans,
            updated_unix_s=time.time(),
        )


def _state_in(folder: RunFolder | None) -> RunState | None:
    """Returns what was published last; None where there is nothing."""
    if folder is not None:
        with suppress(OSError, BadJson):
            return RunState.read(folder.path / STATE)
    return None


def _own_folder() -> RunFolder | None:
    """Returns a folder of this process, until it ends; None where there can be none."""
    with suppress(OSError):
        folder = make_run_folder()
        command = shlex.join(["python", *sys.argv])
        launch = RunLaunch(pid=folder.pid, command=command, started_unix_s=folder.started_unix_s)
        folder.put(LAUNCH, launch.model_dump_json())
        atexit.register(remove_run_folder, folder)
        return folder
    return None


def _devices(plan: Plan, used: Utilisation | None, memory_bytes: Sequence[int]) -> Iterator[RunDevice]:
    """Yields each process of the run with its devices; one process may have all of them."""
    planned = _planned(plan)
    names, busy = ((), ()) if used is None else (used.devices, used.busy)
    alone, is_shared = len(memory_bytes) == 1, split_share(plan.cluster)[1] is not None
    for rank, measured in enumerate(memory_bytes):
        own = slice(None) if alone else slice(rank, rank + 1)
        pipeline_rank = rank // plan.axes.group_size
        rows = planned if alone else planned[pipeline_rank : pipeline_rank + 1]
        yield RunDevice(
            rank=rank,
            name=", ".join(names[own]) or f"rank {rank}",
            busy=sum(busy[own]) / len(busy[own]) if busy[own] else None,
            memory_bytes=measured,
            planned_bytes=sum(last.p50_bytes for last, _ in rows),
            reserved_bytes=sum(last.device_bytes if is_shared else last.p95_bytes for last, _ in rows),
            device_bytes=sum(last.device_bytes for last, _ in rows),
            planned_by_cause=tuple(map(sum, zip(*(causes for _, causes in rows), strict=True))),
        )


def _planned(plan: Plan) -> list[tuple[StageFigures, tuple[int, ...]]]:
    """Returns for each rank of the pipeline a row with its device's bytes, and the bytes of its stages by
    cause.
    """
    by_rank: dict[int, list[StageFigures]] = {}
    for rank, row in zip(plan.ranks, () if plan.expected is None else plan.expected.stages, strict=False):
        by_rank.setdefault(rank, []).append(row)
    return [
        (by_rank[rank][-1], tuple(map(sum, zip(*map(_causes, by_rank[rank]), strict=True))))
        for rank in sorted(by_rank)
    ]


def _causes(row: StageFigures) -> tuple[int, ...]:
    states = row.weights_bytes, row.gradients_bytes, row.optimizer_bytes
    return *states, row.activations_bytes, row.boundary_bytes


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
