"""Fit: the answer to "does a training step fit these devices?", with its figures."""

from __future__ import annotations

from typing import Literal, final

from outsize.ir.base import Record
from outsize.ir.plan import Precision, Recompute, ScheduleName

Answer = Literal["YES", "YES IF", "NO"]


@final
class DeviceFit(Record):
    """One device at the peak of a step, which is in `phase`: bytes by cause, and what it has.

    `p50_bytes` is all of them; one step in twenty takes more than `p95_bytes`, which is what has to fit.
    """

    device: str
    units: tuple[str, ...]
    parameters: int
    weights_bytes: int
    gradients_bytes: int
    master_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    boundary_bytes: int
    workspace_bytes: int
    context_bytes: int
    in_flight: int
    phase: str
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
    """A change that suffices: what to type, what it is, how full the fullest device is then, at P95."""

    options: str
    sentence: str
    p95_bytes: int
    share: float


@final
class Fit(Record):
    """The answer. `changes` (of YES IF) are the cheapest first; `devices_needed` (of NO) would do.

    `alone`: one device without a pipeline is enough. `whole` is off where activations are not counted.
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
    devices: tuple[DeviceFit, ...]
    largest: tuple[Contributor, ...]
    alone: bool = False
    whole: bool = True
    changes: tuple[Change, ...] = ()
    devices_needed: int | None = None
    sure: tuple[str, ...] = ()
