"""Records what was measured in a run: each of its steps, some steps' timelines, the memory of its devices."""

from __future__ import annotations

from typing import final

from pydantic import Field

from outsize.ir.base import Bytes, Finite, Record, Seconds, Whole
from outsize.ir.timeline import Timeline


@final
class RunStep(Record):
    """One step, numbered from 1 over the whole run; `step_s` has the optimizer's seconds, too.

    `grad_norm` is the norm of all gradients before the update, `expert_imbalance` the fullest rank's
    rows of experts by the mean rank's (with ep). What is no finite number, or was not
    measured, is None.
    """

    step: Whole
    loss: Finite | None
    step_s: Seconds
    learning_rate: Finite | None = None
    grad_norm: Finite | None = None
    expert_imbalance: Finite | None = None


@final
class TimedStep(Record):
    """The timeline of one step of a run."""

    step: Whole
    timeline: Timeline


@final
class MeasuredMemory(Record):
    """Bytes that one process held on one device while it trained: at the peak, and by cause as tensors.

    `stages` are those that the device computes for this process. What the process held before its first step
    besides the weights does not count. `gradients_bytes` are those before an update, None where gradients
    are used as they arrive.
    """

    device: str
    stages: tuple[int, ...]
    peak_bytes: Bytes
    weights_bytes: Bytes
    gradients_bytes: Bytes | None
    optimizer_bytes: Bytes

    @property
    def rest_bytes(self) -> int:
        """Returns what the peak has besides these tensors: activations, messages, workspace."""
        known = self.weights_bytes + (self.gradients_bytes or 0) + self.optimizer_bytes
        return max(0, self.peak_bytes - known)


@final
class RecordedRun(Record):
    """Holds what was measured of a run: its steps, the last ones' timelines, and each device's memory."""

    steps: tuple[RunStep, ...] = Field(min_length=1)
    timelines: tuple[TimedStep, ...] = ()
    memory: tuple[MeasuredMemory, ...] = ()
