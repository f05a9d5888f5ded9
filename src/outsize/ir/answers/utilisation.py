"""Records how the devices spent one step, and why time was lost if more than half of it was."""

from __future__ import annotations

from typing import Final, Literal, final

from outsize.ir.base import Record
from outsize.ir.formatting import percent_text, seconds_text
from outsize.ir.offload import Bound

Cause = Literal["sequential", "few-microbatches", "uneven-stages", "transfers"]
# Devices that compute less than this share of the step get an explanation.
BUSY: Final = 0.5


@final
class Idle(Record):
    """Warns (W210) that devices idle `share` of the step, mostly for one cause.

    `change` lists the options that reduce it, as (name, value); `gain` is by how much the simulator predicts
    the samples per second to rise with them, as a factor, from the stage times of this run.
    """

    share: float
    cause: Cause
    why: str
    remedy: str
    gain: float
    change: tuple[tuple[str, str], ...] = ()

    @property
    def sentence(self) -> str:
        """Returns `devices idle 74 % of the step: the schedule is sequential; ... -> predicted 3.1x`."""
        gain = f" -> predicted {self.gain:.1f}x" if self.gain > 1 else ""
        return f"devices idle {percent_text(self.share)} of the step: {self.why}; {self.remedy}{gain}"

    def next_step(self, command: str | None = None) -> str:
        """Returns what to type: the command of this run with other options, or the call of the library."""
        if not self.change:
            return "outsize tune MODEL" if self.cause == "uneven-stages" else "outsize explain W210"
        if command is not None:
            return " ".join([command, *(f"--{name} {value}" for name, value in self.change)])
        return f"outsize.plan(..., {', '.join(f'{n}={_python(v)}' for n, v in self.change)})"


@final
class Utilisation(Record):
    """Holds shares of one step's device-seconds, 0 to 1, measured.

    busy      share in which each device computes
    transfer  share in which devices send, post receives, or wait for a message that has been sent
    bound_s   of the step if each action lasts as long as it did and nothing else takes time: no run of this
                schedule with these stage times is faster
    roofline    what the plan expects of compute, copies and the host's optimizer each, where the host keeps
                something
    taken_back  of all steps with clipping="speculative" how many were, and how many there were
    """

    step_s: float
    bound_s: float
    devices: tuple[str, ...]
    busy: tuple[float, ...]
    transfer: float
    idle: Idle | None = None
    roofline: Bound | None = None
    taken_back: tuple[int, int] | None = None
    note: str = ""

    @property
    def bubble(self) -> float:
        """Returns the share of all device time without compute."""
        return 1.0 - sum(self.busy) / len(self.busy) if self.busy else 0.0

    @property
    def reached(self) -> float:
        """Returns the share of the bound that the step reached, 0 to 1."""
        return self.bound_s / self.step_s if self.step_s else 1.0

    def facts(self) -> list[tuple[str, str]]:
        """Returns names and figures for tables and pages."""
        bound = (
            f"{seconds_text(self.bound_s)}, this schedule without waits: {percent_text(self.reached)} reached"
        )
        rows = [("transfers", f"{percent_text(self.transfer)} of all device time"), ("bound", bound)]
        rows += [("roofline", self._against(self.roofline))] if self.roofline is not None else []
        rows += [("clipping", _speculated(*self.taken_back))] if self.taken_back is not None else []
        return [*rows, ("note", self.note)] if self.note else rows

    def _against(self, roofline: Bound) -> str:
        """Returns `2.41 s measured / 1.20 s (compute) = 2.01`."""
        times = f" = {self.step_s / roofline.step_s:.2f}" if roofline.step_s else ""
        least = f"{seconds_text(roofline.step_s)} expected at least ({roofline.longest})"
        return f"{seconds_text(self.step_s)} measured / {least}{times}"

    def __str__(self) -> str:
        """Returns lines for a terminal."""
        busy = ", ".join(f"{d} {percent_text(b)}" for d, b in zip(self.devices, self.busy, strict=True))
        head = [("step", seconds_text(self.step_s)), ("busy", busy), ("bubble", percent_text(self.bubble))]
        lines = [f"{name:<9}  {text}" for name, text in (*head, *self.facts())]
        if self.idle is not None:
            lines += [f"W210: {self.idle.sentence}. Next: {self.idle.next_step()}"]
        return "\n".join(lines)


def _speculated(taken_back: int, steps: int) -> str:
    """Describes rolled-back steps; above a half, speculation is slower than waiting."""
    slower = '; clipping="exact" is faster' if 2 * taken_back > steps else ""
    return f"{taken_back} of {steps} speculative steps were taken back{slower}"


def _python(value: str) -> str:
    return value if value.isdigit() else repr(value)
