"""Records how devices spend a step, measured or predicted, and why time was lost where half of it was."""

from __future__ import annotations

from typing import Final, Literal, final

from outsize.ir.answers.compilation import Compilation, GraphUse
from outsize.ir.base import Record
from outsize.ir.formatting import percent_text, seconds_text
from outsize.ir.offload import Bound

Spent = Literal[
    "products",
    "attention",
    "convolutions",
    "normalisations",
    "elementwise",
    "computing",
    "again",
    "optimizer",
    "update-on-host",
    "weights",
    "messages",
    "within-layers",
    "copies",
    "launching",
    "waits",
]
"""On what seconds of a step are spent; report/tables/step_seconds.py has the words."""
Cause = Literal["modules", "sequential", "few-microbatches", "uneven-stages", "transfers"]
# Devices that compute less than this share of the step get an explanation.
BUSY: Final = 0.5


@final
class SpentSeconds(Record):
    """Holds the seconds of a step that are spent on one thing, and where its constants are from, each as
    `source (device, date)`.
    """

    spent: Spent
    seconds: float
    sources: tuple[str, ...] = ()


@final
class StepSeconds(Record):
    """Says where the predicted seconds of a step go (planner/advice/step_seconds.py); the parts add up to it.

    They are those of the device that computes most, `device`; `coarse` ones are from the plan's file alone.
    """

    step_s: float
    device: str
    parts: tuple[SpentSeconds, ...]
    coarse: bool = False


@final
class Idle(Record):
    """Holds why devices idled `share` of a step (W210) of `stages` stages and `microbatches` microbatches.

    `part`: the share of the step that the cause explains. For uneven stages `slowest_stage` computes
    `slowest_share` of the step's work. `change` lists the options that reduce the idle time, as (name,
    value); `gain` is the factor by which the simulator predicts the samples per second to rise with them,
    from the stage times of this run. report/wording.py words it.
    """

    share: float
    cause: Cause
    stages: int
    microbatches: int
    part: float
    gain: float = 1.0
    change: tuple[tuple[str, str], ...] = ()
    slowest_stage: int = 0
    slowest_share: float = 0.0


@final
class Utilisation(Record):
    """Holds shares of one step's device-seconds, 0 to 1, measured.

    busy      share in which each device computes
    transfer  share in which devices send, post receives, or wait for a message that has been sent
    bound_s   of the step if each action lasts as long as it did and nothing else takes time: no run of this
                schedule with these stage times is faster
    roofline    what the plan expects of compute, copies and the host's optimizer each, where the host keeps
                something
    compiled    what compiled="auto" has decided
    device_graphs  whether stages run as graphs of their devices, and the memory of these
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
    compiled: Compilation | None = None
    device_graphs: GraphUse | None = None
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
        rows += [("compiled", str(self.compiled))] if self.compiled is not None else []
        rows += [("graphs", str(self.device_graphs))] if self.device_graphs is not None else []
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
            change = "".join(f", {name}={value}" for name, value in self.idle.change)
            lines += [f"{'W210':<9}  {self.idle.cause}{change} (outsize explain W210)"]
        return "\n".join(lines)


def _speculated(taken_back: int, steps: int) -> str:
    """Describes rolled-back steps; above a half, speculation is slower than waiting."""
    slower = '; clipping="exact" is faster' if 2 * taken_back > steps else ""
    return f"{taken_back} of {steps} speculative steps were taken back{slower}"
