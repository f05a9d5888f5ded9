"""Defines the answer to "does a training step fit these devices?", with its figures."""

from __future__ import annotations

from typing import Annotated, Literal, final

from pydantic import Field

from outsize.ir.base import Record
from outsize.ir.findings import CaptureNote, Finding, PeakMargin, Refusal, StepMemory
from outsize.ir.plan import Axes, Precision, ScheduleName
from outsize.policies.activations import Recompute
from outsize.policies.weights import RESIDENT, Weights

Answer = Literal["YES", "YES IF", "NO"]


@final
class DeviceFit(Record):
    """Describes one device at the peak of a step, which is in `phase`: bytes by cause, and its memory.

    `cache_bytes` is what a generation keeps of all tokens. `kept_bytes` is what allocator and cuDNN keep
    where there is room. `p50_bytes` is the sum of all; one step in twenty takes more than `p95_bytes`, which
    is at most the memory where the step fits: it runs with `least_bytes`, in which no free segments are
    kept. For a plan that was searched, master copies are in `optimizer_bytes`, temporaries and caches in
    `activations_bytes`, as in the plan, and `phase` is empty.
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
    cache_bytes: int = 0
    context_bytes: int
    kept_bytes: int = 0
    in_flight: int = 0
    phase: str = ""
    least_bytes: int
    p50_bytes: int
    p95_bytes: int
    memory_bytes: int

    @property
    def share(self) -> float:
        """Returns the share of the device's memory that is used; more than 1 does not fit."""
        return self.p95_bytes / self.memory_bytes


@final
class Contributor(Record):
    """Describes a unit that holds much: weights, gradients and states, and what its microbatches save."""

    name: str
    kind: str
    device: str
    states_bytes: int
    saved_bytes: int


# -- what a change means, and what it costs --------------------------------------------------------------


@final
class MicrobatchesAdded(Finding):
    """Says that the batch is cut into more microbatches of at most `samples` samples."""

    code: Literal["microbatches-added"] = "microbatches-added"
    microbatches: int
    samples: int


@final
class DevicesAdded(Finding):
    """Says that there is a stage on each of `devices` devices."""

    code: Literal["devices-added"] = "devices-added"
    devices: int


@final
class ScheduleChanged(Finding):
    """Names a schedule that has fewer microbatches in flight."""

    code: Literal["schedule-changed"] = "schedule-changed"
    schedule: str
    asked: str


@final
class OneAtATime(Finding):
    """Says that one microbatch runs at a time, so that the devices of the stages wait for each other."""

    code: Literal["one-at-a-time"] = "one-at-a-time"
    stages: int


@final
class RecomputeAdded(Finding):
    """Says that activations are recomputed in the backward, for a share more of compute."""

    code: Literal["recompute-added"] = "recompute-added"
    more_compute_share: float


@final
class OptimizerChanged(Finding):
    """Names an optimizer that holds less state."""

    code: Literal["optimizer-changed"] = "optimizer-changed"
    optimizer: str
    asked: str


@final
class PrecisionChanged(Finding):
    """Names a precision whose numbers take fewer bytes."""

    code: Literal["precision-changed"] = "precision-changed"
    precision: Precision
    asked: Precision


@final
class BatchReduced(Finding):
    """Holds a smaller batch size."""

    code: Literal["batch-reduced"] = "batch-reduced"
    batch_size: int
    asked: int


@final
class PlanSearched(Finding):
    """Describes the plan that the search makes where no pipeline fits as asked, and by what it fits."""

    code: Literal["plan-searched"] = "plan-searched"
    fits_by: Literal["offload", "mesh", "recompute"]
    axes: dict[str, int]
    weights: Weights
    step_s: float


Effect = Annotated[
    MicrobatchesAdded
    | DevicesAdded
    | ScheduleChanged
    | OneAtATime
    | RecomputeAdded
    | OptimizerChanged
    | PrecisionChanged
    | BatchReduced
    | PlanSearched,
    Field(discriminator="code"),
]


@final
class CountedBytes(Finding):
    """Says what the bytes were counted from: the model's forward, op by op, or its modules alone."""

    code: Literal["counted-bytes"] = "counted-bytes"
    by_op: bool


@final
class LeastFullCut(Finding):
    """Says that the answer's cut fills its fullest device least; the plan's is the fastest, so they may
    differ.
    """

    code: Literal["least-full-cut"] = "least-full-cut"


Certainty = Annotated[
    CountedBytes | LeastFullCut | StepMemory | PeakMargin | CaptureNote, Field(discriminator="code")
]


# -- the answer ------------------------------------------------------------------------------------------


@final
class Change(Record):
    """Describes a change that suffices: what to type, what it means, how full the fullest device is then, at
    P95.

    `options` are by name without dashes, as {"microbatches": 8}. `planned`: `outsize plan` makes it by
    itself. `devices`: those of the plan, where it had to be searched.
    """

    options: dict[str, int | str]
    effects: tuple[Effect, ...]
    p95_bytes: int
    share: float
    planned: bool = False
    devices: tuple[DeviceFit, ...] = ()


@final
class ForwardSpeed(Record):
    """Holds the predicted seconds of inference: of a forward of the batch, and of one more token of each of
    its sequences where the model generates.

    `token_s` is the devices' alone, which read weights and cache; a host that launches op by op needs
    `eager_token_s`, where that is more.
    """

    batch_s: float
    token_s: float | None = None
    eager_token_s: float | None = None
    tokens: int = 0


@final
class Fit(Record):
    """Holds the answer.

    `inference`: only forwards run, whose seconds are in `speed` where devices are alike and each has a stage.
    `parameters` are all elements of the weights, `trained` those that are not frozen.
    `changes` (of YES IF) begin with the cheapest; `devices_needed` (of NO) would suffice. `alone`: of several
    devices one is enough, without a pipeline. `whole` is false where activations are not counted. `sure` says
    where the figures are from and what they leave open. `devices` is empty and `refused` is set where axes or
    weights that were asked for (not a pipeline) do not fit.
    """

    answer: Answer
    model: str
    parameters: int
    trained: int
    units: int
    cluster: str
    batch_size: int
    microbatches: int
    schedule: ScheduleName
    optimizer: str
    precision: Precision
    recompute: Recompute
    axes: Axes
    weights: Weights = RESIDENT.name
    devices: tuple[DeviceFit, ...]
    largest: tuple[Contributor, ...] = ()
    alone: bool = False
    whole: bool = True
    changes: tuple[Change, ...] = ()
    devices_needed: int | None = None
    sure: tuple[Certainty, ...] = ()
    refused: Refusal | None = None
    inference: bool = False
    speed: ForwardSpeed | None = None

    @property
    def fits(self) -> bool:
        """Returns whether `outsize plan` finds a plan for what was asked."""
        return self.answer == "YES" or any(change.planned for change in self.changes)
