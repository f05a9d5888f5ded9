"""Says after each step whether to save; where the clock decides, it is rank 0's, told to all of them.

loop:  engine.step(...)        engine.state.checkpoint("run", every="10m")
                                   asked to end by a signal?  save, wait, raise Preempted
                                   due?                       save beside the next steps
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

import torch.distributed as dist

from outsize.errors import NotSaved, Preempted
from outsize.program.source_line import warn_user
from outsize.run.transport.control_messages import broadcast_json
from outsize.train.checkpoint.copies import CopyRule, copy_rule
from outsize.train.checkpoint.interval import SaveInterval
from outsize.train.checkpoint.preemption import PreemptionWatch


@final
class CopyNote(UserWarning):
    """Says once that copies in memory have no room."""


@final
class SaveTimer:
    """Tells after each step whether to save; `group` has all ranks of the run."""

    def __init__(
        self,
        interval: SaveInterval,
        group: dist.ProcessGroup | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval, self._group, self._clock = interval, group, clock
        self._last_s = clock()

    def is_due(self, steps: int) -> bool:
        """Tells whether to save after so many steps; the same on all ranks, which call this together."""
        if self._interval.steps is not None:
            return steps % self._interval.steps == 0
        due = self._clock() - self._last_s >= self._interval.seconds
        if self._group is not None:
            due = bool(broadcast_json(due, self._group))
        if due:
            self._last_s = self._clock()
        return due


class Save(Protocol):
    """Saves the run to a new folder in `root`; where it does not wait, a thread writes."""

    def __call__(self, root: Path, *, keep: int | None, wait: bool) -> object: ...


@final
@dataclass(frozen=True, slots=True)
class SaveRule:
    """Where a run saves itself, how often (None: only when it is asked to end), and how many saves stay."""

    root: Path
    every: SaveInterval | None = None
    keep: int | None = None


@final
class StepCopier:
    """Copies a run into memory after its steps, as its launcher was asked to."""

    def __init__(self, rule: CopyRule, group: dist.ProcessGroup | None) -> None:
        self._folder, self._timer = rule.folder, SaveTimer(rule.every, group)
        self._has_room, self._is_first = True, group is None or group.rank() == 0

    def after_step(self, steps: int, copy: Callable[[Path], None]) -> None:
        """Copies if that is due; where memory has no room for it, it says so once, and the run goes on."""
        if not self._has_room or not self._timer.is_due(steps):
            return
        try:
            copy(self._folder)
        except NotSaved as error:
            self._has_room = False
            if self._is_first:
                text = f"the run goes on without copies in memory: {error}"
                warn_user(text, CopyNote)


@final
class StepSaver:
    """Saves a run after its steps by one rule, and when a signal asks it to end."""

    def __init__(self, rule: SaveRule, group: dist.ProcessGroup | None) -> None:
        self.rule = rule
        copies = copy_rule(rule.root)
        self._copier = None if copies is None else StepCopier(copies, group)
        self._timer = None if rule.every is None else SaveTimer(rule.every, group)
        self._preemption = PreemptionWatch(group)

    def after_step(self, steps: int, save: Save, copy: Callable[[Path], None]) -> bool:
        """Saves if that is due after so many steps, and returns whether it did; copies where that is due.

        All ranks call this together. Raises Preempted, NotSaved.
        """
        signal_name = self._preemption.asked_by()
        if signal_name is not None:
            save(self.rule.root, keep=self.rule.keep, wait=True)
            self._preemption.close()
            ended = Preempted(
                f"{signal_name} has asked the run to end, and it is saved",
                numbers=f"step {steps}, in {self.rule.root}",
                next_step="start the same command again; it goes on from there",
            )
            raise ended.on_all_ranks()
        if self._copier is not None:
            self._copier.after_step(steps, copy)
        is_due = self._timer is not None and self._timer.is_due(steps)
        if is_due:
            save(self.rule.root, keep=self.rule.keep, wait=False)
        return is_due

    def close(self) -> None:
        """Gives the signals back."""
        self._preemption.close()
