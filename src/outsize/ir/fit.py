"""Fit: the answer to "does a training step fit these devices?", with its figures."""

from __future__ import annotations

from typing import Literal, final

from outsize.ir.base import Record
from outsize.ir.offload import Weights
from outsize.ir.plan import Axes, Precision, Recompute, ScheduleName

Answer = Literal["YES", "YES IF", "NO"]


@final
class DeviceFit(Record):
    """One device at the peak of a step, which is in `phase`: bytes by cause, and what it has.

    `p50_bytes` is all of them; one step in twenty takes more than `p95_bytes`, which is what has to fit. Of a
    plan that was searched, master copies are in `optimizer_bytes` and temporaries in `activations_bytes`, as
    in the plan, and nobody says the phase.
    """

    device: str
    units: tuple[str, ...]
    parameters: int
    weights_bytes: int
    gradients_bytes: int
    master_bytes: int = 0
    optimizer_bytes: int
    activations_bytes: int
    boundary_bytes: int
    workspace_bytes: int = 0
    context_bytes: int
    in_flight: int = 0
    phase: str = ""
    p50_bytes: int
    p95_bytes: int
    memory_bytes: int

    @property
    def share(self) -> float:
        """Of the device's memory; more than 1 does not fit."""
        return self.p95_bytes / self.memory_bytes


@final
class Contributor(Record):
    """A unit that holds much: weights, gradients and states for good, and what its microbatches save."""

    name: str
    kind: str
    device: str
    states_bytes: int
    saved_bytes: int


@final
class Change(Record):
    """A change that suffices: what to type, what it is, how full the fullest device is then, at P95.

    `planned`: `outsize plan` makes it by itself. `devices`: those of the plan, where it had to be searched.
    """

    options: str
    sentence: str
    p95_bytes: int
    share: float
    planned: bool = False
    devices: tuple[DeviceFit, ...] = ()


@final
class Fit(Record):
    """The answer. `changes` (of YES IF) are the cheapest first; `devices_needed` (of NO) would do.

    `alone`: one device without a pipeline is enough. `whole` is off where activations are not counted.
    `devices` is empty and `refused` has the numbers where axes or weights of one's own (not a pipeline) do
    not fit.
    """

    answer: Answer
    model: str
    parameters: int
    units: int
    cluster: str
    batch_size: int
    microbatches: int
    schedule: ScheduleName
    optimizer: str
    precision: Precision
    recompute: Recompute
    axes: Axes
    weights: Weights = "resident"
    devices: tuple[DeviceFit, ...]
    largest: tuple[Contributor, ...] = ()
    alone: bool = False
    whole: bool = True
    changes: tuple[Change, ...] = ()
    devices_needed: int | None = None
    sure: tuple[str, ...] = ()
    refused: str = ""

    @property
    def fits(self) -> bool:
        """Whether `outsize plan` finds a plan for what was asked."""
        return self.answer == "YES" or any(change.planned for change in self.changes)
