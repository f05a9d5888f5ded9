"""Crew: the ranks that run a schedule together, in one process or over processes.

`LocalCrew` is all ranks in one process, which take turns (most tests, and `outsize check`). `ProcessCrew` is
one rank per process over the run's group. The engine uses both through one interface.

Each object holds those to its right and none to its left, nobody sets another's attributes, and each may ask
the RunContext (train/context/run_context.py), which was there before all of them:

    Engine ─┬─ Executor (Pipelined or ByModules) ─┬─ Variants        recorded and cut programs
            │                                     ├─ StageFactory    makes stages of them
            │                                     ├─ Ownership ── Crew
            │                                     └─ Crew
            ├─ EngineState, EngineWeights, WeightUpdate ── Ownership ── Crew
            └─ Ownership ── Crew ─┬─ Replicas                        sums over data-parallel ranks
                                  └─ Interpreters ── Stages, Transport
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from outsize.device.accelerators import CPU, is_accelerator, widest_float
from outsize.device.clock import HOST, Clock, CoreClock, clock_of
from outsize.device.streams import TorchStreams
from outsize.errors import RankFailed
from outsize.ir.plan import Plan
from outsize.ir.schedule import NO_MICROBATCH, Action, Kind, Schedule
from outsize.ir.timeline import Lane, Span, Timeline
from outsize.run.interpreter.in_process import own_inputs
from outsize.run.interpreter.interpreter import Interpreter, Programs, StepInputs, StepOutputs
from outsize.run.interpreter.trace import Marks
from outsize.run.moves.base import Moves
from outsize.run.moves.boundary_values import BoundaryValues
from outsize.run.moves.fsdp import Fill, ShardedWeights
from outsize.run.stage.base import RunnableStage
from outsize.run.stage.boundary import backward_edges, forward_edges, step_edges
from outsize.run.stage.cut import Cut
from outsize.run.transport.base import CHANNELS, Transport
from outsize.run.transport.control_messages import all_gather_json, all_gather_values
from outsize.run.transport.process_group import SENDS_AHEAD, TransportGroups
from outsize.run.transport.rank_collectives import RankCollectives
from outsize.run.transport.same_host import connect
from outsize.schedules.builders import planned
from outsize.schedules.check import check
from outsize.schedules.lower import lower
from outsize.schedules.message import wires
from outsize.schedules.queues import circle_of
from outsize.train.context.run_context import RunContext, device_of, stages_on
from outsize.train.crew.open_pipeline import OpenPipeline, schedule_of_call
from outsize.train.variants.lru import LruCache
from outsize.train.variants.microbatch_group import GroupOutputs, MakeStage, PipelineInputs
from outsize.train.variants.variant import Variant

_Combination = tuple[tuple[int, ...], tuple[int, ...], bool, int, int | None, tuple[int, ...], Hashable]
"""Variants and channels by microbatch, whether there are gradients, the replica, the seat of a call and the
order of its backwards, and what is verified.
"""
_StageKey = tuple[int, int, int, int | None]
"""A variant, a stage, a replica, and the seat of a call."""
RawSpan = tuple[int, str, Lane, float, float]


# How many combinations of variants keep their interpreters, and how many schedules are kept.
_BUILT, _SCHEDULES = 32, 64
_CHANNELS_OF_A_SEAT = 1 << 20  # more than there are programs


class Crew(ABC):
    """Runs groups of microbatches whose variants have one wiring."""

    def __init__(self, run: RunContext) -> None:
        self._plan, self.global_rank = run.plan, run.global_rank
        # A plan derives these at each question; the index of the first is the stage.
        self._rank_of, self._on_host = run.plan.ranks, run.plan.host_stages
        self.rank, self.world_size, self.stages = run.rank, run.world_size, run.stages
        self.local_replicas, self.mesh, self.device = run.local_replicas, run.mesh, run.device
        self.replicas, self.progress = run.replicas, run.progress
        self._moves, self.values, self.activations = run.moves, run.values, run.activations
        self._marks: list[tuple[int, Marks]] = []
        self._built = LruCache[_Combination, list[Interpreter]](_BUILT)
        self._schedules = LruCache[Any, Schedule](_SCHEDULES)
        self._executors: dict[_StageKey, RunnableStage] = {}
        self._between: Callable[[int, Transport], Transport] = lambda _, transport: transport

    def send_through(self, between: Callable[[int, Transport], Transport]) -> None:
        """Lets what `between(rank, transport)` returns carry the messages of steps from now on, for a
        rehearsal that looks at each message; `rank` is one of the pipeline.
        """
        self._between = between
        self._built.drop(lambda key: True)

    @property
    def moves(self) -> Moves:
        """Returns the mover that brings the weights of stages to where they compute."""
        return self._moves

    def shard(self, model: nn.Module, home: Mapping[str, int], experts: Collection[str], fill: Fill) -> None:
        """Divides the weights that `home` assigns to a stage over this rank's replicas, before the first
        step; those of `experts` over the ranks that have the same ones.

        `fill(names)` is called before weights are divided, so that they have their values.
        """
        assert self.mesh is not None
        gather_once, mesh = self._plan.weight_policy.gathers_once, self.mesh.sharding()
        meshes = dict.fromkeys(home, mesh)
        if experts:
            meshes |= dict.fromkeys(experts, self.mesh.sharding(of_experts=True))
        self._moves = ShardedWeights(model, home, meshes, fill, once=gather_once)
        self.values = BoundaryValues(copy_weight_view=self._moves.copy_weight_view)

    @property
    def gradient_device(self) -> torch.device:
        """Returns where this rank's gradients are at the end of a step, the same on every rank."""
        return torch.device(CPU) if self._plan.streams or self.device is None else self.device

    @abstractmethod
    def run(
        self, loads: Sequence[PipelineInputs], make_stage: MakeStage, optimizer: Optimizer | None = None
    ) -> list[GroupOutputs]:
        """Runs all microbatches, each under its variant, forward and (with grad on) backward.

        There is one load for each replica of this process. `optimizer` is given when the microbatches are a
        whole step; it may step as gradients land on the host.
        """

    @abstractmethod
    def open(self, load: PipelineInputs, make_stage: MakeStage) -> OpenPipeline:
        """Returns the pipeline of one call, which is about to run all forwards, and keeps their graphs until
        the user's backward comes.
        """

    def forget(self, variant: int, channel: int | None) -> None:
        """Drops what was built for the variant of this number, which no longer exists.

        `channel` is the number of its channels, where no other variant uses them.
        """
        self._built.drop(lambda key: variant in key[0])
        self._executors = {key: stage for key, stage in self._executors.items() if key[0] != variant}

    def _interpreters(
        self, load: PipelineInputs, make_stage: MakeStage, transports: Mapping[int, Transport]
    ) -> list[Interpreter]:
        """Returns the interpreters of the ranks in `transports`, for these variants in this order."""
        variants, replica = load.variants, load.replica

        def build() -> list[Interpreter]:
            schedule = self._schedule(load)
            self._connect(schedule)
            actions = chain.from_iterable(schedule.actions[rank] for rank in transports)
            places = {(a.stage, a.microbatch) for a in actions if a.kind not in NO_MICROBATCH}
            stages = {(s, mb): self._stage(load, mb, s, make_stage) for s, mb in sorted(places)}
            channels = [CHANNELS * channel for channel in load.channels]
            cuts = [variant.cut for variant in variants]
            moves = self._moves_of(cuts, of_call=load.seat is not None)
            if load.verified is not None:
                moves = load.verified.moves(moves)
                stages = {place: load.verified.shown(stage, *place) for place, stage in stages.items()}
            programs = Programs(
                len(self._plan.stages), lambda *place: stages[place], channels, moves, self.values
            )
            rank_transports = transports.items()
            return [
                Interpreter(r, schedule, programs, self._between(r, t), self._clock(r, replica))
                for r, t in rank_transports
            ]

        numbers, grad = tuple(variant.number for variant in variants), torch.is_grad_enabled()
        verified = None if load.verified is None else load.verified.key
        key = (numbers, tuple(load.channels), grad, replica, load.seat, load.order, verified)
        return self._built.get(key, build)

    def _moves_of(self, cuts: Sequence[Cut], *, of_call: bool) -> Moves:
        """Returns the moves of weights, values and activations, for microbatches with these programs."""
        moves = self.moves.of_call(cuts) if of_call else self.moves.of(cuts)
        return self.activations.combined_with(self.values.combined_with(moves, cuts))

    def _stage(self, load: PipelineInputs, microbatch: int, number: int, make: MakeStage) -> RunnableStage:
        variant, replica = load.variants[microbatch], load.replica
        key = (variant.number, number, replica, load.seat)
        if key not in self._executors:
            program, device = variant.cut.programs[number], self.device_of(number, replica)
            self._executors[key] = make(variant, program, replica, device)
        return self._executors[key]

    def _stages(self, load: PipelineInputs) -> dict[tuple[int, int], RunnableStage]:
        """Returns this process's stages of a call, by stage and microbatch."""
        each = ((s, mb) for s in self.stages for mb in range(len(load.variants)))
        return {
            (s, mb): self._executors[load.variants[mb].number, s, load.replica, load.seat] for s, mb in each
        }

    def _clock(self, rank: int, replica: int) -> Clock:
        """Returns the clock of the device on which the rank's stages compute."""
        return clock_of(self._device_at(rank, replica) or device_of(self._plan))

    def _schedule(self, load: PipelineInputs) -> Schedule:
        variants, order, of_call = load.variants, load.order, load.seat is not None
        training, count, first = torch.is_grad_enabled(), len(variants), variants[0]
        verified = load.verified
        key = (first.wiring, count, training, of_call, order, load.slices, verified and verified.key)

        def make() -> Schedule:
            if of_call:
                on = {rank: stages_on(self._plan, rank) for rank in range(self._plan.axes.pp)}
                lowered = schedule_of_call(self._plan, first.cut, order, on)
            else:
                lowered = make_schedule(
                    self._plan, first.cut, count // load.slices, training=training, slices=load.slices
                )
            cuts = [variant.cut for variant in variants]
            moves = self._moves_of(cuts, of_call=of_call)
            return (moves if verified is None else verified.moves(moves)).scheduled(lowered, first.cut)

        return self._schedules.get(key, make)

    @abstractmethod
    def _connect(self, schedule: Schedule) -> None:
        """Makes the connections of a schedule's messages before it runs for the first time."""

    @abstractmethod
    def broadcast(self, value: Tensor | None, dtype: torch.dtype, source: int) -> Tensor:
        """Returns the 0-dim tensor of `dtype` that rank `source` passes, on every rank's device.

        The host waits for no device.
        """

    @abstractmethod
    def sum(self, value: Tensor) -> Tensor:
        """Returns the elementwise sum over ranks of a tensor on the host or on this rank's device, in place.

        Each element is non-zero on one rank only, so it is exact.
        """

    def largest(self, value: Tensor) -> Tensor:
        """Returns the elementwise maximum over all processes of the run, in place."""
        if self.mesh is not None:
            RankCollectives.of(self.mesh.group.of_tensor(value)).all_reduce(value, dist.ReduceOp.MAX)
        return value

    @abstractmethod
    def fetch(self, tensor: Tensor, stage: int) -> Tensor | None:
        """Returns the values that a tensor has on the rank of this stage, on rank 0's CPU; None on other
        ranks.

        Every rank calls this for the same tensors in the same order, with its own tensor or one on meta.
        """

    @abstractmethod
    def bring(self, tensor: Tensor, source: int, destination: int) -> Tensor | None:
        """Returns the values that a tensor has on the rank of stage `source`, on that of `destination`; None
        on other ranks.

        Values that are there already are not copied. Every rank calls this alike.
        """

    @abstractmethod
    def rank_of(self, stage: int) -> int:
        """Returns the rank on which a stage runs."""

    def device_of(self, stage: int, replica: int = 0) -> torch.device | None:
        """Returns the device where a stage of a local replica computes; None: the model's own device."""
        return torch.device(CPU) if stage in self._on_host else self._device_at(self._rank_of[stage], replica)

    def _device_at(self, rank: int, replica: int) -> torch.device | None:
        """Returns the device of a rank of a local replica."""
        return self.device

    @abstractmethod
    def gather_spans(self) -> list[RawSpan]:
        """Returns the spans of all ranks since `start_step`."""

    def by_microbatch(self, own: Iterable[tuple[int, Any]], *, own_batches: bool = False) -> list[Any]:
        """Returns what ranks have for each microbatch, in the order of its number, on all ranks of the run;
        with `own_batches` on those of this replica. Tensors of other ranks are on the host.

        Every rank calls this with the pairs that it has. Raises NotSendable.
        """
        known = list(own)
        if self.mesh is None:
            return [value for _, value in known]
        group = self.mesh.pipeline.host if own_batches else self.mesh.group.host
        by_number = dict(chain.from_iterable(all_gather_values(known, group, "values of microbatches")))
        return [value for _, value in sorted(by_number.items(), key=lambda pair: pair[0])]

    def here(self, leaf: Any) -> Any:
        """Returns a tensor moved to this rank's device; anything else is returned as it is."""
        return leaf.to(self.device) if isinstance(leaf, Tensor) and self.device is not None else leaf

    def insist_on_ended_steps(self) -> None:
        """Raises RankFailed where a step has failed that other ranks are still in."""
        return

    def start_step(self) -> None:
        """Clears the spans of the last step. An evaluation is no step: it records no spans."""
        if torch.is_grad_enabled():
            for _, marks in self._marks:
                marks.drop()
            self._marks = []

    def keep(self, rank: int, marks: Marks) -> None:
        """Records the time marks of a rank in this step, for the timeline."""
        if torch.is_grad_enabled():
            self._marks.append((rank, marks))
            if self.progress.samples_now:
                self.progress.keep(marks.lend())
        else:
            marks.drop()

    def own_spans(self) -> list[RawSpan]:
        """Returns the spans of this process since `start_step`."""
        return [(rank, *span) for rank, marks in self._marks for span in marks.spans()]

    def timeline(self) -> Timeline:
        """Returns the timeline of the last step; time 0 is the start of its first action."""
        spans = self.gather_spans()
        origin = min((s[3] for s in spans), default=0.0)
        ranks = 1 + max((s[0] for s in spans), default=-1)
        spans_from_origin = [
            Span(rank=r, lane=lane, action=a, start_s=start - origin, end_s=end - origin)
            for r, a, lane, start, end in spans
        ]
        return Timeline(source="measured", ranks=ranks, spans=tuple(spans_from_origin))


def crew_of(run: RunContext) -> Crew:
    """Returns the ranks of the run that are in this process."""
    return LocalCrew(run) if run.mesh is None else ProcessCrew(run)


def make_schedule(plan: Plan, cut: Cut, microbatches: int, *, training: bool, slices: int = 1) -> Schedule:
    """Returns the plan's schedule for `microbatches` microbatches, each in so many `slices`, lowered along
    the cut's edges, and checked.
    """
    if training:
        schedule = planned(plan.schedule, len(plan.stages), microbatches, plan.axes.pp, plan.actions, slices)
    else:
        schedule = _forwards(plan, microbatches * slices)
    forward, over_steps = forward_edges(cut.boundaries), step_edges(cut.boundaries)
    backward = backward_edges(cut.boundaries) if training else frozenset()
    lowered = lower(schedule, forward, backward, over_steps)
    if training:
        check(lowered, forward, backward, over_steps)
    return lowered


def _forwards(plan: Plan, microbatches: int) -> Schedule:
    """Returns the schedule of an evaluation: all microbatches through a rank's stages, one stage after the
    other.
    """
    rows = (
        tuple(Action(stage, Kind.F, mb) for stage in stages_on(plan, rank) for mb in range(microbatches))
        for rank in range(plan.axes.pp)
    )
    return Schedule("forward", microbatches, tuple(rows))


def _outputs(variants: Sequence[Variant], schedule: Schedule, results: Iterable[StepOutputs]) -> GroupOutputs:
    stage = next((p.stage for p in variants[0].cut.programs if p.has_loss), None)
    results = list(results)
    losses = {mb: loss for r in results for mb, loss in r.losses.items()}
    outputs = {mb: out for r in results for mb, out in r.outputs.items()}
    return GroupOutputs(
        variants=variants,
        loss_dtype=variants[0].loss_dtype,
        loss_rank=schedule.rank_of[stage] if stage is not None else 0,
        losses=[losses[mb] for mb in sorted(losses) if _has_whole_loss(variants[mb])],
        outputs=[outputs[mb] for mb in sorted(outputs)],
    )


def _has_whole_loss(variant: Variant) -> bool:
    """Tells whether a program's loss is that of its microbatch: that of its last slice has gone on from all
    others.
    """
    of = variant.slice
    return of is None or of.number == of.keeper.slices - 1


def _used(
    interpreter: Interpreter, variants: Sequence[Variant], elsewhere: Collection[int], microbatch: int
) -> set[int]:
    """Returns the positions of the inputs that the rank's stages read, but those of `elsewhere`."""
    stages = {action.stage for action in interpreter.schedule.actions[interpreter.rank]}.difference(elsewhere)
    return {p for s in stages for p in variants[microbatch].cut.programs[s].inputs}


@final
class LocalCrew(Crew):
    """Runs all ranks in this process: on one device, or each on its own device (`together`).

    Several `local_replicas` are pipelines that run at the same time, each with a copy of the weights.
    """

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        self._together, replicas = run.together, run.local_replicas
        ranks, transport = range(run.plan.axes.pp), self._together.transport
        self._transports = [{p: transport(p * replicas + r) for p in ranks} for r in range(replicas)]

    def run(
        self, loads: Sequence[PipelineInputs], make_stage: MakeStage, optimizer: Optimizer | None = None
    ) -> list[GroupOutputs]:
        pipelines = [self._start_pipeline(load, make_stage) for load in loads]
        interpreters = {seat: rank for pipeline in pipelines for seat, rank in pipeline.items()}
        with self.moves.step_context(optimizer):
            results = self._run(interpreters)
        for seat, result in zip(interpreters, results, strict=True):
            self.keep(seat, result.marks)
        return [self._outputs(load, pipeline) for load, pipeline in zip(loads, pipelines, strict=True)]

    def open(self, load: PipelineInputs, make_stage: MakeStage) -> OpenPipeline:
        # Autograd may come to another call while the backward of this one waits for a device.
        channels = [channel + (load.seat or 0) * _CHANNELS_OF_A_SEAT for channel in load.channels]
        load = load._replace(channels=channels)
        pipeline = self._start_pipeline(load, make_stage)

        def run() -> GroupOutputs:
            self._run(pipeline)
            return self._outputs(load, pipeline)

        return OpenPipeline(pipeline, run, self._stages(load), self.moves.abandon, load.order)

    def _outputs(self, load: PipelineInputs, pipeline: dict[int, Interpreter]) -> GroupOutputs:
        """Returns the group's outputs, moved to the device of the first replica's last stage."""
        ranks = list(pipeline.values())
        group = _outputs(load.variants, ranks[0].schedule, [i.outputs for i in ranks])
        replica_device, first_device = (
            self.device_of(self.stages[-1], replica) for replica in (load.replica, 0)
        )
        if replica_device == first_device:
            return group
        return replace(
            group,
            outputs=[
                tuple(t.to(first_device) if t.device == replica_device else t for t in o)
                for o in group.outputs
            ],
        )

    def _start_pipeline(self, load: PipelineInputs, make_stage: MakeStage) -> dict[int, Interpreter]:
        """Starts a replica's pipeline with its inputs and returns its interpreters by seat."""
        ranks = self._interpreters(load, make_stage, self._transports[load.replica])
        seats = {rank.rank * self.local_replicas + load.replica: rank for rank in ranks}
        for seat, interpreter in seats.items():
            used = partial(_used, interpreter, load.variants, self._on_host)
            own = self._together.inputs(seat, load.inputs, used)
            interpreter.begin(StepInputs(own, load.weights, load.seeds, load.grad_scale))
        return seats

    def _run(self, interpreters: dict[int, Interpreter]) -> list[StepOutputs]:
        try:
            return self._together.run(interpreters)
        except BaseException:
            for interpreter in interpreters.values():
                interpreter.reset()
            self._together.reset()
            self.activations.forget()
            self.values.forget()
            self._built.drop(lambda key: True)
            self._executors.clear()
            raise

    def _device_at(self, rank: int, replica: int) -> torch.device | None:
        return self._together.device(rank * self.local_replicas + replica)

    def _connect(self, schedule: Schedule) -> None:
        """Does nothing: ranks of one process are connected."""

    def broadcast(self, value: Tensor | None, dtype: torch.dtype, source: int) -> Tensor:
        assert value is not None
        return value

    def sum(self, value: Tensor) -> Tensor:
        return value

    def rank_of(self, stage: int) -> int:
        return 0

    def fetch(self, tensor: Tensor, stage: int) -> Tensor | None:
        return tensor.detach().cpu()

    def bring(self, tensor: Tensor, source: int, destination: int) -> Tensor | None:
        return tensor.detach()

    def gather_spans(self) -> list[RawSpan]:
        return self.own_spans()


@final
class ProcessCrew(Crew):
    """Runs one rank of the mesh's pipeline that this process is in."""

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        assert run.mesh is not None
        assert run.device is not None
        self._group, self._place = run.mesh.pipeline, run.device
        groups = TransportGroups.make(self._group, self._place)
        self._transport = connect(groups, self._place, run.plan.axes.group_size)
        self._streams, self._has_failed = TorchStreams([str(self._place)]), False

    def run(
        self, loads: Sequence[PipelineInputs], make_stage: MakeStage, optimizer: Optimizer | None = None
    ) -> list[GroupOutputs]:
        (load,) = loads
        (interpreter,) = self._interpreters(load, make_stage, {self.rank: self._transport})
        own = own_inputs(
            self._streams, self._place, load.inputs, partial(_used, interpreter, load.variants, self._on_host)
        )
        counts = self.progress.samples_now and clock_of(self._place) is HOST
        with closing(CoreClock()) if counts else nullcontext() as clock:
            interpreter.begin(StepInputs(own, load.weights, load.seeds, load.grad_scale), clock)
            self._has_failed = True  # Unless it ends.
            self.progress.runs(interpreter)
            with self.moves.step_context(optimizer):
                result = interpreter.run()
        self._has_failed = False
        self.keep(self.rank, result.marks)
        return [_outputs(load.variants, interpreter.schedule, [result])]

    def open(self, load: PipelineInputs, make_stage: MakeStage) -> OpenPipeline:
        (interpreter,) = self._interpreters(load, make_stage, {self.rank: self._transport})
        own = own_inputs(
            self._streams, self._place, load.inputs, partial(_used, interpreter, load.variants, self._on_host)
        )
        interpreter.begin(StepInputs(own, load.weights, load.seeds, load.grad_scale))

        def run() -> GroupOutputs:
            self._has_failed = True  # Unless it ends.
            self.progress.runs(interpreter)
            result = interpreter.run()
            self._has_failed = False
            return _outputs(load.variants, interpreter.schedule, [result])

        stages = self._stages(load)
        return OpenPipeline({self.rank: interpreter}, run, stages, self.moves.abandon, load.order)

    def insist_on_ended_steps(self) -> None:
        if self._has_failed:
            raise RankFailed(
                "a step has failed in its middle on this rank, and the other ranks wait in it",
                numbers=f"rank {self.global_rank}",
                next_step="end all ranks, and go on from a checkpoint",
            )

    def forget(self, variant: int, channel: int | None) -> None:
        super().forget(variant, channel)
        if channel is not None:
            self._transport.forget(CHANNELS * channel)

    def broadcast(self, value: Tensor | None, dtype: torch.dtype, source: int) -> Tensor:
        # fp64 holds every loss dtype exactly.
        widest = widest_float(self._place)
        wire = None if value is None else value.to(self._place, widest)
        if not is_accelerator(self._place):
            return self._transport.share(wire, source).to(dtype)
        wire = torch.zeros((), dtype=widest, device=self._place) if wire is None else wire
        dist.broadcast(wire, group=self._group.device, group_src=source)
        return wire.to(dtype)

    def _connect(self, schedule: Schedule) -> None:
        self._transport.open((source, to, kind is Kind.B) for source, to, kind in wires(schedule))
        if circle_of(schedule, ahead=SENDS_AHEAD - 1):
            self._transport.lift_bound()

    def sum(self, value: Tensor) -> Tensor:
        RankCollectives.of(self._group.of_tensor(value)).all_reduce(value)
        return value

    def rank_of(self, stage: int) -> int:
        return self._rank_of[stage]

    def fetch(self, tensor: Tensor, stage: int) -> Tensor | None:
        return self._transport.to_rank(tensor, self.rank_of(stage))

    def bring(self, tensor: Tensor, source: int, destination: int) -> Tensor | None:
        source, destination = self.rank_of(source), self.rank_of(destination)
        if source == destination:
            return tensor.detach() if self.rank == source else None
        return self._transport.to_rank(tensor, source, destination)

    def gather_spans(self) -> list[RawSpan]:
        assert self.mesh is not None
        gathered: list[list[RawSpan]] = all_gather_json(
            self.own_spans(), self.mesh.group.host, "times of a step"
        )
        return [(rank, *span[1:]) for rank, spans in enumerate(gathered) for span in spans]
