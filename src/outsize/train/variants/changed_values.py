"""Reacts to Python values that have changed since a program was recorded.

    first change    captured again, and said once     self.temperature 1.0 -> 0.5 at model.py:42
    second change   the module that reads it (or the loss) runs live: one instruction, the user's own code
    later           nothing: what runs live reads the value itself

A value that goes back to a former one finds the program of that value, which is no change. What the model's
own forward reads, or a module that several stages share, cannot run live: it is captured again at each
change, which is said as well.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import final

from outsize.capture.guards.check import ChangedRead
from outsize.capture.guards.values import short
from outsize.program.python_reads import LOSS, PythonRead

StagesOf = Callable[[str], set[int]]
Key = tuple[str, int, object]


@final
class ChangedValues:
    """Counts the changes of each value, and decides what runs live."""

    def __init__(self) -> None:
        self.is_silent = False  # Another rank says it.
        self.may_run_live = True
        self.live: frozenset[str] = frozenset()
        self._changes: dict[Key, int] = {}

    def note(self, changed: Sequence[ChangedRead], stages_of: StagesOf) -> None:
        """Notes that a program is captured again for these values; `stages_of` a module has instructions."""
        for read, value in changed:
            key = read.kind, id(read.holder), read.key
            times = self._changes[key] = self._changes.get(key, 0) + 1
            if times == 1:
                self._say(read, value, "the program is captured again")
            elif times == 2:
                self._run_live(read, value, stages_of)

    def _run_live(self, read: PythonRead, value: object, stages_of: StagesOf) -> None:
        movable = {f for f in read.frames if f == LOSS or (f and len(stages_of(f)) == 1)}
        movable = movable if self.may_run_live else set[str]()
        self.live |= movable
        if movable == read.frames:
            names = ", ".join(sorted(movable))
            self._say(
                read, value, f"{names} runs as one instruction from now on, which reads it at each step"
            )
        else:
            self._say(
                read,
                value,
                "it keeps changing, and each change captures the program again: read it in a submodule of "
                "one stage, or hold it in a registered buffer",
            )

    def _say(self, read: PythonRead, value: object, consequence: str) -> None:
        if not self.is_silent:
            change = f"{read.label} {short(read.value)} -> {short(value)}"
            where = read.where.rpartition(os.sep)[2]
            warnings.warn(f"{change}, {where}: {consequence}", stacklevel=2)
