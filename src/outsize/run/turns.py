"""All ranks in one process, taking turns: each runs until its next compute action lacks a message."""

from __future__ import annotations

from collections.abc import Sequence

from outsize.errors import InvalidSchedule
from outsize.run.interpreter import Interpreter, StepOutputs


def run_together(interpreters: Sequence[Interpreter]) -> list[StepOutputs]:
    """All ranks in one process, taking turns; InvalidSchedule when nobody can go on."""
    left = list(interpreters)
    while left:
        moved = False
        for interpreter in list(left):
            while (state := interpreter.advance()) is True:
                moved = True
            if state is None:
                left.remove(interpreter)
                moved = True
        if not moved:
            raise stuck(left)
    return [i.outputs for i in interpreters]


def stuck(left: Sequence[Interpreter]) -> InvalidSchedule:
    """None of these ranks can go on."""
    waiting = ", ".join(f"rank {i.rank} at {i.current()}" for i in left)
    return InvalidSchedule("no rank can go on", numbers=waiting, next_step="check the schedule: outsize plan")
