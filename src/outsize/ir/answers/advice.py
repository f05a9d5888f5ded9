"""Defines advice: what a plan shows and its reader may want to change, as a code with figures.

report/wording.py makes of each a sentence and what to type next. A `Lever` can be read from a plan file
alone; its `gain` is the share of the step that the change would save at most.
"""

from __future__ import annotations

from typing import Literal, final

from outsize.ir.findings import Finding
from outsize.ir.plan import Kernels


@final
class ReplicasFaster(Finding):
    """Says that replicas on all devices would be `ratio` times as fast as this pipeline.

    `sharded`: they share weights and states, since the model does not fit on one device.
    """

    code: Literal["data-parallelism"] = "data-parallelism"
    cluster: str
    replicas: int
    sharded: bool
    samples_per_s: float
    pipeline_samples_per_s: float
    ratio: float


@final
class SlowLinks(Finding):
    """Says that tensor parallelism within a node would send for longer than it saves in products."""

    code: Literal["slow-links"] = "slow-links"
    link: str
    devices: int
    sent_s: float
    saved_s: float
    ratio: float
    enough_bytes_per_s: float


@final
class OtherKernels(Finding):
    """Says that devices wait for their host, and by which share a step would be shorter with other kernels.

    `kernels` is the stack that helps most of those that outsize runs: with `compiled` stages, with
    `device_graphs`, or both.
    """

    code: Literal["other-kernels"] = "other-kernels"
    kernels: Kernels
    compiled: bool
    device_graphs: bool
    step_s: float
    other_step_s: float
    waiting: float


@final
class HeavyUnit(Finding):
    """Says that one unit has more than an even share of the compute, or of weights, gradients and states."""

    code: Literal["heavy-unit"] = "heavy-unit"
    unit: str
    amount: Literal["compute", "memory"]
    share: float
    even_share: float
    stages: int


@final
class BranchOrder(Finding):
    """Compares the slowest stage's seconds per microbatch: of runs in the model's order, and of any stages.

    `moved` is a unit that could be in an earlier stage; empty where there is none.
    """

    code: Literal["branches"] = "branches"
    runs_s: float
    stages_s: float
    moved: str = ""


@final
class SmallStage(Finding):
    """Says that a stage has less than half of an even share of the compute.

    `memory_full`: it has no room for more.
    """

    code: Literal["small-stage"] = "small-stage"
    stage: int
    stages: int
    share: float
    even_share: float
    memory_full: bool


@final
class FatBoundary(Finding):
    """Says that the values that cross a cut take long on its link.

    `largest` holds producer and bytes of some of them, `more_values` the number of the others.
    """

    code: Literal["fat-boundary"] = "fat-boundary"
    unit: str
    moved_bytes: int
    moved_s: float
    link: str
    slowest_stage_s: float
    largest: tuple[tuple[str, int], ...]
    more_values: int


@final
class OptimizerStates(Finding):
    """Says that a nearly full device holds mostly optimizer state, while another one has room for it."""

    code: Literal["optimizer-state"] = "optimizer-state"
    device: str
    full_share: float
    states_share: float
    room_bytes: int


@final
class UnusedDevices(Finding):
    """Says that some of the devices have no stage."""

    code: Literal["unused-devices"] = "unused-devices"
    unused: int
    devices: int


@final
class IdleDevices(Finding):
    """Says that devices are idle for a share of the step.

    `try_microbatches` is set where more of them may help.
    """

    code: Literal["idle-devices"] = "idle-devices"
    bubble: float
    microbatches: int
    devices: int
    try_microbatches: int | None


Advice = (
    ReplicasFaster
    | SlowLinks
    | OtherKernels
    | HeavyUnit
    | BranchOrder
    | SmallStage
    | FatBoundary
    | OptimizerStates
    | UnusedDevices
    | IdleDevices
)


@final
class UnevenStages(Finding):
    """Holds the slowest stage and the mean of all, in seconds of a microbatch."""

    code: Literal["balance"] = "balance"
    stage: int
    slowest_s: float
    mean_s: float
    gain: float


@final
class DoubledMicrobatches(Finding):
    """Says that twice as many microbatches would shorten the bubble."""

    code: Literal["microbatches"] = "microbatches"
    microbatches: int
    now: int
    bubble: float
    gain: float


@final
class SecondForward(Finding):
    """Holds the share of the compute that recomputation takes."""

    code: Literal["recompute"] = "recompute"
    gain: float


@final
class MemoryLeft(Finding):
    """Holds the bytes left on the fullest device; below zero they are missing."""

    code: Literal["memory"] = "memory"
    device: str
    room_bytes: int


Lever = UnevenStages | DoubledMicrobatches | SecondForward | MemoryLeft
