"""Defines findings: what the planner says of a plan, as a code with figures. report/wording.py makes the
sentences.

A finding is one fact: a number or a name is a field with a type and a unit, so tests, tools and other rules
read fields and never a sentence. Three unions are persisted in a plan: `Reason` (`Plan.why`), `Bottleneck`
(`Expected.limited_by`) and `PeakMargin` (`Expected.margins`). Further findings are in ir/answers: advice on a
plan, and the answer whether a training fits.
"""

from __future__ import annotations

from abc import ABC
from typing import Annotated, Final, Literal, final

from pydantic import ConfigDict, Field

from outsize.ir.base import Record
from outsize.ir.offload import Bound
from outsize.policies.weights import Weights


class Finding(Record, ABC):
    """Holds one fact; every final class has a `code` of its own, by which JSON tells it from others."""

    # Validators of some fifty classes are built when a plan is first made, not at import.
    model_config = ConfigDict(defer_build=True)


@final
class Refusal(Record):
    """Holds the error that ended an attempt, in the words in which it was raised."""

    error_code: str
    what: str
    numbers: str = ""


# -- how work and memory are shared out ------------------------------------------------------------------


@final
class SlowestStage(Finding):
    """Names the stage that sets the pace.

    `share` is its share of the work of all stages; `compute_s` is for one microbatch.
    """

    code: Literal["slowest-stage"] = "slowest-stage"
    stage: int
    units: tuple[str, ...]
    compute_s: float
    share: float
    even_share: float


@final
class FullestDevice(Finding):
    """Names the device closest to its limit.

    `same_devices` others hold as much; `largest` lists units with their bytes.
    """

    code: Literal["fullest-device"] = "fullest-device"
    device: str
    same_devices: int = 0
    used_bytes: int
    memory_bytes: int
    microbatches_in_flight: int
    largest: tuple[tuple[str, int], ...]


@final
class StepMemory(Finding):
    """Says what the fullest device holds in a loop of the user's own, and what it would hold in a step of an
    engine by `schedule`, with the same stages; that is possible where the loss adds up over samples.
    """

    code: Literal["step-memory"] = "step-memory"
    loop_bytes: int
    step_bytes: int
    schedule: str


@final
class CutsBetweenBlocks(Finding):
    """Says that stages begin and end with repeated blocks, for which a step is a little longer than the
    fastest one.
    """

    code: Literal["cuts-between-blocks"] = "cuts-between-blocks"
    step_s: float
    fastest_step_s: float


@final
class TimeLimitEnded(Finding):
    """Says that the search was ended by the time limit that was asked for, and the plan is its best so far,
    with this gap to the least bound of what was to be searched (None where no bound is known).
    """

    code: Literal["time-limit-ended"] = "time-limit-ended"
    limit_s: float
    gap: float | None = None


@final
class CheapestDevices(Finding):
    """Says that a plan was chosen by money per sample: it needs `devices` of the cluster, and the others need
    not be rented. `fastest` is the plan with the shortest step of all parts of the cluster.
    """

    code: Literal["cheapest-devices"] = "cheapest-devices"
    devices: int
    of_devices: int
    price_per_million: float
    fastest_devices: int
    fastest_step_s: float
    fastest_price_per_million: float


@final
class UntrainedStages(Finding):
    """Names stages without trainable weights; `trained_units` of the model's `units` have some."""

    code: Literal["untrained-stages"] = "untrained-stages"
    stages: tuple[int, ...]
    stages_in_all: int
    trained_units: int
    units: int


@final
class DeviceKindUse(Finding):
    """Says what one kind of device does on a cluster with several kinds; without stages all of them are
    idle.
    """

    code: Literal["device-kind-use"] = "device-kind-use"
    kind: str
    stages: tuple[int, ...]
    devices: int
    busy_devices: int
    flops_share: float


@final
class MemoryShortage(Finding):
    """Says that a stage needs more than its device has room for; None: the device with all its stages
    does.
    """

    code: Literal["memory-shortage"] = "memory-shortage"
    stage: int | None
    device: str
    needs_bytes: int
    room_bytes: int


@final
class DeviceOrder(Finding):
    """Says that devices are unequal and that this order of them, stage after stage, is the fastest."""

    code: Literal["device-order"] = "device-order"
    devices: tuple[str, ...]


@final
class CaptureNote(Finding):
    """Holds what the capture noted about the model, in the words of the capture."""

    code: Literal["capture-note"] = "capture-note"
    note: str


# -- recomputation and activations -----------------------------------------------------------------------


@final
class AllRecomputed(Finding):
    """Says that all stages recompute all of their activations; under offload of weights these are
    `blocks`.
    """

    code: Literal["all-recomputed"] = "all-recomputed"
    blocks: bool = False


@final
class StagesRecomputed(Finding):
    """Says that some stages recompute all of their activations, since memory is short there."""

    code: Literal["stages-recomputed"] = "stages-recomputed"
    stages: tuple[int, ...]


@final
class UnitsRecomputed(Finding):
    """Says that stages recompute some units.

    Of the `forward_s` seconds of a microbatch, `again_s` are computed a second time.
    """

    code: Literal["units-recomputed"] = "units-recomputed"
    stages: tuple[int, ...]
    recomputed_units: int
    units: int
    again_s: float
    forward_s: float


@final
class ActivationsOffloaded(Finding):
    """Says that stages send activations to the host.

    On `stage` a microbatch moves `moved_bytes` in each direction.
    """

    code: Literal["activations-offloaded"] = "activations-offloaded"
    stages: tuple[int, ...]
    stage: int
    moved_bytes: int
    link: str


# -- other axes ------------------------------------------------------------------------------------------


@final
class SumOrder(Finding):
    """Says that replicas, tensor- or context-parallel ranks add up in another order than one device does."""

    code: Literal["sum-order"] = "sum-order"
    replicas: int
    tp: int
    cp: int = 1


@final
class NarrowSum(Finding):
    """Says that the terms of products are added up in a type narrower than float32, which was asked for.

    `errors` pairs numbers of terms with the error of such a product, a share of its size, as a root mean
    square; sums beyond `largest` are infinite.
    """

    code: Literal["narrow-sum"] = "narrow-sum"
    dtype: str
    largest: float
    errors: tuple[tuple[int, float], ...]


@final
class FirstReplicaStatistics(Finding):
    """Says that BatchNorm's running statistics are those of the first replica's microbatches."""

    code: Literal["first-replica-statistics"] = "first-replica-statistics"
    layers: int
    replicas: int


@final
class WholeBatchStatistics(Finding):
    """Says that BatchNorm normalises over the whole batch, which is then one microbatch."""

    code: Literal["whole-batch-statistics"] = "whole-batch-statistics"


@final
class SequenceParallel(Finding):
    """Holds the bytes that a rank saves of a microbatch for its backward, with and without sequence
    parallelism.
    """

    code: Literal["sequence-parallel"] = "sequence-parallel"
    saved_bytes: int
    undivided_saved_bytes: int


@final
class PiecesOfLoss(Finding):
    """Says in how many pieces of rows the loss is computed, and the bytes of its logits and what is made of
    them: of all rows of a device's microbatch, and of one piece. `module_pieces` are those of wide modules.
    """

    code: Literal["loss-in-pieces"] = "loss-in-pieces"
    pieces: int
    whole_bytes: int
    piece_bytes: int
    module_pieces: int = 1


@final
class TensorParallel(Finding):
    """Says what tensor parallelism divides, and the bytes of its collectives for one microbatch."""

    code: Literal["tensor-parallel"] = "tensor-parallel"
    tp: int
    divided_modules: int
    modules: int
    weights_share: float
    reduced_bytes: int
    gathered_bytes: int


@final
class ModelTensorPlan(Finding):
    """Says that the model's own tensor-parallel plan differs; `hints` are the capture's words."""

    code: Literal["model-tensor-plan"] = "model-tensor-plan"
    hints: tuple[str, ...]


@final
class ContextParallel(Finding):
    """Says that each of `cp` devices has an equal part of every sequence."""

    code: Literal["context-parallel"] = "context-parallel"
    cp: int


@final
class NoContextParallel(Finding):
    """Says why ranks cannot hold sequences by rows, as the walk of the program has `refused` it."""

    code: Literal["no-context-parallel"] = "no-context-parallel"
    refused: str


@final
class WholeTensorUpdate(Finding):
    """Says what an optimizer that needs whole tensors does in a step on its slowest device.

    `flops` are those of its matrix products; `exchanged_bytes` of gradients and weights go to the ranks that
    own tensors and come back, where ranks have parts of them.
    """

    code: Literal["whole-tensor-update"] = "whole-tensor-update"
    optimizer: str
    update_s: float
    flops: float
    exchanged_bytes: int


@final
class HiddenExchanges(Finding):
    """Says what forwards that run inside of backwards of other microbatches are for.

    `exchanged_s` are those of a step in which the device that exchanges most waits for ranks with which it
    divides layers, and `hidden_s` those of them that the other microbatch's computing hides.
    """

    code: Literal["hidden-exchanges"] = "hidden-exchanges"
    schedule: str
    exchanged_s: float
    hidden_s: float


# -- weights, states and values on the host --------------------------------------------------------------


@final
class WeightsOnHost(Finding):
    """Says what the host holds at most, what moves in a step, and what was assumed about the host.

    `host_bytes_per_s` is the share of the host's memory bandwidth for each device. `host_memory_known` says
    that the cluster states how much memory the host has. `cast_bytes` of what moves are casts of weights that
    the host makes once a step.
    """

    code: Literal["weights-on-host"] = "weights-on-host"
    weights: Weights
    host_bytes: int
    moved_bytes: int
    link: str
    host_memory_known: bool
    host_bytes_per_s: float
    is_assumed: bool = True
    cast_bytes: int = 0


@final
class HostStates(Finding):
    """Says that weights, gradients and states are on the host.

    `in_parts`: the optimizer steps as gradients arrive.
    """

    code: Literal["host-states"] = "host-states"
    host_bytes: int
    bytes_per_parameter: float
    optimizer: str
    in_parts: bool


@final
class HostStages(Finding):
    """Says which units the host computes, and what it holds for that: weights, gradients and states, and what
    is saved of microbatches.

    It computes for `host_s` of a step, at most on one rank, where all ranks share its products and its memory
    of these speeds; `is_assumed`: of which the cluster says nothing. `host_memory_bytes` is None where it is
    unknown.
    """

    code: Literal["host-stages"] = "host-stages"
    units: tuple[str, ...]
    lasting_bytes: int
    saved_bytes: int
    host_s: float
    flops_per_s: float
    bytes_per_s: float
    is_assumed: bool
    host_memory_bytes: int | None = None


@final
class HostRoofline(Finding):
    """Holds the lower bound of a step whose weights or states are on the host."""

    code: Literal["host-roofline"] = "host-roofline"
    bound: Bound


@final
class StageValuesOnHost(Finding):
    """Holds the bytes of values between stages that the host holds in addition."""

    code: Literal["stage-values-on-host"] = "stage-values-on-host"
    host_bytes: int


@final
class HostMemoryEnough(Finding):
    """Says that the host has room for everything that it is to hold."""

    code: Literal["host-memory-enough"] = "host-memory-enough"
    host_memory_bytes: int


@final
class HostMemoryShort(Finding):
    """Says that the host lacks memory and a disk takes the rest; None where the disk's speed is unknown."""

    code: Literal["host-memory-short"] = "host-memory-short"
    host_memory_bytes: int
    missing_bytes: int
    disk_bytes_per_s: float | None
    disk_s: float | None


@final
class DevicesInTurns(Finding):
    """Holds the seconds of a step with weights on the host: on one device, and on several that take turns.

    `is_bound`: that of one device is what it computes alone, and its step was not priced.
    """

    code: Literal["devices-in-turns"] = "devices-in-turns"
    one_device_step_s: float
    is_bound: bool = False
    devices: int
    step_s: float


# -- schedules and tuning --------------------------------------------------------------------------------


@final
class ComposedSchedule(Finding):
    """Says that the schedule was composed for this plan; `branches` of the model run at the same time.

    `named_schedule` with `microbatches` on runs of the model's own order takes `named_step_s`.
    """

    code: Literal["composed-schedule"] = "composed-schedule"
    branches: bool
    split_backward: bool
    stages: int
    devices: int
    step_s: float
    named_schedule: str
    microbatches: int
    named_step_s: float


@final
class Measured(Finding):
    """Says that tuning ran `trials` real steps, of which this plan's was the fastest."""

    code: Literal["measured"] = "measured"
    step_s: float
    trials: int


@final
class TuningEnd(Finding):
    """Says why tuning ended.

    `gain` is the share of a step that the best remaining point would save, by prediction.
    """

    code: Literal["tuning-end"] = "tuning-end"
    reason: Literal["all-trials", "no-faster-point", "small-gain"]
    trials: int
    gain: float = 0.0


# -- what was not chosen ---------------------------------------------------------------------------------


Difference = Literal["axes", "weights", "sequence_parallel", "slices"]


@final
class NotChosen(Finding):
    """Describes another layout of the model that was priced.

    `axes` lists those with more than one device, as {"pp": 4, "tp": 2}. `differs` names what differs from the
    plan. `as_fast` says that the difference in time is smaller than the error of a prediction. `more_bytes`
    is what the fullest device holds beyond the plan's. `bit_identical` says that its results equal those of
    one device bit by bit, which those of the plan do not.
    """

    code: Literal["not-chosen"] = "not-chosen"
    schedule: str
    microbatches: int
    stages_per_device: int
    axes: dict[str, int]
    weights: Weights
    sequence_parallel: bool
    differs: tuple[Difference, ...]
    step_s: float
    chosen_step_s: float
    as_fast: bool
    more_bytes: int
    bit_identical: bool = False
    slices: int = 1


@final
class DoesNotFit(Finding):
    """Lists schedules that do not fit for one reason.

    `shortage` is that of the cut whose fullest device is least full; it is None where stages share a device,
    since no balanced cut fits there.
    """

    code: Literal["does-not-fit"] = "does-not-fit"
    schedules: tuple[str, ...]
    microbatches: int
    stages_per_device: int
    axes: dict[str, int]
    weights: Weights
    shortage: MemoryShortage | None


@final
class NoPipelineFits(Finding):
    """Says that no pipeline fits, so the search opened every other axis that runs.

    `refusal` is the pipeline's.
    """

    code: Literal["no-pipeline-fits"] = "no-pipeline-fits"
    refusal: Refusal


Reason = Annotated[
    SlowestStage
    | FullestDevice
    | StepMemory
    | CutsBetweenBlocks
    | CheapestDevices
    | TimeLimitEnded
    | UntrainedStages
    | HiddenExchanges
    | DeviceKindUse
    | MemoryShortage
    | DeviceOrder
    | CaptureNote
    | AllRecomputed
    | StagesRecomputed
    | UnitsRecomputed
    | ActivationsOffloaded
    | SumOrder
    | NarrowSum
    | FirstReplicaStatistics
    | WholeBatchStatistics
    | SequenceParallel
    | PiecesOfLoss
    | TensorParallel
    | ModelTensorPlan
    | ContextParallel
    | NoContextParallel
    | WholeTensorUpdate
    | WeightsOnHost
    | HostStates
    | HostRoofline
    | HostStages
    | StageValuesOnHost
    | HostMemoryEnough
    | HostMemoryShort
    | DevicesInTurns
    | ComposedSchedule
    | Measured
    | TuningEnd
    | NotChosen
    | DoesNotFit
    | NoPipelineFits,
    Field(discriminator="code"),
]
"""A finding that a plan holds about itself or about what was not chosen."""

# Reasons about something else than the plan itself: a report lists them apart.
REJECTIONS: Final = (NotChosen, DoesNotFit, NoContextParallel)


# -- what a step is limited by ---------------------------------------------------------------------------


@final
class SingleUnit(Finding):
    """Says that the slowest stage is one unit, which no cut divides."""

    code: Literal["single-unit"] = "single-unit"
    unit: str
    stage: int


@final
class HostBound(Finding):
    """Says that the devices wait for the host's copies and its optimizer."""

    code: Literal["host-bound"] = "host-bound"
    compute_share: float
    optimizer_share: float


@final
class MemoryBound(Finding):
    """Says by how many seconds a step could be shorter with more memory."""

    code: Literal["memory-bound"] = "memory-bound"
    shorter_s: float


@final
class CollectiveBound(Finding):
    """Holds the share of the step that collectives of the replicas' weights and gradients take which no
    computation hides.
    """

    code: Literal["collective-bound"] = "collective-bound"
    replicas: int
    share: float


@final
class LinkBound(Finding):
    """Holds the share of the step that transfers take which no computation hides."""

    code: Literal["link-bound"] = "link-bound"
    share: float


@final
class BubbleBound(Finding):
    """Holds the share of the step in which devices are idle."""

    code: Literal["bubble-bound"] = "bubble-bound"
    share: float


@final
class ComputeBound(Finding):
    """Holds the share of the step in which a stage computes; None: one device whose weights are on the
    host.
    """

    code: Literal["compute-bound"] = "compute-bound"
    stage: int | None
    share: float


Bottleneck = Annotated[
    SingleUnit | HostBound | MemoryBound | CollectiveBound | LinkBound | BubbleBound | ComputeBound,
    Field(discriminator="code"),
]
"""A bottleneck is the one term that would have to change for a step to get shorter."""


@final
class PeakMargin(Finding):
    """Holds what P95 adds to a counted peak: for what the account leaves out, and on a GPU for the allocator
    and the libraries.

    Where the device has room the allocator keeps free segments: with convolutions of `kept_tensors` times the
    largest tensor, beside the `cudnn_bytes` of cuDNN, and without them of `kept_share` of the peak, in place
    of `fragmented_share`.
    """

    code: Literal["peak-margin"] = "peak-margin"
    unseen_share: float
    fragmented_share: float = 0.0
    segments_bytes: int = 0
    context_bytes: int = 0
    kept_tensors: float = 0.0
    kept_share: float = 0.0
    cudnn_bytes: int = 0


ModelKind = Literal["dense", "experts", "adapters", "images"]
Nodes = Literal["device", "node", "nodes"]


@final
class Foresight(Finding):
    """Says how far predictions of this kind of training were from measured steps: in the mean, and at worst,
    each a share of the measured seconds or None; `rows` were compared. All None where none was.

    `nodes`: one device, one node, or several. `compared`: some steps of such devices were.
    """

    code: Literal["foresight"] = "foresight"
    kind: ModelKind
    nodes: Nodes
    precision: str
    mean_error: float | None = None
    worst_error: float | None = None
    rows: int | None = None
    source: str = ""
    compared: bool = True
