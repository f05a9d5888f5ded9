"""Crew: the ranks that run a schedule together, in one process or over processes.

`LocalCrew` is all ranks in one process, taking turns (most tests, and `outsize check`). `ProcessCrew` is
one rank per process over a group that is passed in. The engine sees no difference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from outsize.ir.plan import Plan
from outsize.ir.schedule import Action, Kind, Schedule
from outsize.ir.timeline import Lane, Span, Timeline
from outsize.run.activations import Activations
from outsize.run.boundary import backward_edges, forward_edges, step_edges
from outsize.run.clock import Clock, clock_of
from outsize.run.cut import Cut
from outsize.run.interpreter import Interpreter, Programs, StepInputs, StepOutputs
from outsize.run.marks import Marks
from outsize.run.moves import Moves, Resident
from outsize.run.near import connect
from outsize.run.stage import Stage
from outsize.run.together import OnePlace, Together
from outsize.run.transport import CHANNELS, Groups, Transport
from outsize.run.values import Values
from outsize.schedules.check import check
from outsize.schedules.lower import lower
from outsize.schedules.planned import planned
from outsize.train.gradient_sum import Early
from outsize.train.group import GroupOutputs, Load, MakeStage
from outsize.train.kept import Kept
from outsize.train.mesh import Mesh
from outsize.train.replicas import Alone, Replicas, Several
from outsize.train.variant import Variant

RawSpan = tuple[int, str, Lane, float, float]


# Combinations of variants whose interpreters are kept, and schedules by length and wiring.
_BUILT, _SCHEDULES = 32, 64


class Crew(ABC):
    """Runs groups of microbatches whose variants have one wiring; `beside`: replicas in this process."""

    rank: int  # in the pipeline
    world_size: int  # of the pipeline
    stages: tuple[int, ...]
    group: dist.ProcessGroup | None = None  # of the pipeline's ranks, where each is a process
    mesh: Mesh | None = None  # of all processes of the run
    replicas: Replicas = Alone()
    beside: int = 1
    moves: Moves = Resident()  # of stages' weights
    values: Values = Values()  # that stages of one device hand to each other
    device: torch.device | None = None  # where this rank's weights and batches belong; None: where they are

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.activations = Activations.of(plan)
        self._marks: list[tuple[int, Marks]] = []
        self._built = Kept[tuple[tuple[int, ...], bool, int], list[Interpreter]](_BUILT)
        self._schedules = Kept[Any, Schedule](_SCHEDULES)
        self._at_work: dict[tuple[int, int, int], Stage] = {}  # number of the variant, stage, replica
        self._early: tuple[Optimizer | None, int] = None, 0

    @property
    def global_rank(self) -> int:
        """Among all processes of the run."""
        return self.mesh.rank if self.mesh is not None else 0

    @abstractmethod
    def run(self, loads: Sequence[Load], make_stage: MakeStage) -> list[GroupOutputs]:
        """All microbatches, each under its variant, forward and (with grad on) backward; one load for each
        replica of this process.
        """

    def forget(self, variant: int) -> None:
        """The variant of this number was dropped: drop what was built for it."""
        self._built.drop(lambda key: variant in key[0])
        self._at_work = {key: stage for key, stage in self._at_work.items() if key[0] != variant}

    def _interpreters(
        self, load: Load, make_stage: MakeStage, transports: Mapping[int, Transport]
    ) -> list[Interpreter]:
        """Of the ranks that have a transport here, for these variants in this order."""
        variants, replica = load.variants, load.replica

        def stage(number: int, microbatch: int) -> Stage:
            variant = variants[microbatch]
            key = (variant.number, number, replica)
            if key not in self._at_work:
                self._at_work[key] = make_stage(variant, variant.cut.programs[number], replica)
            return self._at_work[key]

        def build() -> list[Interpreter]:
            schedule = self._schedule(variants)
            channels = [CHANNELS * variant.number for variant in variants]
            cuts = [variant.cut for variant in variants]
            moves = self.activations.beside(self.values.beside(self.moves.of(cuts), cuts))
            programs = Programs(len(self._plan.stages), stage, channels, moves, self.values)
            at_work = transports.items()
            return [Interpreter(r, schedule, programs, t, self._clock(r, replica)) for r, t in at_work]

        numbers = tuple(variant.number for variant in variants)
        return self._built.get((numbers, torch.is_grad_enabled(), replica), build)

    def _clock(self, rank: int, replica: int) -> Clock:
        """Of the device on which the rank's stages compute."""
        return clock_of(self.device_of(self._plan.ranks.index(rank), replica) or device_of(self._plan))

    def _schedule(self, variants: Sequence[Variant]) -> Schedule:
        training, count, first = torch.is_grad_enabled(), len(variants), variants[0]
        key = (first.wiring, count, training)

        def make() -> Schedule:
            return self.moves.scheduled(
                make_schedule(self._plan, first.cut, count, training=training), first.cut
            )

        return self._schedules.get(key, make)

    @abstractmethod
    def broadcast(self, value: Tensor | None, dtype: torch.dtype, source: int) -> Tensor:
        """A 0-dim tensor of `dtype` from its rank to all."""

    @abstractmethod
    def sum(self, value: Tensor) -> Tensor:
        """Elementwise sum over ranks; each element is non-zero on one rank only, so it is exact."""

    @abstractmethod
    def fetch(self, tensor: Tensor, stage: int) -> Tensor | None:
        """The values that a tensor has on the rank of this stage, on rank 0's CPU; None on other ranks.

        Every rank calls this for the same tensors in the same order, with its own tensor or one on meta.
        """

    @abstractmethod
    def rank_of(self, stage: int) -> int:
        """The rank on which a stage runs."""

    def device_of(self, stage: int, replica: int = 0) -> torch.device | None:
        """Where a stage of a replica in this process computes; None: where the model is."""
        return self.device

    @abstractmethod
    def gather_spans(self) -> list[RawSpan]:
        """Spans of all ranks since `start_step`."""

    def here(self, leaf: Any) -> Any:
        """A tensor on this rank's device; anything else as it is."""
        return leaf.to(self.device) if isinstance(leaf, Tensor) and self.device is not None else leaf

    def start_step(self) -> None:
        """A new step: forget the last one's spans. An evaluation is no step and leaves no spans."""
        if torch.is_grad_enabled():
            self._marks = []

    def apply_early(self, optimizer: Optimizer | None, microbatches: int) -> None:
        """A step of so many begins: where gradients land on the host, the optimizer may take them as they do.

        None: it may not.
        """
        self._early = optimizer, microbatches

    def _around(self, load: Load) -> AbstractContextManager[None]:
        """A run of these microbatches."""
        optimizer, microbatches = self._early
        return self.moves.at_work(optimizer if microbatches == len(load.variants) else None)

    def keep(self, rank: int, marks: Marks) -> None:
        """What a rank did in this step, for the timeline."""
        if torch.is_grad_enabled():
            self._marks.append((rank, marks))

    def own_spans(self) -> list[RawSpan]:
        """Spans of this process since `start_step`."""
        return [(rank, *span) for rank, marks in self._marks for span in marks.spans()]

    def timeline(self) -> Timeline:
        """The last step, on a clock that starts with its first action."""
        spans = self.gather_spans()
        origin = min((s[3] for s in spans), default=0.0)
        ranks = 1 + max((s[0] for s in spans), default=-1)
        built = [
            Span(rank=r, lane=lane, action=a, start_s=start - origin, end_s=end - origin)
            for r, a, lane, start, end in spans
        ]
        return Timeline(source="measured", ranks=ranks, spans=tuple(built))


def make_schedule(plan: Plan, cut: Cut, microbatches: int, *, training: bool) -> Schedule:
    """The plan's schedule for so many microbatches, lowered along the cut's edges, and checked."""
    if training:
        how = plan.schedule, len(plan.stages), microbatches, plan.axes.pp
        schedule = planned(*how, plan.actions)
    else:
        schedule = _forwards(plan, microbatches)
    back = backward_edges(cut.boundaries) if training else frozenset()
    edges = (forward_edges(cut.boundaries), back, step_edges(cut.boundaries))
    lowered = lower(schedule, *edges)
    if training:
        check(lowered, *edges)
    return lowered


def _forwards(plan: Plan, microbatches: int) -> Schedule:
    """All microbatches through a rank's stages, one stage after the other."""
    rows = (
        tuple(Action(stage, Kind.F, mb) for stage in _stages_on(plan, rank) for mb in range(microbatches))
        for rank in range(plan.axes.pp)
    )
    return Schedule("forward", microbatches, tuple(rows))


def _stages_on(plan: Plan, rank: int) -> tuple[int, ...]:
    return tuple(stage for stage, at in enumerate(plan.ranks) if at == rank)


def _outputs(variants: Sequence[Variant], schedule: Schedule, results: Iterable[StepOutputs]) -> GroupOutputs:
    stage = next((p.stage for p in variants[0].cut.programs if p.has_loss), None)
    results = list(results)
    losses = {mb: loss for r in results for mb, loss in r.losses.items()}
    outputs = {mb: out for r in results for mb, out in r.outputs.items()}
    return GroupOutputs(
        variants=variants,
        loss_dtype=variants[0].loss_dtype,
        loss_rank=schedule.rank_of[stage] if stage is not None else 0,
        losses=[losses[mb] for mb in sorted(losses)],
        outputs=[outputs[mb] for mb in sorted(outputs)],
    )


@final
class LocalCrew(Crew):
    """All ranks in this process: on one device, or each `together` with the others on its own.

    `beside` pipelines run at the same time, each with weights of its own.
    """

    def __init__(self, plan: Plan, together: Together | None = None, beside: int = 1) -> None:
        super().__init__(plan)
        self.rank, self.world_size, self.beside = 0, 1, beside
        self.stages = tuple(range(len(plan.stages)))
        self._together = together or OnePlace()
        ranks, transport = range(plan.axes.pp), self._together.transport
        self._transports = [{p: transport(p * beside + r) for p in ranks} for r in range(beside)]

    def run(self, loads: Sequence[Load], make_stage: MakeStage) -> list[GroupOutputs]:
        pipelines = [self._begun(load, make_stage) for load in loads]
        with self._around(loads[0]):
            self._run({seat: rank for pipeline in pipelines for seat, rank in pipeline.items()})
        found = zip(loads, pipelines, strict=True)
        return [self._outputs(load, pipeline) for load, pipeline in found]

    def _outputs(self, load: Load, pipeline: dict[int, Interpreter]) -> GroupOutputs:
        """The model's outputs are where the first replica's are."""
        ranks = list(pipeline.values())
        found = _outputs(load.variants, ranks[0].schedule, [i.outputs for i in ranks])
        here, there = (self.device_of(self.stages[-1], replica) for replica in (load.replica, 0))
        if here != there:
            found.outputs = [tuple(t.to(there) if t.device == here else t for t in o) for o in found.outputs]
        return found

    def _begun(self, load: Load, make_stage: MakeStage) -> dict[int, Interpreter]:
        """The pipeline's ranks by their seats."""
        ranks = self._interpreters(load, make_stage, self._transports[load.replica])
        found = {rank.rank * self.beside + load.replica: rank for rank in ranks}
        for seat, interpreter in found.items():
            used = partial(self._used, interpreter, load.variants)
            own = self._together.inputs(seat, load.inputs, used)
            interpreter.begin(StepInputs(own, load.weights, load.seeds))
        return found

    def _run(self, interpreters: dict[int, Interpreter]) -> None:
        try:
            results = self._together.run(interpreters)
        except BaseException:
            for interpreter in interpreters.values():
                interpreter.reset()
            self._together.reset()
            self.activations.forget()
            self.values.forget()
            self._built.drop(lambda key: True)
            self._at_work.clear()
            raise
        for seat, result in zip(interpreters, results, strict=True):
            self.keep(seat, result.marks)

    @staticmethod
    def _used(interpreter: Interpreter, variants: Sequence[Variant], microbatch: int) -> set[int]:
        """Positions of the inputs that the rank's stages read."""
        own = {action.stage for action in interpreter.schedule.actions[interpreter.rank]}
        return {p for s in own for p in variants[microbatch].cut.programs[s].inputs}

    def device_of(self, stage: int, replica: int = 0) -> torch.device | None:
        return self._together.device(self._plan.ranks[stage] * self.beside + replica)

    def broadcast(self, value: Tensor | None, dtype: torch.dtype, source: int) -> Tensor:
        assert value is not None
        return value

    def sum(self, value: Tensor) -> Tensor:
        return value

    def rank_of(self, stage: int) -> int:
        return 0

    def fetch(self, tensor: Tensor, stage: int) -> Tensor | None:
        return tensor.detach().cpu()

    def gather_spans(self) -> list[RawSpan]:
        return self.own_spans()


def device_of(plan: Plan) -> torch.device:
    """The device of this process: its current CUDA device when the plan is for CUDA devices, else the CPU."""
    if plan.stages[0].device.startswith("cuda") and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def make_groups(group: dist.ProcessGroup, device: torch.device) -> Groups:
    """One gloo group for everything on CPU; on CUDA an NCCL group per queue and gloo for layouts."""
    if device.type == "cpu":
        return Groups((group, group, group, group), group)
    ranks, alone = dist.get_process_group_ranks(group), group.size() < dist.get_world_size()
    made = [
        dist.new_group(ranks, backend=b, use_local_synchronization=alone)
        for b in ("nccl", "nccl", "nccl", "gloo")
    ]
    second, third, fourth, layouts = (g for g in made if isinstance(g, dist.ProcessGroup))
    return Groups((group, second, third, fourth), layouts)


@final
class ProcessCrew(Crew):
    """One rank of the mesh's pipeline that this process is in."""

    def __init__(self, plan: Plan, mesh: Mesh, device: torch.device, *, own_batches: bool = False) -> None:
        super().__init__(plan)
        self.mesh, group = mesh, mesh.pipeline
        others = mesh.replicas
        if others is not None:
            self.replicas = Several(others, own_batches=own_batches)
            self.moves = Early(self.replicas.gradients)
        self._group, self.device = group, device
        self.group = group
        self.rank, self.world_size = group.rank(), group.size()
        self.stages = _stages_on(plan, self.rank)
        self._transport = connect(make_groups(group, device), device, plan.axes.group_size)

    def run(self, loads: Sequence[Load], make_stage: MakeStage) -> list[GroupOutputs]:
        (load,) = loads
        (interpreter,) = self._interpreters(load, make_stage, {self.rank: self._transport})
        interpreter.begin(StepInputs(load.inputs, load.weights, load.seeds))
        with self._around(load):
            result = interpreter.run()
        self.keep(self.rank, result.marks)
        return [_outputs(load.variants, interpreter.schedule, [result])]

    def forget(self, variant: int) -> None:
        super().forget(variant)
        self._transport.forget(CHANNELS * variant)

    def broadcast(self, value: Tensor | None, dtype: torch.dtype, source: int) -> Tensor:
        # fp64 holds every loss dtype exactly.
        wire = None if value is None else value.to("cpu", torch.float64)
        return self._transport.share(wire, source).to(dtype)

    def sum(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, group=self._group)
        return value

    def rank_of(self, stage: int) -> int:
        return self._plan.ranks[stage]

    def fetch(self, tensor: Tensor, stage: int) -> Tensor | None:
        return self._transport.to_first(tensor, self.rank_of(stage))

    def gather_spans(self) -> list[RawSpan]:
        assert self.mesh is not None
        found: list[Any] = [None] * self.mesh.group.size()
        dist.all_gather_object(found, self.own_spans(), group=self.mesh.group)
        return [(rank, *span[1:]) for rank, spans in enumerate(found) for span in spans]
