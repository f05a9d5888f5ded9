"""Runs plans of form "tape": consecutive microbatches whose variants have one wiring run in one pipeline.

    parts      x(4,8)  x(4,5)  x(4,8)  x(2,8)        a variant for each shape, the weights are the same
    groups    [   0       1       0       2  ]       one group: they send the same values

A microbatch for which a guard selects another path through the model may send other values; then it begins a
new group. Groups run one after the other, so gradients add up in order. A stage takes from a microbatch what
its instructions read, so inputs and targets are never sent between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, zip_longest
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from outsize.ir.answers.compilation import StageGraphs
from outsize.program.generate import name_instruction
from outsize.run.device_graphs.graphed_stage import DeviceGraphs
from outsize.run.stage.base import RunnableStage
from outsize.run.stage.batchnorm import Calls, DeferredStatistics
from outsize.run.stage.cut import StageProgram
from outsize.run.stage.rng import seeder
from outsize.run.weights.placement import Placement, placement_of_cut
from outsize.train.batch.batch import Batch
from outsize.train.batch.checks import insist_on_loss, insist_on_model, insist_on_values
from outsize.train.batch.loss_weights import (
    ShareWarnings,
    counted_each,
    doubt_of,
    unexpected_of,
)
from outsize.train.context.run_context import RunContext
from outsize.train.crew.crew import Crew
from outsize.train.crew.replica_copies import ReplicaCopies
from outsize.train.crew.weight_ownership import Ownership
from outsize.train.engine.agreed_programs import AgreedPrograms
from outsize.train.engine.executor import EvaluationGather, Executor
from outsize.train.engine.memory_note import memory_notes, routing_note
from outsize.train.engine.stage_factory import StageCasts, StageFactory
from outsize.train.ranks.replicas import Piece, Replicas
from outsize.train.split.opened_call import CallOutputs, OpenedCall, OpenedGroup
from outsize.train.variants.changed_values import ChangedValues
from outsize.train.variants.instruction_owners import PlacedWeights
from outsize.train.variants.microbatch_group import GroupOutputs, PipelineInputs
from outsize.train.variants.model_state import StructureVersions
from outsize.train.variants.results import BatchLoss, EvalResult, rebuilt
from outsize.train.variants.variant import RecordingOptions, Variant, Variants
from outsize.train.verify.verification import Repeats, Verification


@final
@dataclass(frozen=True, slots=True)
class _Step:
    """The microbatches of one step or evaluation, each with its variant."""

    variants: list[Variant]
    parts: Sequence[Batch]
    number: int
    scale: float = 1.0
    optimizer: Optimizer | None = None
    grad_scale: Tensor | None = None


@final
class _Results:
    """Brings together what groups of microbatches have computed, over ranks and replicas."""

    def __init__(self, crew: Crew, model: nn.Module) -> None:
        self._crew, self._model = crew, model

    def loss(self, results: list[GroupOutputs]) -> BatchLoss | None:
        """Returns the sum of the microbatches' losses by their shares, in order, on every rank; None where
        there is no loss.
        """
        total: Any = None
        own: list[tuple[int, Tensor]] = []
        for result in results:
            for loss, piece in zip(result.losses, result.pieces, strict=False):
                # A mean over no targets is NaN, and has no share.
                counts = piece.counts and piece.share
                part = loss * piece.share if counts else torch.zeros_like(loss)
                total = part if total is None else total + part.to(total.device)
                if piece.counts:
                    own.append((piece.number, loss))
        dtype, rank = results[0].loss_dtype, results[0].loss_rank
        if dtype is None:
            return None
        return BatchLoss(self._crew.replicas.total(self._crew.broadcast(total, dtype, rank)), tuple(own))

    def outputs(
        self, variants: list[Variant], results: list[GroupOutputs], *, gather: bool
    ) -> tuple[Any, ...] | None:
        """Returns the outputs of each microbatch in order, on the last stage of the first replica, or
        everywhere.
        """
        replicas = self._crew.replicas
        local_outputs = [
            (piece.part, tuple(t.cpu() for t in values) if replicas.count > 1 else values)
            for r in results
            for values, piece in zip(r.outputs, r.pieces, strict=bool(r.outputs))
            if piece.counts
        ]
        all_outputs = replicas.on_first(local_outputs) if any(r.outputs for r in results) else None
        if gather:
            known = self._crew.by_microbatch(all_outputs or (), own_batches=replicas.own_batches)
            all_outputs = list(enumerate(known))
        return (
            tuple(
                rebuilt(variants[part], tuple(map(self._crew.here, values)), self._model)
                for part, values in all_outputs or ()
            )
            or None
        )


@final
class Pipelined(Executor):
    """Runs the stages of a cut tape."""

    def __init__(
        self,
        run: RunContext,
        crew: Crew,
        ownership: Ownership,
        recording: RecordingOptions,
    ) -> None:
        model, plan, options = run.whole, run.plan, run.options
        self._model, self._plan, self._crew, self._ownership = model, plan, crew, ownership
        self._run_context = run
        self._seed = options.seed
        self._expert_calls = None if recording.tensor is None else recording.tensor.expert_calls
        self._has_copies = copies = crew.local_replicas > 1
        graphs = options.device_graphs
        records = graphs is not None and graphs.on
        changes = ChangedValues(
            is_silent=crew.global_rank > 0,
            may_run_live=not copies,
            # Dynamo and graphs would make constants of them.
            may_follow=not copies and options.compiled is None and not records,
        )
        self.variants = Variants(model, plan, options.loss_fn, recording, changes)
        # Copies of the model in this process hold the values of when they were made, so all of them count.
        self._settings = StructureVersions(model, plain=copies)
        self._looks_checked = 0
        self._state = 0  # number of the model's state, by its settings
        self._replica_copies = ReplicaCopies(model, crew.local_replicas, ownership.device_of)
        self._statistics = DeferredStatistics(model) if plan.bn == "deferred" else None
        speaks = graphs is not None and graphs.cause == "asked" and crew.global_rank == 0
        self._graphs = DeviceGraphs(speaks=speaks) if records else None
        self._casts: StageCasts = {}
        self._factory = StageFactory(run, self._statistics, self._graphs, self._casts)
        self._programs = AgreedPrograms(crew, plan)
        # Replicas without devices of their own share one pipeline, which runs them one after the other.
        in_turns = not copies and crew.replicas.count < plan.axes.replicas
        self._in_turn = plan.microbatches if in_turns else 0
        self._shares = ShareWarnings(speaks=crew.global_rank == 0)
        self._told: Placement | None = None
        self._adopted: set[int] = set()  # variants of which each weight has found an owner
        self._results = _Results(crew, run.model)
        self._counting: list[bool] = []  # for each piece of the last step: does it count?
        self._verification: Verification | None = None

    @property
    def recorded(self) -> tuple[StageGraphs, ...]:
        return () if self._graphs is None else self._graphs.stages

    def verify(self, every: int) -> None:
        run, statistics = self._run_context, self._statistics

        def make(variant: Variant, number: int, factory: StageFactory | None = None) -> RunnableStage:
            # A factory of its own shares no copies of weights with the step.
            program = variant.cut.programs[number]
            return (factory or StageFactory(run)).make(variant, program, self._model, self._crew.device)

        of_step = partial(make, factory=self._factory)
        repeats = Repeats(make, of_step, nullcontext if statistics is None else statistics.paused)
        self._verification = Verification(run, repeats, every) if every else None

    def prepare(self, parts: Sequence[Batch]) -> None:
        with self._programs.running():
            variants = self._find(parts, outputs=False, waits=False)
            insist_on_model(self._plan, variants[0].captured.graph)
            self._settle(variants)

    def train(
        self,
        parts: Sequence[Batch],
        scale: float,
        step: int,
        optimizer: Optimizer | None = None,
        grad_scale: Tensor | None = None,
        *,
        outputs: bool = False,
    ) -> BatchLoss:
        if self._expert_calls is not None:
            self._expert_calls.reset_load()
        with self._programs.running():
            variants = self._find(parts, outputs=outputs)
            insist_on_loss(variants[0].tape)
            self._ready(variants, parts)
            with self._collecting():
                results = self._run(_Step(variants, parts, step, scale, optimizer, grad_scale))
            loss = self._results.loss(results)
            assert loss is not None
            if outputs:
                loss = replace(loss, outputs=self._results.outputs(variants, results, gather=True))
        return loss

    def evaluate(self, parts: Sequence[Batch], step: int, *, gather: EvaluationGather = False) -> EvalResult:
        with self._programs.running():
            variants = self._find(parts, outputs=True)
            self._ready(variants, parts)
            results = self._run(_Step(variants, parts, step))
            loss = self._results.loss(results)
            total = None if loss is None else loss.total
            if gather == "losses":
                return EvalResult(total, None, loss and tuple(self._crew.by_microbatch(loss.own)))
            outputs = self._results.outputs(variants, results, gather=bool(gather))
        return EvalResult(total, outputs)

    def open(
        self, parts: Sequence[Batch], number: int, seat: int, order: Sequence[int] | None = None
    ) -> OpenedCall:
        """Runs the forwards of a call of the model, whose backward the user begins; it comes to the
        microbatches in this order of the parts, or to the last one first.
        """
        if self._verification is not None:
            self._verification.give_up_for_calls()
        with self._programs.running():
            variants = self._find(parts, outputs=True)
            self._ready(variants, parts)
            step = _Step(variants, parts, number)
            pieces, written = self._begin(step)
            self._adopt(variants)
            groups: list[OpenedGroup] = []
            found: dict[int, tuple[Tensor, ...]] = {}  # By the number of the microbatch.

            def close() -> None:
                for group in groups:
                    group.pipeline.drop()

            try:
                with self._collecting():
                    # A wiring has stages once, so all its microbatches run together, wherever they are.
                    wirings = list(dict.fromkeys(variants[piece.part].wiring for piece in pieces))
                    by_wiring = sorted(pieces, key=lambda piece: wirings.index(variants[piece.part].wiring))
                    for ((replica, members),) in self._rounds(variants, by_wiring):
                        numbers = [piece.number for piece in members]
                        places = _backwards(members, order)
                        load = self._load(step, members, replica)._replace(seat=seat, order=places)
                        pipeline = self._crew.open(load, self._stage_of_call)
                        groups.append(OpenedGroup(numbers, pipeline))
                        found |= dict(zip(numbers, pipeline.forward().outputs, strict=False))
                buffers = self._ownership.own(written) if written else ()
                # By `data` the copies count as no change: graphs that wait have what they need of buffers.
                self._crew.replicas.spread(buffer.data for buffer in buffers)
            except BaseException as error:
                close()
                if isinstance(error, Exception):
                    name_instruction(error)
                raise
            self._end()
        values = [found[piece.number] for piece in pieces] if found else []
        return OpenedCall(_call_outputs(step, pieces, values, self._crew.replicas), groups, close)

    def outputs(self, parts: Sequence[Batch], number: int) -> CallOutputs:
        """Runs the forwards of a call of the model without graphs."""
        with self._programs.running():
            variants = self._find(parts, outputs=True)
            self._ready(variants, parts)
            step = _Step(variants, parts, number)
            with self._collecting():
                results = self._run(step)
        values = [values for result in results for values in result.outputs]
        pieces = [piece for result in results for piece in result.pieces]
        return _call_outputs(step, pieces, values, self._crew.replicas)

    def _find(self, parts: Sequence[Batch], *, outputs: bool, waits: bool = True) -> list[Variant]:
        """Returns the variant of each microbatch."""
        self._state = self._settings.number()
        variants = self.variants.find_each(parts, outputs=outputs, state=self._state)
        self._programs.agree(variants, parts, self.variants.change, waits=waits)
        return variants

    def _run(self, step: _Step) -> list[GroupOutputs]:
        """Runs the microbatches of this replica, in groups of one wiring."""
        replicas, grad = self._crew.replicas, torch.is_grad_enabled()
        pieces, written = self._begin(step)
        if not grad:
            results = self._run_pieces(step, pieces)
        else:
            self._adopt(step.variants)
            verification = self._verification
            is_verified = verification is not None and verification.due(step.number)
            with replicas.summing(self._ownership.trained_by_stage), self._all_or_nothing(step):
                results = self._run_pieces(step, pieces, verification if is_verified else None)
                if self._has_copies:
                    self._replica_copies.add_up(self._state)
            if verification is not None and is_verified:
                with self._all_or_nothing(step):
                    verification.conclude()
            replicas.spread(self._ownership.own(written) if written else ())
        self._end()
        return results

    def _begin(self, step: _Step) -> tuple[list[Piece], frozenset[str]]:
        """Begins a step; returns what this replica runs, and the buffers that programs of any one write."""
        counted = counted_each([variant.shares for variant in step.variants], step.parts)
        replicas = self._crew.replicas
        written = _written(step.variants) if replicas.count > 1 else frozenset[str]()
        pieces, written = replicas.pieces(counted, written)
        each = [variant.shares for variant in step.variants]
        self._shares.warn(doubt_of(each, counted), unexpected_of(each))
        self._counting = [piece.counts for piece in pieces]
        self._crew.start_step()
        if self._has_copies:
            self._replica_copies.follow(self._state)
        return pieces, written

    def _end(self) -> None:
        """Ends a step: drops the programs that were used longest ago."""
        self._settings.ran()
        for number in self.variants.trim():
            # A slice sends over the channels of its whole program.
            self._crew.forget(number, None if number < 0 else self._programs.drop(number))
            self._adopted.discard(number)

    @contextmanager
    def _all_or_nothing(self, step: _Step) -> Iterator[None]:
        """Drops the gradients of a step that fails in its middle: part of the microbatches are in them."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, torch.OutOfMemoryError):
                calls = self._expert_calls
                samples = sum(part.size for part in step.parts) * self._crew.replicas.count
                for note in memory_notes(self._plan, self._crew, self._model, step.optimizer, samples):
                    error.add_note(note)
                for note in routing_note(None if calls is None else calls.load):
                    error.add_note(note)
            for parameters in self._ownership.trained_by_stage().values():
                for trained in parameters:
                    trained.parameter.grad = None
            error.add_note("outsize: the step was dropped with all gradients, also those of steps before it")
            raise

    def _run_pieces(
        self, step: _Step, pieces: list[Piece], verification: Verification | None = None
    ) -> list[GroupOutputs]:
        with ExitStack() as stack:
            for casts in self._casts.values():
                if casts.kept is not None:
                    stack.enter_context(casts.kept.step())
            try:
                return self._run_rounds(step, pieces, verification)
            finally:  # Copies of weights that autocast's calls have used are those of one step.
                for casts in self._casts.values():
                    casts.clear()

    def _run_rounds(
        self, step: _Step, pieces: list[Piece], verification: Verification | None
    ) -> list[GroupOutputs]:
        results: list[GroupOutputs] = []
        rounds = self._rounds(step.variants, pieces)
        for groups in rounds:
            self._crew.replicas.begin_round(last=groups is rounds[-1])
            loads = [self._load(step, members, replica) for replica, members in groups]
            if verification is not None and groups is rounds[0]:
                loads = [verification.begin(step.number, load) for load in loads]
            is_whole_step = len(groups[0][1]) == len(step.parts)
            try:
                outputs = self._crew.run(loads, self._stage, step.optimizer if is_whole_step else None)
            except Exception as error:
                name_instruction(error)
                raise
            pairs = zip(groups, outputs, strict=True)
            results += [replace(group, pieces=members) for (_, members), group in pairs]
        return sorted(results, key=lambda result: result.pieces[0].number)

    def _load(self, step: _Step, pieces: Sequence[Piece], replica: int) -> PipelineInputs:
        variants = [step.variants[piece.part] for piece in pieces]
        load = PipelineInputs(
            variants,
            [
                variant.inputs(step.parts[p.part], p.ratios)
                for variant, p in zip(variants, pieces, strict=True)
            ],
            [piece.share * step.scale for piece in pieces],
            [seeder(self._seed, step.number, piece.number) for piece in pieces],
            self._programs.channels(variants),
            replica,
            step.grad_scale,
        )
        return load.in_slices() if variants[0].slices else load

    def _rounds(self, variants: list[Variant], pieces: list[Piece]) -> list[list[tuple[int, list[Piece]]]]:
        """Returns rounds of groups of one wiring.

        The groups of a round run at the same time, each with the number of its replica in this process.
        """
        count = self._crew.local_replicas
        replica_microbatches = self._in_turn or -(-len(pieces) // count)
        groups: list[list[tuple[int, list[Piece]]]] = [[] for _ in range(count)]
        for (_, group_index), members in groupby(
            pieces, key=lambda p: (variants[p.part].wiring, p.part // replica_microbatches)
        ):
            groups[group_index % count].append((group_index % count, list(members)))
        return [[group for group in round_groups if group] for round_groups in zip_longest(*groups)]

    def _adopt(self, variants: Sequence[Variant]) -> None:
        fresh = {v.number: v for v in variants if v.number not in self._adopted}
        if fresh:
            for variant in fresh.values():
                self._ownership.adopt(partial(_placement, self._model, variant))
            self._adopted |= fresh.keys()
            self._tell_placement()

    def _ready(self, variants: Sequence[Variant], parts: Sequence[Batch]) -> None:
        if self._told is None:
            self._settle(variants)
        is_checked = self._looks_checked == self._settings.looks
        insist_on_values(() if is_checked else self._ownership.used(), parts[0])
        self._looks_checked = self._settings.looks

    def _settle(self, variants: Sequence[Variant]) -> None:
        self._ownership.settle(partial(_placement, self._model, variants[0]))
        self._tell_placement()

    def _tell_placement(self) -> None:
        """Lets programs that are recorded from now on find the weights where they are."""
        placement = self._ownership.placement
        if placement is not self._told:
            self._told = placement
            self.variants.place(PlacedWeights(placement.homes, apart=self._crew.world_size > 1))

    def _stage(
        self, variant: Variant, program: StageProgram, replica: int, device: torch.device | None
    ) -> RunnableStage:
        model = self._replica_copies.of(replica, self._state)
        return self._factory.make(variant, program, model, device, is_copy=replica > 0)

    def _stage_of_call(
        self, variant: Variant, program: StageProgram, replica: int, device: torch.device | None
    ) -> RunnableStage:
        return self._factory.make(variant, program, self._model, device, of_call=self._crew.moves)

    def _collecting(self) -> AbstractContextManager[None]:
        return (
            nullcontext() if self._statistics is None else self._statistics.collecting(self._gathered_calls)
        )

    def _gathered_calls(self, calls: Calls) -> Calls:
        """Returns the moments of all replicas' microbatches in order; each replica has equally many per
        module.
        """
        counts, replicas = self._counting, self._crew.replicas
        if replicas.count == 1:
            return calls
        own_calls = [part[: len(part) * sum(counts) // len(counts)] for part in calls]
        on_host = [[(n, mean.cpu(), m2.cpu()) for n, mean, m2 in part] for part in own_calls]
        return [list(chain(*parts)) for parts in zip(*replicas.of_all(on_host), strict=True)]


def _placement(model: nn.Module, variant: Variant) -> Placement:
    """Returns where a variant puts the weights; all ranks have the buffers that a step reads first."""
    return placement_of_cut(variant.cut, model, variant.buffers_read_first)


def _call_outputs(
    step: _Step, pieces: Sequence[Piece], values: Sequence[tuple[Tensor, ...]], replicas: Replicas
) -> CallOutputs:
    counted = counted_each([variant.shares for variant in step.variants], step.parts)
    return CallOutputs(step.variants, pieces, values, counted, replicas.running(len(step.parts)))


def _backwards(members: Sequence[Piece], order: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the places of the pieces in the order of their backwards: that of their parts, and to the last
    one of a part first.
    """
    places = list(reversed(range(len(members))))
    if order is None:
        return tuple(places)
    return tuple(place for part in order for place in places if members[place].part == part)


def _written(variants: Sequence[Variant]) -> frozenset[str]:
    """Returns the buffers that a forward of these variants changes."""
    distinct = {id(variant): variant for variant in variants}.values()
    return frozenset(chain.from_iterable(p.written for v in distinct for p in v.cut.programs))
