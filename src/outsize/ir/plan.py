"""Defines the plan: the decision as a small file that a person can read, edit, check and run.

A plan never holds anything that can be derived from it and the graph; `expected` is the planner's prediction,
which is only shown, never used to run.
"""

from __future__ import annotations

from abc import ABC
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, final

from pydantic import (
    AfterValidator,
    ValidationError,
    create_model,
    field_validator,
)
from pydantic_core import PydanticCustomError

from outsize.axes.axis import Axis
from outsize.axes.registry import (
    AXES,
    COPIES,
    DIVIDING,
    EXPERT_HOLDERS,
    GROUP,
    HOLDERS,
    PARTS,
    REPLICAS,
    STAGES,
    those,
)
from outsize.errors import BadOption, BadPlan, ModelMismatch, UnsupportedPlan
from outsize.errors.arguments import path_of
from outsize.files.strict_json import BadJson
from outsize.ir.base import (
    Bytes,
    Count,
    DeviceName,
    Finite,
    Rate,
    Record,
    Seconds,
    Whole,
    Word,
    first_problem,
)
from outsize.ir.findings import REJECTIONS, Bottleneck, PeakMargin, Reason
from outsize.ir.graph import Form, ModelGraph
from outsize.ir.offload import Degree
from outsize.ir.schedule import SCHEDULES, parse_row, placed
from outsize.ir.stage_graph import check_quotient, in_stages
from outsize.ir.units.names import compress_units, expand, prefixes, unroll
from outsize.policies.activations import KEEP, ActivationPolicy, Recompute, activation_policy
from outsize.policies.precisions import FP32, PrecisionName
from outsize.policies.weights import RESIDENT, WeightPolicy, Weights, weight_policy


def _known_schedule(name: str) -> str:
    """Returns the name; raises pydantic's error for a Literal where no schedule has it."""
    if name not in SCHEDULES:
        *names, last = map(repr, SCHEDULES)
        expected = f"{', '.join(names)} or {last}"
        raise PydanticCustomError("schedule_name", "Input should be {expected}", {"expected": expected})
    return name


ScheduleName = Annotated[str, AfterValidator(_known_schedule)]
"""A schedule is stored by its name; schedules/families.py has its record."""
Precision = PrecisionName
"""A precision is stored by its name; policies/precisions.py has its record."""
BatchNormMode = Literal["micro", "deferred", "sync"]
Kernels = Literal["eager", "flash-3", "graphs", "compiled", "compiled-graphs", "fused", "fused-graphs"]
"""A stack of kernels is stored by its name; planner/costs/kernel_stacks.py has its record."""
# A plan has memory for so many times the mean rank's rows of experts on the fullest rank of ep.
EXPERT_MARGIN: Final = 1.5


class MeshShape(Record, ABC):
    """Answers what callers ask of a mesh: products over those axes whose records say so (outsize.axes)."""

    @property
    def world_size(self) -> int:
        """Returns the number of devices the plan needs."""
        return _world_size(self)

    @property
    def group_size(self) -> int:
        """Returns the number of devices of one rank of the pipeline."""
        return _group_size(self)

    @property
    def replicas(self) -> int:
        """Returns into how many parts the batch is divided that are computed at the same time."""
        return _replicas(self)

    @property
    def microbatch_ranks(self) -> int:
        """Returns the number of devices that share the work of one microbatch."""
        return _microbatch_ranks(self)

    @property
    def product_parts(self) -> int:
        """Returns into how many parts the products of layers are divided."""
        return _product_parts(self)

    @property
    def token_parts(self) -> int:
        """Returns into how many parts the tokens of each sequence are divided."""
        return _token_parts(self)

    @property
    def expert_parts(self) -> int:
        """Returns the ranks that are there to divide experts; those that divide products divide these
        further.
        """
        return _expert_parts(self)

    @property
    def within_stages(self) -> tuple[int, ...]:
        """Returns the sizes of the axes whose ranks compute a stage together."""
        return _within_stages(self)

    @property
    def divides_weights(self) -> bool:
        """Returns whether ranks have parts of weights while they compute."""
        return _weight_parts(self) > 1

    @property
    def divides_states(self) -> bool:
        """Returns whether replicas are asked to divide states."""
        return _divided_states(self) > 1

    @property
    def state_parts(self) -> int:
        """Returns over how many devices states can be divided, those of experts, too."""
        return _state_parts(self)

    @property
    def weight_holders(self) -> int:
        """Returns the ranks that hold the same weights of a stage, and so add up their gradients."""
        return _weight_holders(self)

    @property
    def expert_holders(self) -> int:
        """Returns the ranks that hold the same experts of a stage."""
        return _expert_holders(self)

    @property
    def copies(self) -> int:
        """Returns how often the run has each weight and each state."""
        return _copies(self)

    @property
    def has_parts(self) -> bool:
        """Returns whether ranks may have parts of one weight, or of its states."""
        return _parts(self) > 1

    @property
    def exchanges_values(self) -> bool:
        """Returns whether ranks send each other values while a stage computes."""
        return max(self.within_stages) > 1

    @property
    def keeps_bits(self) -> bool:
        """Returns whether results are bit by bit those of one device."""
        return _inexact(self) == 1

    @property
    def used(self) -> dict[str, int]:
        """Returns the axes with more than one device."""
        return {name: size for name, size in self.model_dump().items() if size > 1}

    @property
    def used_in_group(self) -> dict[str, int]:
        """Returns the used axes of one rank of the pipeline."""
        return self.used_of(GROUP)

    @property
    def beyond_pp(self) -> str:
        """Returns the used axes besides pp, such as `dp_shard 4, tp 2`; empty when there are none."""
        return _listed(self.used_in_group)

    @property
    def beside_slices(self) -> str:
        """Returns the used axes whose ranks run no slices of sequences; empty when there are none."""
        return _listed(self.used_of(_WITHOUT_SLICES))

    def of(self, axis: Axis) -> int:
        """Returns the size of an axis."""
        size: int = getattr(self, axis.name)
        return size

    def used_of(self, axes: Collection[Axis]) -> dict[str, int]:
        """Returns those of these axes that have more than one device."""
        names = {axis.name for axis in axes}
        return {name: size for name, size in self.used.items() if name in names}

    def with_one(self, axes: Iterable[Axis]) -> Self:
        """Returns the mesh with one device along these axes."""
        return self.model_copy(update={axis.name: 1 for axis in axes})

    def with_pipeline(self, ranks: int) -> Self:
        """Returns the mesh with another number of ranks of the pipeline."""
        return self.model_copy(update={axis.name: ranks for axis in STAGES})


def record_of_sizes(name: str, module: str, base: type[Record], axes: Iterable[Axis]) -> Any:
    """Returns a record with a size for each of these axes, 1 by default, as plan files list them."""
    fields: Any = {axis.name: (Count, 1) for axis in sorted(axes, key=lambda axis: axis.listed)}
    return create_model(name, __base__=base, __module__=module, __doc__=base.__doc__, **fields)


if TYPE_CHECKING:
    # What the mechanism of an axis reads by its name. The fields are those of the registry.
    @final
    class Axes(MeshShape):
        """Holds sizes of the mesh's axes, with torch's names."""

        pp: Count = 1
        dp_replicate: Count = 1
        dp_shard: Count = 1
        tp: Count = 1
        cp: Count = 1
        ep: Count = 1
else:
    Axes = record_of_sizes("Axes", __name__, MeshShape, AXES)


def _sizes(axes: Iterable[Axis]) -> Callable[[MeshShape], tuple[int, ...]]:
    """Returns what reads the sizes of these axes."""
    names = [axis.name for axis in axes]
    of_names: Any = attrgetter(*names)
    return of_names if len(names) > 1 else lambda mesh: (of_names(mesh),)


def _product(axes: Iterable[Axis]) -> Callable[[MeshShape], int]:
    """Returns what multiplies the sizes of these axes; the search asks for it a million times."""
    names = [axis.name for axis in axes]
    of_names: Any = attrgetter(*names)
    return of_names if len(names) == 1 else lambda mesh: prod(of_names(mesh))


_within_stages: Final = _sizes(those(lambda axis: axis.within_stages))
_world_size: Final = _product(AXES)
_group_size: Final = _product(GROUP)
_replicas: Final = _product(REPLICAS)
_microbatch_ranks: Final = _product(those(lambda axis: axis.divides_microbatch))
_product_parts: Final = _product(those(lambda axis: axis.divides_products))
_token_parts: Final = _product(those(lambda axis: axis.divides_tokens))
_expert_parts: Final = _product(those(lambda axis: axis.divides_experts))
_weight_parts: Final = _product(DIVIDING)
_divided_states: Final = _product(those(lambda axis: axis.divides_states))
_state_parts: Final = _product(those(lambda axis: axis.shares_states and axis.same_experts))
_weight_holders: Final = _product(HOLDERS)
_expert_holders: Final = _product(EXPERT_HOLDERS)
_copies: Final = _product(COPIES)
_parts: Final = _product(PARTS)
_WITHOUT_SLICES: Final = those(lambda axis: not axis.takes_slices)
_inexact: Final = _product(those(lambda axis: not axis.keeps_bits))


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())


def state_shards(axes: Axes, weights: Weights) -> int:
    """Returns over how many devices the optimizer's states of a stage are divided; 1 where each device has
    all of them.
    """
    return weight_policy(weights).state_shards(axes.state_parts, is_asked=axes.divides_states)


def _shards(axes: Axes, weights: Weights, form: Form) -> bool:
    return state_shards(axes, weights) > 1 and form == "tape"


def _streams(axes: Axes, weights: Weights, form: Form) -> bool:
    return weight_policy(weights).on_host and axes.group_size == 1 and form == "tape"


def _computes(axes: Axes, weights: Weights, form: Form) -> bool:
    return weight_policy(weights).lists_stages and axes.group_size == 1 and form == "tape"


def unsupported(axes: Axes, weights: Weights, form: Form = "tape") -> str:
    """Returns what this version of outsize does not run of a plan with these; empty where it runs all."""
    shards, streams = _shards(axes, weights, form), _streams(axes, weights, form)
    streams |= _computes(axes, weights, form)
    run = those(lambda axis: shards if axis.divides_states else form == "tape" or axis.by_modules)
    missing = axes.used_of([axis for axis in AXES if axis not in run])
    where = "" if streams or shards else weight_policy(weights).text
    return ", ".join(filter(None, (_listed(missing), where)))


@final
class Stage(Record):
    """Describes one stage: its units as patterns (`transformer.h.0-3`) in execution order, and its device.

    `recompute` None means the plan's policy. `recomputed` lists, as patterns, the units that are recomputed
    under "selective". `on_host` says under "host-computed" that the host of its device has its weights, and
    computes it.
    """

    units: tuple[str, ...]
    device: DeviceName
    recompute: Recompute | None = None
    recomputed: tuple[str, ...] = ()
    on_host: bool = False


@final
class StageFigures(Record):
    """Holds what the planner expects of one stage; seconds per microbatch, bytes at the peak of the step.

    `p50_bytes` and `p95_bytes` are of its device with all its stages (planner/memory/headroom.py), as are the
    parts of P50 that are not counted: `context_bytes`, and `kept_bytes` by allocator and cuDNN where there is
    room. `device_bytes` is the device's memory; 0 means unknown. `recomputed` counts the units that are
    recomputed where the stage recomputes some.
    """

    units: Whole
    parameters: Bytes
    forward_s: Seconds
    backward_s: Seconds
    weights_bytes: Bytes
    gradients_bytes: Bytes
    optimizer_bytes: Bytes
    activations_bytes: Bytes
    boundary_bytes: Bytes
    busy: Finite
    device_bytes: Bytes = 0
    p50_bytes: Bytes = 0
    p95_bytes: Bytes = 0
    context_bytes: Bytes = 0
    kept_bytes: Bytes = 0
    recomputed: Whole = 0

    @property
    def peak_bytes(self) -> int:
        """Returns the sum over all causes."""
        states = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return states + self.activations_bytes + self.boundary_bytes


@final
class Expected(Record):
    """Holds the planner's prediction for one step.

    No plan of the space that was searched is faster by more than the share `gap`; 0 is optimal, None says
    nothing. `step_s` includes `update_s`, the optimizer's seconds on accelerators (0 on CPUs). `limited_by`
    is what sets the pace, `margins` what P95 adds to the counted bytes. `degrees` lists
    what each degree of offload costs, where the plan has one.
    """

    step_s: Seconds
    bubble: Finite
    samples_per_s: Rate
    stages: tuple[StageFigures, ...]
    source: Literal["measured", "roofline"]
    update_s: Seconds = 0.0
    gap: Finite | None = None
    limited_by: Bottleneck | None = None
    margins: tuple[PeakMargin, ...] = ()
    degrees: tuple[Degree, ...] = ()


@final
class Alternative(Record):
    """Describes another candidate that was priced.

    `peak_bytes` is that of its fullest device, and each device has `chunks` stages.
    """

    schedule: ScheduleName
    microbatches: Count
    slices: Count = 1
    axes: Axes
    chunks: Count = 1
    weights: Weights = RESIDENT.name
    sequence_parallel: bool = False
    recompute: Recompute = KEEP.name
    step_s: Seconds
    samples_per_s: Rate
    peak_bytes: Bytes


def _without_mark(document: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in document.items() if name != "what_if"}


@final
class Plan(Record):
    """Describes how to run one model on one cluster.

    microbatches  those of each replica, where the axes have several replicas
    precision   of the training that the figures describe: all in one dtype, or autocast ("mixed")
    weights     "sharded" over dp_shard x cp: a block is whole while it computes (ZeRO-3); "resident": on its
                device, over dp_shard from a block's first use in a step to its last (ZeRO-1); "host": with
               gradients and states in host memory, fetched block by block; "host-optimizer":
               states alone are there, gradients go there, updated weights come back; "host-activations":
               as "host", and boundary values are on the host until they are needed; "host-computed": the host
               computes the stages that say so (`Stage.on_host`), the others are resident
    sequence_parallel   values between layers that tp shards are sharded, too, along the tokens
    loss_pieces   in so many pieces of rows the loss is computed from the last product on, so that logits of
                all rows never exist at once; 1: in one
    slices      in so many slices the sequences of a microbatch go through the stages, which keep keys and
                values for those that follow (policies/slices.py)
    module_pieces   the same of modules that work on each row and are wide inside, such as an MLP
    recompute   "full": a stage saves what it receives and recomputes the rest in the backward;
                "selective": it does so with some of its units, those of `Stage.recomputed`; "offload":
               it recomputes nothing, and what a microbatch saves is on the host until its backward
    kernels     the stack of kernels that its seconds are those of (planner/costs/kernel_stacks.py)
    bn          running statistics of BatchNorm: per microbatch as under gradient accumulation ("micro"),
                once per batch ("deferred"), or for a batch that is one microbatch ("sync")
    actions     of the schedules auto (built by the planner) and custom (by a person): what each rank
                computes, in the grammar of ir/schedule.py; fewer microbatches leave out the last ones
    why         what the planner says of the plan and of what it did not choose, as findings (ir/findings.py)
    """

    version: Literal[2] = 2
    model: str
    fingerprint: str
    form: Form = "tape"
    cluster: str
    axes: Axes
    batch_size: Count
    microbatches: Count
    schedule: ScheduleName
    actions: tuple[str, ...] = ()
    stages: tuple[Stage, ...]
    optimizer: Word = "adamw"
    precision: Precision = FP32.name
    weights: Weights = RESIDENT.name
    sequence_parallel: bool = False
    loss_pieces: Count = 1
    module_pieces: Count = 1
    slices: Count = 1
    recompute: Recompute = KEEP.name
    kernels: Kernels = "eager"
    bn: BatchNormMode = "micro"
    expected: Expected | None = None
    alternatives: tuple[Alternative, ...] = ()
    why: tuple[Reason, ...] = ()

    @classmethod
    def of_document(cls, document: dict[str, Any]) -> Self:
        """Reads version 1, too, whose reasons were sentences: they are dropped, the decision is the same.

        Files of either version may have the mark `what_if`, which is dropped, too: axes and weights say
        whether a plan runs.
        """
        document = _without_mark(document)
        if isinstance(rows := document.get("alternatives"), list):
            document["alternatives"] = [_without_mark(row) if isinstance(row, dict) else row for row in rows]
        if type(document.get("version")) is int and document["version"] == 1:
            document = {**document, "version": 2, "why": []}
            if isinstance(expected := document.get("expected"), dict):
                words = {"limited_by", "margins"}
                document["expected"] = {name: v for name, v in expected.items() if name not in words}
        plan = super().of_document(document)
        _check_ranks(plan)
        return plan

    if not TYPE_CHECKING:  # where the fields are the parameters

        def __init__(self, **fields: Any) -> None:
            """Raises BadPlan for fields that are given by hand; of a file the reader names the field."""
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise BadPlan(
                    f"a plan cannot be made of these fields: {': '.join(first_problem(error))}",
                    numbers=f"{error.error_count()} fields are missing or wrong",
                    next_step="outsize.plan(model, (x,), ...), or outsize.Plan.load('plan.json')",
                ) from None

        # else pydantic reads files through it as well, and no more strictly
        __init__.__pydantic_base_init__ = True

    @field_validator("actions")
    @classmethod
    def _are_actions(cls, rows: tuple[str, ...]) -> tuple[str, ...]:
        """Checks that every cell can be read; users of the actions check that they form a step."""
        for row in rows:
            parse_row(row)
        return rows

    @property
    def microbatch_size(self) -> int:
        """Returns the samples of the largest microbatch."""
        return -(-self.batch_size // (self.microbatches * self.axes.replicas))

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Returns what `why` says of the plan itself."""
        return tuple(reason for reason in self.why if not isinstance(reason, REJECTIONS))

    @property
    def rejections(self) -> tuple[Reason, ...]:
        """Returns what `why` says of what was not chosen."""
        return tuple(reason for reason in self.why if isinstance(reason, REJECTIONS))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Returns the rank of the pipeline that each stage is on."""
        return placed(self.schedule, len(self.stages), self.axes.pp, self.actions)

    def recompute_of(self, stage: int) -> Recompute:
        """Returns the name of a stage's policy of activations: its own, or else the plan's."""
        return self.stages[stage].recompute or self.recompute

    def activation_policy(self, stage: int) -> ActivationPolicy:
        """Returns what a stage does with its activations."""
        return activation_policy(self.recompute_of(stage))

    @property
    def activation_policies(self) -> tuple[ActivationPolicy, ...]:
        """Returns the same of all stages."""
        return tuple(self.activation_policy(stage) for stage in range(len(self.stages)))

    @property
    def keeps_activations(self) -> bool:
        """Returns whether all stages keep their activations on the device until the backward."""
        return all(policy.keeps_all for policy in self.activation_policies)

    @property
    def weight_policy(self) -> WeightPolicy:
        """Returns where the weights, gradients and states are."""
        return weight_policy(self.weights)

    def recomputed(self, stage: int, names: Sequence[str]) -> frozenset[int]:
        """Returns the indices of those units, given by name, that the stage recomputes."""
        policy, patterns = self.activation_policy(stage), self.stages[stage].recomputed
        if not policy.lists_units:
            return frozenset(range(len(names)) if policy.recomputes else ())
        wanted = {name for pattern in patterns for name in unroll(pattern, len(names))}
        return frozenset(u for u, name in enumerate(names) if wanted.intersection(prefixes(name)))

    def microbatches_of(self, samples: int) -> int:
        """Returns the number of microbatches of a batch; a batch shorter than the plan's has fewer of the
        same size.

        Each replica has equally many.
        """
        each = -(-samples // (self.microbatch_size * self.axes.replicas))
        whole = samples >= self.batch_size
        return (self.microbatches if whole else min(self.microbatches, each)) * self.axes.replicas

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON. Raises BadOption for what is no path to a file, OSError."""
        path = path_of(path, "path", "plan.save('plan.json')")
        if path.is_dir():
            raise BadOption(f"{path} is a folder", next_step=f"plan.save({str(path / 'plan.json')!r})")
        self.write(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a plan file. Raises BadPlan, which says what is wrong with it and in which line of which
        field.
        """
        try:
            return cls.read(path_of(path, "path", "outsize.Plan.load('plan.json')"))
        except OSError as error:
            raise BadPlan(
                f"cannot read {path}", numbers=str(error), next_step="outsize plan MODEL --out FILE"
            ) from None
        except BadJson as error:
            raise BadPlan(f"{path} is no plan", numbers=str(error), next_step="outsize plan MODEL") from None

    def check_model(self, graph: ModelGraph) -> None:
        """Raises ModelMismatch when the plan was made for another model, BadPlan where it does not say."""
        if not self.fingerprint:
            raise BadPlan(
                f"the plan has no fingerprint, so nothing says that it was made for this {graph.model}",
                numbers=f"this model's is {graph.fingerprint}",
                next_step="outsize plan MODEL --out plan.json, or write it into the plan",
            )
        if graph.fingerprint != self.fingerprint:
            raise ModelMismatch(
                f"the plan was made for {self.model}, this model is {graph.model}",
                numbers=f"fingerprint {self.fingerprint} against {graph.fingerprint}",
                next_step="outsize plan MODEL --out plan.json with this model, input, loss and precision",
            )

    @property
    def unsupported(self) -> str:
        """Returns what this version of outsize does not run of it, `dp_shard 4, tp 2`; empty for a plan that
        runs.
        """
        return unsupported(self.axes, self.weights, self.form) or _beside_slices(self)

    @property
    def bit_identical(self) -> bool:
        """Returns whether its results are those of one device bit by bit: no replicas or tp ranks add up, nor
        slices of sequences.
        """
        return self.axes.keeps_bits and self.slices == 1

    @property
    def shards(self) -> bool:
        """Returns whether replicas share states, and between steps weights and gradients, block by block."""
        return _shards(self.axes, self.weights, self.form)

    @property
    def streams(self) -> bool:
        """Returns whether weights on the host are copied to the devices of a pipeline, by stage or once a
        step.
        """
        return _streams(self.axes, self.weights, self.form)

    @property
    def host_stages(self) -> frozenset[int]:
        """Returns the stages that the host computes, where their weights are."""
        listed = self.weight_policy.lists_stages
        return frozenset(number for number, stage in enumerate(self.stages) if listed and stage.on_host)

    def check_runs(self) -> None:
        """Raises UnsupportedPlan when this version of outsize does not run it."""
        if self.unsupported:
            raise UnsupportedPlan(
                f"the plan of {self.model} asks for what this version of outsize does not run",
                numbers=f"pp {self.axes.pp}, {self.unsupported}",
                next_step=f"outsize plan MODEL --cluster {self.cluster} --out plan.json",
            )

    def owners(self, graph: ModelGraph) -> tuple[int, ...]:
        """Returns the stage of each unit; a stage may have several runs of them.

        Raises ModelMismatch, and BadPlan when a unit is missing or doubled, or when the stages violate
        `check_quotient`.
        """
        self.check_model(graph)
        names = [u.name for u in graph.units]
        stage_of: list[int] = [-1] * len(names)
        for number, stage in enumerate(self.stages):
            units = _units_of(number, stage, names)
            for unit in units:
                if stage_of[unit] >= 0:
                    raise _not_once(names[unit], f"it is in stage {stage_of[unit]} and in stage {number}")
                stage_of[unit] = number
            _check_recomputed(self, number, [names[unit] for unit in units])
        if -1 in stage_of:
            missing = [name for name, at in zip(names, stage_of, strict=True) if at < 0]
            raise _not_once(missing[0], f"{len(missing)} of {len(names)} units are in none")
        check_quotient(graph, stage_of)
        return tuple(stage_of)

    def bounds(self, graph: ModelGraph) -> tuple[int, ...]:
        """Returns the first unit of each stage, then the number of units: `(0, 7, 15)` is units 0-6 and 7-14.

        Raises what `owners` raises, and BadPlan when a stage is no run of these units (see `in_order`).
        """
        owners = self.owners(graph)
        for unit, (before, here) in zip(graph.units[1:], pairwise(owners), strict=True):
            if here < before:
                raise BadPlan(
                    f"the stages are no runs of the model's own order; trouble at {unit.name!r}",
                    numbers=f"it is in stage {here}, the unit before it in stage {before}",
                    next_step="outsize plan MODEL --units to list the units in order",
                )
        return tuple(bisect_left(owners, stage) for stage in range(len(self.stages) + 1))

    def in_order(self, graph: ModelGraph) -> tuple[int, ...]:
        """Returns the units, stage after stage: in this order every stage is a run. Raises what `owners`
        raises.
        """
        return in_stages(self.owners(graph))


def _beside_slices(plan: Plan) -> str:
    """Returns what slices of sequences do not run with; empty where there is nothing, or one slice."""
    beside = {
        plan.axes.beside_slices: bool(plan.axes.beside_slices),
        "sequence parallelism": plan.sequence_parallel,
        f"weights {plan.weights!r}": plan.weight_policy.on_host or plan.weight_policy.shards_weights,
        "activations on the host": any(policy.uses_host for policy in plan.activation_policies),
        "rows of a schedule": bool(plan.actions),
        f"form {plan.form!r}": plan.form != "tape",
        f"bn {plan.bn!r}": plan.bn != "micro",
    }
    others = [what for what, is_used in beside.items() if is_used] if plan.slices > 1 else []
    return f"slices {plan.slices} with {', '.join(others)}" if others else ""


def _check_ranks(plan: Plan) -> None:
    """Raises BadPlan where a rank of the pipeline has no stage, or a stage no rank."""
    on_ranks = {*plan.ranks} if plan.stages else set[int]()
    if len(on_ranks) != plan.axes.pp or max(on_ranks) >= plan.axes.pp:  # a set of pp numbers may not fit
        raise BadPlan(
            f"the plan has {plan.axes.pp} ranks of a pipeline, and stages for {len(on_ranks)} of them",
            numbers=f"axes.pp {plan.axes.pp}, {len(plan.stages)} stages, schedule {plan.schedule!r}",
            next_step="outsize plan MODEL --out plan.json",
        )


def _check_recomputed(plan: Plan, number: int, names: list[str]) -> None:
    """Raises BadPlan unless a stage's `recomputed` patterns fit its policy and its units, given
    by name.
    """
    patterns, how = plan.stages[number].recomputed, plan.recompute_of(number)
    if bool(patterns) != plan.activation_policy(number).lists_units:
        raise BadPlan(
            f"stage {number} says recompute {how!r} and {'names' if patterns else 'names no'} units",
            numbers=f'{len(patterns)} patterns in `recomputed`, where "selective" alone has some',
            next_step=f'in stage {number}: recompute "selective" and some units, or `recomputed` []',
        )
    try:
        expand(patterns, names)
    except KeyError as error:
        raise BadPlan(
            f"stage {number} is to recompute {error.args[0]!r}, which is none of its units",
            numbers=f"its {len(names)} units are {names[0]!r} to {names[-1]!r}",
            next_step="outsize plan MODEL --units to list them, or take it out of `recomputed`",
        ) from None


def _units_of(number: int, stage: Stage, names: list[str]) -> list[int]:
    try:
        return expand(stage.units, names)
    except KeyError as error:
        what = f"stage {number} names {error.args[0]!r}, which is no unit of the model"
        raise BadPlan(what, next_step="outsize plan MODEL --units to list them") from None


def _not_once(unit: str, numbers: str) -> BadPlan:
    what = f"every unit belongs to exactly one stage; trouble at {unit!r}"
    return BadPlan(what, numbers=numbers, next_step="outsize plan MODEL --units to list the units in order")


def stages_from_bounds(graph: ModelGraph, bounds: Sequence[int], devices: Sequence[str]) -> tuple[Stage, ...]:
    """Returns stages from unit ranges, as patterns; the inverse of `Plan.bounds`."""
    return stages_from_units(graph, [range(*run) for run in pairwise(bounds)], devices)


def stages_from_units(
    graph: ModelGraph, units: Iterable[Collection[int]], devices: Iterable[str]
) -> tuple[Stage, ...]:
    """Returns a stage for each set of units, which ascend."""
    names = [u.name for u in graph.units]
    pairs = zip(units, devices, strict=False)
    return tuple(Stage(units=compress_units(names, run), device=device) for run, device in pairs)
