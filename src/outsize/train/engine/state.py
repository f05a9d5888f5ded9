"""Defines EngineState: where a run is, and how it is saved and goes on from there.

    engine.state.checkpoint("run", every=500)      after each step
    engine.state.resume("run")                     in the next run, of any layout

What a checkpoint has in it is in train/checkpoint/checkpoints.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, final

from outsize.errors import BadOption
from outsize.errors.arguments import path_of
from outsize.ir.plan import Plan
from outsize.train.checkpoint.checkpoints import (
    Checkpoints,
    Moment,
    RunSettings,
    insist_on_keep,
    layout_of,
    newest_checkpoint,
)
from outsize.train.checkpoint.interval import SaveInterval
from outsize.train.checkpoint.loop.loader_states import CountedLoader
from outsize.train.checkpoint.progress import SaveProgress
from outsize.train.checkpoint.timer import SaveRule, StepSaver
from outsize.train.checkpoint.weights import HeldWeights
from outsize.train.context.run_context import RunContext
from outsize.train.crew.crew import Crew
from outsize.train.engine.callbacks import Callbacks
from outsize.train.engine.update import WeightUpdate


@final
class EngineState:
    """The steps that a run has taken, its optimizer and generators, and what the user attaches to them."""

    def __init__(
        self, run: RunContext, crew: Crew, held: HeldWeights, update: WeightUpdate, callbacks: Callbacks
    ) -> None:
        options, tried = run.options, update.tried
        self._run, self._crew, self._update, self._callbacks = run, crew, update, callbacks
        settings = RunSettings(run.plan, options.seed, options.loss_fn, options.scaler, tried)
        # A cycle would keep what the engine has recorded until the garbage is collected.
        itself = weakref.ref(self)
        self.checkpoints = Checkpoints(held, settings, lambda: state.steps if (state := itself()) else 0)
        self._saver: StepSaver | None = None
        self._is_in_loop, self.steps = False, 0

    def begin_step(self) -> None:
        """Says that the loop of the run has begun, where this is its first step."""
        if not self._is_in_loop:
            self.checkpoints.begin_loop()
            self._is_in_loop = True

    def count_from(self, steps: int) -> None:
        """Sets the number of the next step, for a caller that has counted the steps before."""
        self.steps = steps

    def save(
        self, root: str | Path, *, keep: int | None = None, wait: bool = True, weights: bool = True
    ) -> Path:
        """Saves the run to a new folder in `root` and returns it; every rank calls this.

        It has weights, optimizer, scaler, random generators, steps, and what `attach` and `batches` were
        given. Any layout goes on from it (`outsize.resume`, `parallelize(..., resume=root)`). `keep`: how
        many complete checkpoints stay; all by default. `wait=False` returns when the state is copied to host
        memory, and a thread writes it: `finish_saving` waits, as the next save does. `weights=False` leaves
        the weights out, for a caller that saves them elsewhere: `resume` then leaves them as they are. Raises
        BadOption before anything is written, NotSaved.
        """
        self._crew.insist_on_ended_steps()
        root = path_of(root, "root", "engine.save('run')")
        moment = self._moment(has_weights=weights)
        folder = self.checkpoints.save(root, moment, keep, wait=wait)
        self._callbacks.after_save(self.steps, folder)
        return folder

    def insist_on_resumable(self, root: str | Path) -> None:
        """Raises BadOption where the run could not be saved in `root`, or could not go on from there: its
        optimizer's state, tried on small weights, is not all that its steps need. Every rank calls this.
        """
        self.checkpoints.insist_on_resumable(path_of(root, "root", "the folder of engine.save: 'run'"))

    def checkpoint(
        self, root: str | Path, *, every: int | str | None = None, keep: int | None = None
    ) -> bool:
        """Saves the run when that is due; returns whether it did. Every rank calls this after each step.

        `every`: so many steps (500), or so long ("90s", "10m", "2h"); a thread writes while the run goes on,
        `finish_saving` after the loop waits for it. From the first call on, SIGTERM and SIGUSR1 (a machine is
        taken away: SLURM, Kubernetes) let the step end; then this call saves and raises Preempted, which ends
        the process with code 75. Under `outsize run --ranks peer_copies=1` it copies the run into memory,
        too. Raises BadOption, NotSaved.
        """
        insist_on_keep(keep)
        root = path_of(root, "root", "engine.state.checkpoint('run', every=500)")
        rule = SaveRule(root, None if every is None else SaveInterval.parse(every), keep)
        if self._saver is None or self._saver.rule != rule:
            if self._saver is not None:
                self._saver.close()
            self._saver = StepSaver(rule, self._run.host_group)
        return self._saver.after_step(self.steps, self.save, self._copy)

    def _copy(self, root: Path) -> None:
        self.checkpoints.copy(root, self._moment())

    def _moment(self, *, has_weights: bool = True) -> Moment:
        return Moment(self.steps, self._update.optimizer, self._update.owned, has_weights=has_weights)

    def finish_saving(self) -> None:
        """Waits until the last `save(..., wait=False)` is on the disk. Every rank calls this.

        Raises NotSaved.
        """
        self.checkpoints.finish()

    @property
    def saving(self) -> SaveProgress | None:
        """Returns how far the save is that a thread writes, or has written last; None before the first."""
        return self.checkpoints.background.progress

    @property
    def on_saving(self) -> Callable[[SaveProgress], None]:
        """Returns what the writing thread of rank 0 calls with the progress of a save: at its beginning, once
        a second at most, and at its end. By default it shows a line on a terminal, and logs elsewhere.
        """
        return self.checkpoints.background.tell

    @on_saving.setter
    def on_saving(self, tell: Callable[[SaveProgress], None]) -> None:
        """Sets what is called with the progress of a save."""
        self.checkpoints.background.tell_by(tell)

    def resume(self, root: str | Path) -> int | None:
        """Goes on from the newest complete checkpoint in `root`; returns its steps, or None where there is
        none.

        Every rank calls this. Raises ModelMismatch, BadCheckpoint, BadOption.
        """
        root = path_of(root, "root", "engine.state.resume('run')")
        saved = newest_checkpoint(root, self._run.host_group)
        if saved is None:
            return None
        self.steps, self._is_in_loop = self.checkpoints.restore(saved, self._moment()), False
        before = Plan.of_document(saved.values["plan"])
        if layout_of(before) != layout_of(self._run.plan):
            self._callbacks.after_replan(self.steps, before)
        return self.steps

    def attach(self, *unnamed: Any, **objects: Any) -> None:
        """Saves these objects with each checkpoint (`scheduler=scheduler`).

        In a run that goes on from one, they get their saved states now. Each has `state_dict()` and
        `load_state_dict(state)`; states hold numbers, texts, containers and tensors. Raises BadOption.
        """
        if unnamed:
            raise BadOption(
                "attach() wants a name for each object, by which a checkpoint finds it again",
                numbers=f"{type(unnamed[0]).__name__} has none",
                next_step="engine.state.attach(scheduler=scheduler)",
            )
        self.checkpoints.attached.attach(objects)

    def batches(self, loader: Iterable[Any], *, trial: bool = True) -> CountedLoader:
        """Returns the loader with its position, which is saved: a run goes on behind the batches it has used.

        `epoch` counts the passes that are over: `for epoch in range(batches.epoch, 10): for x, y in batches`.
        A trial on copies of the loader finds out whether that can hold, and warns where it cannot; it reads a
        few batches of a stream, and nothing of a dataset with indices. `trial=False` leaves it out.
        """
        return self.checkpoints.attached.counted(loader, trial=trial)
