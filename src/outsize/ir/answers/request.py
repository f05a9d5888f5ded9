"""Defines what a user asks of the planner: the options that are fixed, and those that the search may choose.

    outsize.plan(model, x, stages=2)  ->  outsize.Request  ->  RequestOptions  ->  PlanRequest  ->  search
    outsize plan MODEL --stages 2     ->  outsize.Request  ->  RequestOptions  ->  PlanRequest

`RequestOptions` has each axis by itself; `PlanRequest` is the validated record, and holds the defaults. Below
the public functions only that record is passed on.
"""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Final, Literal, Self, TypedDict, final

from pydantic import model_validator

from outsize.axes.registry import GROUP, LISTED, STAGES
from outsize.axes.shard import SHARD
from outsize.axes.tensor import TENSOR
from outsize.errors import BadOption
from outsize.ir.base import Record
from outsize.ir.cluster import Cluster
from outsize.ir.plan import Axes, BatchNormMode, Count, Kernels, Precision, ScheduleName, record_of_sizes
from outsize.ir.schedule import Schedule
from outsize.policies.activations import KEEP, ActivationPolicy, Recompute, activation_policy
from outsize.policies.precisions import FP32
from outsize.policies.slices import SLICES
from outsize.policies.weights import RESIDENT, WeightPolicy, Weights, weight_policy

AxisSearch = Literal["pp", "all"]
"""Says which axes that are not given are searched: "all" every one that runs, "pp" none of them."""
NONE_SEARCHED: Final[AxisSearch] = "pp"


Objective = Literal["time", "cost"]
"""Says what the best plan has least of: seconds of a step, or money per sample."""


class LayoutOptions(TypedDict, total=False):
    """Lists the options that say how a step is laid on the devices; None means that the option is not
    given.
    """

    batch_size: int | None
    microbatches: int | None
    stages: int | None
    chunks: int | None
    schedule: ScheduleName | Schedule | None
    precision: Precision | None
    recompute: Recompute | None
    kernels: Kernels | None
    bn: BatchNormMode | None
    axes: AxisSearch | None
    exact: bool | None
    dp_replicate: int | None
    dp_shard: int | None
    tp: int | None
    cp: int | None
    ep: int | None
    sequence_parallel: bool | None
    loss_pieces: int | None
    module_pieces: int | None
    slices: int | None


class RequestOptions(LayoutOptions, total=False):
    """Lists the options that make a PlanRequest; `outsize.Request.layout` returns them."""

    inference: bool | None
    loop: bool | None
    optimizer: str | None
    weights: Weights | None
    objective: Objective | None


class AskedAxes(Record, ABC):
    """Holds the sizes that are asked for of the axes of a group; the fields are those of the registry."""


if not TYPE_CHECKING:
    AskedAxes = record_of_sizes("AskedAxes", __name__, AskedAxes, GROUP)


@final
class PlanRequest(AskedAxes):
    """Holds what is fixed of a plan; None leaves the choice to the planner.

    `microbatches` are those of each replica; `stages` that are not given are one per device or group of
    devices; with `chunks`, the stages on each rank, they are the ranks of the pipeline. `actions` are the
    rows of a user's own schedule. `axes` "all" searches the axes that are not given, "pp" none of them.
    `exact` keeps to layouts whose results are bit-identical to one device's: pipelines, and where none fits,
    weights on the host.
    `sequence_parallel` None prices both values. `loss_pieces` None computes the loss in pieces of rows
    where that makes room (Plan), and `module_pieces` wide modules; `slices` are those of sequences, and
    None searches them with the axes. `weights` None shards weights over dp_shard, and keeps them on the
    host where the devices are too small for them. `objective` "cost" chooses also which devices are
    rented. `inference` runs forwards alone: nothing is trained or saved for a backward. `loop`: the model
    is called in a loop of the user's own (`outsize.split`), where backwards follow all forwards.
    `kernels` is the stack whose seconds are asked for.
    `every_device`: none may be left out, as in a run.
    Raises BadOption for options that contradict each other.
    """

    batch_size: Count
    microbatches: Count | None = None
    stages: Count | None = None
    chunks: Count | None = None
    schedule: ScheduleName | None = None
    optimizer: str = "adamw"
    precision: Precision = FP32.name
    recompute: Recompute | None = None
    kernels: Kernels = "eager"
    bn: BatchNormMode = "micro"
    axes: AxisSearch = "all"
    exact: bool = False
    sequence_parallel: bool | None = None
    loss_pieces: Count | None = None
    module_pieces: Count | None = None
    slices: Count | None = None
    weights: Weights | None = None
    objective: Objective = "time"
    inference: bool = False
    loop: bool = False
    every_device: bool = False
    actions: tuple[str, ...] = ()

    def mesh(self, pp: int) -> Axes:
        """Returns the given axes together with `pp` pipeline ranks."""
        asked: dict[str, int] = {axis.name: getattr(self, axis.name) for axis in GROUP}
        return Axes(**asked | {axis.name: pp for axis in STAGES})

    def on(self, axes: Axes) -> PlanRequest:
        """Returns the request for a plan on the same axes, with as many stages as ranks of the pipeline."""
        same = {axis.name: axes.of(axis) for axis in GROUP}
        return self.model_copy(update={**same, "stages": axes.pp})

    @property
    def activation_policy(self) -> ActivationPolicy:
        """Returns what stages are asked to do with their activations: to keep them where nothing is said."""
        return activation_policy(self.recompute or KEEP.name)

    @property
    def weight_policy(self) -> WeightPolicy:
        """Returns where weights are asked to be: on their devices where nothing is said."""
        return weight_policy(self.weights or RESIDENT.name)

    @property
    def has_group_axes(self) -> bool:
        """Returns whether a pipeline rank is a group of devices, by replicas, tensor, context or expert
        parallelism.
        """
        return self.mesh(1).group_size > 1

    @property
    def total_microbatches(self) -> int | None:
        """Returns the microbatches of all replicas together, where their number is given."""
        return self.microbatches and self.microbatches * self.mesh(1).replicas

    @property
    def searches_axes(self) -> bool:
        """Returns whether axes are searched that are not given, where the devices leave any."""
        return self.axes == "all" and not (self.exact or self.actions or self.in_slices)

    @property
    def in_slices(self) -> bool:
        """Returns whether sequences are asked to go through the stages in slices."""
        return (self.slices or 1) > 1

    @property
    def opens_slices(self) -> bool:
        """Returns whether slices of sequences are searched: with the axes, where nothing is asked for that
        they do not run with.
        """
        return self.slices is None and self.searches_axes and not any(self._beside_slices.values())

    @property
    def without_axis_search(self) -> PlanRequest:
        """Returns this request for the given axes alone; raises BadOption where it needs other axes."""
        return PlanRequest.model_validate(self.model_dump() | {"axes": NONE_SEARCHED})

    def opens_axes(self, cluster: Cluster) -> bool:
        """Returns whether the cluster has layouts beyond the given axes.

        On unequal devices these are also orders of pipelines.
        """
        if cluster.unequal:
            return self.axes == "all" and not self.actions
        return self.searches_axes and self._leaves_devices(cluster)

    def may_use_hosts(self, cluster: Cluster) -> bool:
        """Returns whether the host may keep the weights where nothing else fits these devices.

        In inference it never does: weights on the host are for training steps.
        """
        if self.inference:
            return False
        open_request = self.axes == "all" and not (self.has_group_axes or self.actions or self.in_slices)
        return open_request and self._leaves_devices(cluster)

    def _leaves_devices(self, cluster: Cluster) -> bool:
        return len(cluster.devices) > (self.stages or 1) * self.mesh(1).group_size

    @property
    def may_idle(self) -> bool:
        """Returns whether unequal devices may be left out."""
        return self.stages is None and not self.every_device

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.exact and self.has_group_axes:
            raise BadOption(
                "exact=True keeps the bits of one device, and replicas and tp add up in another order",
                numbers=self.mesh(1).beyond_pp,
                next_step="leave out exact (--exact), or the axes",
            )
        mesh = self.mesh(1)
        if self.inference:
            self._check_inference()
        self._check_slices()
        self._check_chunks()
        if self.bn == "sync":
            self._check_whole_batch()
        if self.sequence_parallel and mesh.product_parts == 1 and not self.searches_axes:
            raise BadOption(
                "sequence parallelism is between the ranks of tensor parallelism, and there is one",
                numbers="sequence_parallel=True, tp=1",
                next_step=f"{TENSOR.typed(2)}, or leave sequence_parallel out",
            )
        divides = self.weight_policy.shards_weights
        if divides and mesh.state_parts == 1 and not self.searches_axes:
            raise BadOption(
                "weights='sharded' divides the weights among the ranks of dp_shard and cp, and there is one",
                numbers="dp_shard 1, cp 1",
                next_step=f"{SHARD.typed(2)}, or leave out weights",
            )
        return self

    def _check_slices(self) -> None:
        """Checks that nothing is asked for that slices of sequences do not run with."""
        others = [what for what, is_asked in self._beside_slices.items() if is_asked]
        if self.in_slices and others:
            raise BadOption(
                "slices of sequences go with stages, replicas and tp, weights on devices, an engine's steps",
                numbers=f"slices={self.slices}, {', '.join(others)}",
                next_step=f"leave out slices (--{SLICES.name}), or the others",
            )

    @property
    def _beside_slices(self) -> dict[str, bool]:
        """Returns what slices of sequences do not run with, and whether it is asked for."""
        return {
            self.mesh(1).beside_slices: bool(self.mesh(1).beside_slices),
            "sequence_parallel": bool(self.sequence_parallel),
            "exact": self.exact,
            "inference": self.inference,
            "loop": self.loop,
            "a schedule of one's own": bool(self.actions),
            f"chunks={self.chunks}": (self.chunks or 1) > 1,
            f"weights={self.weights!r}": self.weight_policy.on_host or self.weight_policy.shards_weights,
            f"recompute={self.recompute!r}": self.activation_policy.uses_host,
            f"bn={self.bn!r}": self.bn != "micro",
        }

    def _check_chunks(self) -> None:
        """Checks that a schedule is searched, or made, whose ranks may have several stages."""
        if self.chunks is not None and (self.actions or self.inference):
            raise BadOption(
                "chunks is for schedules that outsize makes for a training step",
                numbers=f"chunks={self.chunks}, and {'a schedule of one' if self.actions else 'inference'}",
                next_step="leave out chunks (--chunks)",
            )

    def _check_inference(self) -> None:
        """Checks that nothing is asked for that only a backward has."""
        if self.loop:
            raise BadOption(
                "loop=True is about a loop that trains, and inference runs forwards alone",
                numbers="inference=True, loop=True",
                next_step="leave out one of them",
            )
        keeps, hosted = self.activation_policy.keeps_all, self.weight_policy.on_host
        named = {"recompute": None if keeps else self.recompute, "schedule": self.schedule}
        named["weights"] = self.weights if hosted else None
        for name, value in named.items():
            if value:
                raise BadOption(
                    f"inference runs forwards alone, and {name}={value!r} is about a training step",
                    numbers=f"inference=True, {name}={value!r}",
                    next_step=f"leave out {name} (--{name})",
                )

    def _check_whole_batch(self) -> None:
        """Checks that no replica and no microbatch splits the batch whose statistics BatchNorm takes."""
        if self.mesh(1).replicas > 1:
            raise BadOption(
                "bn='sync' takes the statistics of the whole batch, and replicas split the batch",
                numbers=", ".join(
                    f"{axis.name} {getattr(self, axis.name)}" for axis in LISTED if axis.divides_batch
                ),
                next_step="bn='deferred'",
            )
        if self.microbatches not in (None, 1):
            raise BadOption(
                f"bn='sync' takes the statistics of the whole batch, and {self.microbatches} microbatches "
                "split the batch",
                next_step="microbatches=1, where stages do not overlap, or bn='deferred'",
            )
