"""Reacts to Python values that have changed since a program was recorded.

    first change    captured again, and said once     self.temperature 1.0 -> 0.5 at model.py:42
    second change   the module that reads it (or the loss) runs live: one instruction, the user's own code;
                    a number that the model's own forward reads becomes an input of the program
    later           nothing: the value is read at each step

A value that goes back to a former one finds the program of that value, which is no change. What can neither
run live nor be followed (train/variants/number_inputs.py) is captured again at each change, which is said as
well. So is a number on which Python decides differently all the time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from outsize.capture.guards.check import ChangedRead
from outsize.capture.guards.symbolic_numbers import is_number
from outsize.capture.guards.values import short
from outsize.program.python_reads import LOSS, PythonRead, ValuePlace
from outsize.program.source_line import warn_user

StagesOf = Callable[[str], set[int]]
Key = tuple[object, ...]  # the route of a place
# So often a decision on a number may fall otherwise until the number is no longer followed.
_MOST_DECISIONS: Final = 8


@final
@dataclass(slots=True)
class MovingNumber:
    """A number that has changed twice: an input of the programs that are recorded from now on.

    `former` is the number before the last change that was noted.
    """

    changed: ChangedRead
    former: Any
    is_announced: bool = False
    decisions: int = 0

    @property
    def place(self) -> ValuePlace:
        """Returns where the number is."""
        return self.changed.place


@final
class ChangedValues:
    """Counts the changes of each value, and decides what runs live and which numbers become inputs."""

    def __init__(
        self, *, is_silent: bool = False, may_run_live: bool = True, may_follow: bool = True
    ) -> None:
        self.is_silent = is_silent  # Another rank says it.
        self.may_run_live = may_run_live
        self.may_follow = may_follow  # Numbers may be inputs of a program.
        self.live: frozenset[str] = frozenset()
        self.moving: dict[Key, MovingNumber] = {}
        self._changes: dict[Key, int] = {}

    def note(self, changed: Sequence[ChangedRead], stages_of: StagesOf) -> None:
        """Notes that a program is captured again for these values; `stages_of` a module has instructions."""
        for each in changed:
            key = each.place.route()
            times = self._changes[key] = self._changes.get(key, 0) + 1
            if key in self.moving:
                self._decide_otherwise(key, each)
            elif times == 1:
                self._say(each, "the program is captured again")
            elif times == 2:
                self._settle(key, each, stages_of)

    def settle(self, followed: Collection[ValuePlace], tried: Iterable[ValuePlace]) -> None:
        """Notes which of the numbers that were `tried` are inputs of the program that was recorded."""
        by_place = {number.place: (key, number) for key, number in self.moving.items()}
        for place in tried:
            key, number = by_place[place]
            if place not in followed:
                self._give_up(key)
            elif not number.is_announced:
                number.is_announced = True
                self._say(number.changed, "it is an input of the program from now on")

    def _settle(self, key: Key, each: ChangedRead, stages_of: StagesOf) -> None:
        read, value, _ = each
        movable = {f for f in read.frames if f == LOSS or (f and len(stages_of(f)) == 1)}
        movable = movable if self.may_run_live else set[str]()
        if movable == read.frames:
            self.live |= movable
            names = ", ".join(sorted(movable))
            self._say(each, f"{names} runs as one instruction from now on, which reads it at each step")
        elif self.may_follow and is_number(value) and is_number(read.value):
            self.moving[key] = MovingNumber(each, read.value)
        else:
            self.live |= movable
            self._say_it_keeps_changing(each)

    def _decide_otherwise(self, key: Key, each: ChangedRead) -> None:
        number = self.moving[key]
        number.changed, number.former = each, each.read.value
        number.decisions += 1
        if number.decisions == 1:
            self._say(each, "the program is captured again, since Python decides otherwise on it")
        elif number.decisions > _MOST_DECISIONS:
            self._give_up(key)

    def _give_up(self, key: Key) -> None:
        self._say_it_keeps_changing(self.moving.pop(key).changed)

    def _say_it_keeps_changing(self, each: ChangedRead) -> None:
        self._say(
            each,
            "it keeps changing, and each change captures the program again: read it in a submodule of "
            "one stage, or hold it in a registered buffer",
        )

    def _say(self, each: ChangedRead, consequence: str) -> None:
        if not self.is_silent:
            read: PythonRead = each.read
            change = f"{read.label} {short(read.value)} -> {short(each.value)}"
            where = read.where.rpartition(os.sep)[2]
            warn_user(f"{change}, {where}: {consequence}")
