"""Says after each step whether to save; where the clock decides, it is rank 0's, told to all of them.

loop:  engine.step(...)        engine.state.checkpoint("run", every="10m")
                                   asked to end by a signal?  save, wait, raise Preempted
                                   due?                       save beside the next steps

What ranks agree on there, whether any was asked to end, whether to copy and whether to save, is one record of
three numbers, whose largest count: one collective after a step, of a size that all know.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import Signals
from typing import NamedTuple, Protocol, final

import torch
import torch.distributed as dist

from outsize.errors import NotSaved, Preempted
from outsize.program.source_line import warn_user
from outsize.run.transport.rank_collectives import RankCollectives
from outsize.train.checkpoint.copies import CopyRule, copy_rule
from outsize.train.checkpoint.interval import SaveInterval
from outsize.train.checkpoint.preemption import PreemptionWatch


@final
class CopyNote(UserWarning):
    """Says once that copies in memory have no room."""


@final
class SaveTimer:
    """Tells after each step whether to save; where the clock decides, on rank 0 alone (`has_clock`)."""

    def __init__(
        self, interval: SaveInterval, *, has_clock: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval, self._has_clock, self._clock = interval, has_clock, clock
        self._last_s = clock()

    def is_due(self, steps: int) -> bool:
        """Tells whether this rank wants to save after so many steps."""
        if self._interval.steps is not None:
            return steps % self._interval.steps == 0
        return self._has_clock and self._clock() - self._last_s >= self._interval.seconds

    def begin_again(self) -> None:
        """Counts the time from now on; all ranks save."""
        self._last_s = self._clock()


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

    def __init__(self, rule: CopyRule, *, is_first: bool) -> None:
        self._folder, self._timer = rule.folder, SaveTimer(rule.every, has_clock=is_first)
        self._has_room, self._is_first = True, is_first

    def is_due(self, steps: int) -> bool:
        """Tells whether this rank wants to copy after so many steps."""
        return self._has_room and self._timer.is_due(steps)

    def copy(self, copy: Callable[[Path], None]) -> None:
        """Copies; where memory has no room for it, it says so once, and the run goes on without."""
        self._timer.begin_again()
        try:
            copy(self._folder)
        except NotSaved as error:
            self._has_room = False
            if self._is_first:
                text = f"the run goes on without copies in memory: {error}"
                warn_user(text, CopyNote)


@final
class _Agreed(NamedTuple):
    """Says what all ranks do after a step: end by a signal (its number, or 0), copy, save."""

    signal: int
    copies: int
    saves: int


@final
class StepSaver:
    """Saves a run after its steps by one rule, and when a signal asks it to end."""

    def __init__(self, rule: SaveRule, group: dist.ProcessGroup | None) -> None:
        """Takes the group of all ranks of the run, on the host; None where there is one rank."""
        self.rule, self._group = rule, group
        copies, is_first = copy_rule(rule.root), group is None or group.rank() == 0
        self._copier = None if copies is None else StepCopier(copies, is_first=is_first)
        self._timer = None if rule.every is None else SaveTimer(rule.every, has_clock=is_first)
        self._preemption = PreemptionWatch()

    def after_step(self, steps: int, save: Save, copy: Callable[[Path], None]) -> bool:
        """Saves if that is due after so many steps, and returns whether it did; copies where that is due.

        All ranks call this together. Raises Preempted, NotSaved.
        """
        agreed = self._agreed(steps)
        if agreed.signal:
            save(self.rule.root, keep=self.rule.keep, wait=True)
            self._preemption.close()
            ended = Preempted(
                f"{Signals(agreed.signal).name} has asked the run to end, and it is saved",
                numbers=f"step {steps}, in {self.rule.root}",
                next_step="start the same command again; it goes on from there",
            )
            raise ended.on_all_ranks()
        if agreed.copies and self._copier is not None:
            self._copier.copy(copy)
        if agreed.saves and self._timer is not None:
            self._timer.begin_again()
            save(self.rule.root, keep=self.rule.keep, wait=False)
        return bool(agreed.saves)

    def _agreed(self, steps: int) -> _Agreed:
        """Returns what any of the ranks wants; a collective."""
        own = _Agreed(
            self._preemption.received,
            self._copier is not None and self._copier.is_due(steps),
            self._timer is not None and self._timer.is_due(steps),
        )
        if self._group is None:
            return own
        told = torch.tensor(own, dtype=torch.int64)
        RankCollectives.of(self._group).all_reduce(told, dist.ReduceOp.MAX)
        return _Agreed(*told.tolist())

    def close(self) -> None:
        """Gives the signals back."""
        self._preemption.close()
