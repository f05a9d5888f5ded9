"""A plan of form "tape" at work: consecutive microbatches whose variants have one wiring run in one pipeline.

    parts      x(4,8)  x(4,5)  x(4,8)  x(2,8)        a variant for each shape, the weights are the same
    groups    [   0       1       0       2  ]       all of them: they send the same values between stages

A microbatch that takes another way through the model (a guard) may send others; then it begins a new group,
and groups run one after the other, so gradients add up in order. A stage takes from a microbatch what its
instructions read, so inputs and targets never travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, groupby, zip_longest
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.capture.ladder import LossFn
from outsize.ir.plan import Plan
from outsize.ir.segments import blocks, segments
from outsize.program.generate import compile_slice
from outsize.run.compiled import compiled
from outsize.run.cut import StageProgram
from outsize.run.homes import placement_of_cut
from outsize.run.placed import placed
from outsize.run.recompute import InSegments, Recompute
from outsize.run.rng import seeder
from outsize.run.stage import Stage
from outsize.run.statistics import Calls, Statistics
from outsize.train.batch import Batch
from outsize.train.crew import Crew
from outsize.train.group import GroupOutputs, Load
from outsize.train.insist import insist_on_loss, insist_on_model, insist_on_values
from outsize.train.loss import Counting
from outsize.train.ownership import Ownership
from outsize.train.replicas import Piece
from outsize.train.results import EvalResult, rebuilt
from outsize.train.settings import Settings
from outsize.train.tensor_ranks import TensorRanks
from outsize.train.twins import Twins
from outsize.train.variant import KEPT, Variant, Variants
from outsize.train.way import Way


@final
class Pipelined(Way):
    """Runs the stages of a cut tape."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        crew: Crew,
        ownership: Ownership,
        *,
        loss_fn: LossFn | None,
        counting: Counting,
        seed: int,
        home: torch.device | None = None,
        kept: int = KEPT,
        backend: str | None = None,
        tensor: TensorRanks | None = None,
    ) -> None:
        self._model, self._plan, self._crew, self._ownership, self._seed = model, plan, crew, ownership, seed
        self.variants = Variants(model, plan, loss_fn, counting, crew.forget, home, kept, tensor)
        self._home, self._backend = home, backend
        self._settings, self._valued = Settings(model), 0
        self._state = 0  # of the model, by its settings
        self._twins = Twins(model, crew.beside, ownership.device_of)
        self._statistics = Statistics(model) if plan.bn == "deferred" else None
        self._counting: list[bool] = []  # of the last step's pieces

    def prepare(self, parts: Sequence[Batch]) -> None:
        found = self._find(parts, outputs=False)
        insist_on_model(self._plan, found[0].captured.graph)
        self._settle(found)

    def train(self, parts: Sequence[Batch], scale: float, step: int) -> Tensor:
        found = self._find(parts, outputs=False)
        insist_on_loss(found[0].tape)
        self._ready(found, parts)
        with self._collecting():
            loss = self._total(self._run(found, parts, scale, step))
        assert loss is not None
        return loss

    def evaluate(self, parts: Sequence[Batch], step: int) -> EvalResult:
        found = self._find(parts, outputs=True)
        self._ready(found, parts)
        results = self._run(found, parts, 1.0, step)
        loss, outputs = self._total(results), self._outputs(found, results)
        return EvalResult(loss, outputs)

    def _find(self, parts: Sequence[Batch], *, outputs: bool) -> list[Variant]:
        """The variant of each microbatch."""
        self._state = self._settings.number()
        return [self.variants.find(part, outputs=outputs, state=self._state) for part in parts]

    def _run(
        self, found: list[Variant], parts: Sequence[Batch], scale: float, step: int
    ) -> list[GroupOutputs]:
        """The microbatches of this replica, in runs of one wiring."""
        counted = [variant.shares.counted(part) for variant, part in zip(found, parts, strict=True)]
        replicas, grad = self._crew.replicas, torch.is_grad_enabled()
        pieces, written = replicas.pieces(counted, _written(found) if replicas.count > 1 else frozenset())
        self._counting = [piece.counts for piece in pieces]
        self._crew.start_step()
        self._twins.follow(self._state)
        if not grad:
            results = self._run_pieces(found, pieces, parts, scale, step)
        else:
            self._adopt(found)
            with replicas.summing(self._ownership.trained_by_stage):
                results = self._run_pieces(found, pieces, parts, scale, step)
                self._twins.add_up(self._state)
            replicas.spread(self._ownership.own(written) if written else ())
        self._settings.ran()
        self.variants.trim()
        return results

    def _run_pieces(
        self, found: list[Variant], pieces: list[Piece], parts: Sequence[Batch], scale: float, step: int
    ) -> list[GroupOutputs]:
        results = []
        rounds = self._rounds(found, pieces)
        for groups in rounds:
            self._crew.replicas.run(last=groups is rounds[-1])
            loads = [
                Load(
                    [found[piece.part] for piece in members],
                    [[self._crew.here(t) for t in parts[piece.part].tensors()] for piece in members],
                    [piece.share * scale for piece in members],
                    [seeder(self._seed, step, piece.number) for piece in members],
                    replica,
                )
                for replica, members in groups
            ]
            for (_, members), outputs in zip(groups, self._crew.run(loads, self._stage), strict=True):
                outputs.pieces = members
                results.append(outputs)
        return sorted(results, key=lambda result: result.pieces[0].number)

    def _rounds(self, found: list[Variant], pieces: list[Piece]) -> list[list[tuple[int, list[Piece]]]]:
        """Groups of one wiring that run side by side, each with its replica of this process."""
        beside = self._crew.beside
        # Where they have no devices of their own, one pipeline runs what replicas would, one after the other.
        in_turns = beside == 1 and self._crew.replicas.count < self._plan.axes.replicas
        turn = self._plan.microbatches if in_turns else -(-len(pieces) // beside)
        groups: list[list[tuple[int, list[Piece]]]] = [[] for _ in range(beside)]
        for (_, at), alike in groupby(pieces, key=lambda p: (found[p.part].wiring, p.part // turn)):
            groups[at % beside].append((at % beside, list(alike)))
        return [[group for group in side if group] for side in zip_longest(*groups)]

    def _outputs(self, found: list[Variant], results: list[GroupOutputs]) -> tuple[Any, ...] | None:
        """Of each microbatch in order, on the last stage of the first replica."""
        replicas = self._crew.replicas
        here = [
            (piece.part, tuple(t.cpu() for t in values) if replicas.count > 1 else values)
            for r in results
            for values, piece in zip(r.outputs, r.pieces, strict=bool(r.outputs))
            if piece.counts
        ]
        everyones = replicas.on_first(here) if any(r.outputs for r in results) else None
        return (
            tuple(
                rebuilt(found[part], tuple(map(self._crew.here, values))) for part, values in everyones or ()
            )
            or None
        )

    def _adopt(self, found: Sequence[Variant]) -> None:
        for variant in {v.number: v for v in found}.values():
            self._ownership.adopt(lambda cut=variant.cut: placement_of_cut(cut, self._model))

    def _ready(self, found: Sequence[Variant], parts: Sequence[Batch]) -> None:
        self._settle(found)
        known = self._valued == self._settings.looks
        insist_on_values(() if known else self._ownership.used(), parts[0])
        self._valued = self._settings.looks

    def _settle(self, found: Sequence[Variant]) -> None:
        self._ownership.settle(lambda: placement_of_cut(found[0].cut, self._model))

    def _stage(self, variant: Variant, program: StageProgram, replica: int) -> Stage:
        """A stage of this rank at work, as the plan says."""
        model, device = self._twins.of(replica, self._state), self._crew.device_of(program.stage, replica)
        if replica:
            program = replace(program, function=compile_slice(program.spec, model, variant.tape.modes))
        if device is not None and self._home is not None:
            program = placed(program, variant.cut.tape, model, self._home, device)
        program = replace(program, function=self._through(program.function))
        how, again, values = self._plan.recompute_of(program.stage), None, self._crew.values
        saving = values.begin if values.lends else None
        if how == "full":
            whole = Recompute(model, program.written, self._statistics)
            again = partial(whole.run, program.function)
        elif how == "selective":
            runs, modes = self._segments(variant, program.stage), variant.tape.modes
            again = InSegments(program.spec, runs, model, modes, self._statistics, self._through)
        elif how == "offload":
            saving = partial(self._crew.activations.begin, program.stage)
        return Stage(program, model, again, saving, bare=values.lends)

    def _through(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if self._backend is None else compiled(function, self._backend)

    def _segments(self, variant: Variant, stage: int) -> list[tuple[int, int]]:
        """Runs of instructions that the stage recomputes."""
        names, starts = [u.name for u in variant.captured.graph.units], variant.captured.starts
        chosen = self._plan.recomputed(stage, names)
        return [(starts[a], starts[b]) for a, b in segments(blocks(names), chosen)]

    def _collecting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._statistics is None else self._statistics.collecting(self._of_all)

    def _of_all(self, calls: Calls) -> Calls:
        """Moments of all replicas' microbatches, in order; a module has as many in each of them."""
        counting, replicas = self._counting, self._crew.replicas
        if replicas.count == 1:
            return calls
        own = [part[: len(part) * sum(counting) // len(counting)] for part in calls]
        on_host = [[(n, mean.cpu(), m2.cpu()) for n, mean, m2 in part] for part in own]
        return [list(chain(*parts)) for parts in zip(*replicas.of_all(on_host), strict=True)]

    def _total(self, results: list[GroupOutputs]) -> Tensor | None:
        """Sum of the microbatches' losses by their shares, in order, on every rank."""
        total: Any = None
        for result in results:
            for loss, piece in zip(result.losses, result.pieces, strict=False):
                part = loss * piece.share if piece.counts else torch.zeros_like(loss)
                total = part if total is None else total + part.to(total.device)
        dtype, rank = results[0].loss_dtype, results[0].loss_rank
        if dtype is None:
            return None
        return self._crew.replicas.total(self._crew.broadcast(total, dtype, rank))


def _written(found: Sequence[Variant]) -> frozenset[str]:
    """The buffers that a forward of these changes."""
    distinct = {id(variant): variant for variant in found}.values()
    return frozenset(chain.from_iterable(p.written for v in distinct for p in v.cut.programs))
