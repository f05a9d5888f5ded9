"""A plan of form "tape" at work: consecutive microbatches whose variants have one wiring run in one pipeline.

    parts      x(4,8)  x(4,5)  x(4,8)  x(2,8)        a variant for each shape, the weights are the same
    groups    [   0       1       0       2  ]       all of them: they send the same values between stages

A microbatch that takes another way through the model (a guard) may send others; then it begins a new group,
and groups run one after the other, so gradients add up in order. A stage takes from a microbatch what its
instructions read, so inputs and targets never travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any, final

import torch
from torch import Tensor, nn

from outsize.capture.ladder import LossFn
from outsize.ir.plan import Plan
from outsize.ir.segments import blocks, segments
from outsize.run.cut import StageProgram
from outsize.run.homes import placement_of_cut
from outsize.run.placed import placed
from outsize.run.recompute import InSegments, Recompute
from outsize.run.rng import seeder
from outsize.run.stage import Stage
from outsize.run.statistics import Statistics
from outsize.train.batch import Batch
from outsize.train.crew import Crew, GroupOutputs
from outsize.train.insist import insist_on_loss, insist_on_model, insist_on_values
from outsize.train.loss import Counting
from outsize.train.ownership import Ownership
from outsize.train.results import EvalResult, rebuilt
from outsize.train.settings import Settings
from outsize.train.tensor_ranks import TensorRanks
from outsize.train.variant import KEPT, Variant, Variants
from outsize.train.way import Way

Groups = list[tuple[list[Variant], list[int]]]  # variants and numbers of microbatches


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
        tensor: TensorRanks | None = None,
    ) -> None:
        self._model, self._plan, self._crew, self._ownership, self._seed = model, plan, crew, ownership, seed
        self.variants = Variants(model, plan, loss_fn, counting, crew.forget, home, kept, tensor)
        self._home = home
        self._settings = Settings(model)
        self._statistics = Statistics(model) if plan.bn == "deferred" else None

    def prepare(self, parts: Sequence[Batch]) -> None:
        groups = self._groups(parts, outputs=False)
        insist_on_model(self._plan, groups[0][0][0].captured.graph)
        self._settle(groups)

    def train(self, parts: Sequence[Batch], scale: float, step: int) -> Tensor:
        groups = self._groups(parts, outputs=False)
        insist_on_loss(groups[0][0][0].tape)
        self._ready(groups, parts)
        with self._collecting():
            loss = self._total(self._run(groups, parts, scale, step))
        assert loss is not None
        return loss

    def evaluate(self, parts: Sequence[Batch], step: int) -> EvalResult:
        groups = self._groups(parts, outputs=True)
        self._ready(groups, parts)
        results = self._run(groups, parts, 1.0, step)
        found = tuple(
            rebuilt(*pair) for r in results for pair in zip(r.variants, r.outputs, strict=bool(r.outputs))
        )
        return EvalResult(self._total(results), found or None)

    def _groups(self, parts: Sequence[Batch], *, outputs: bool) -> Groups:
        """Runs of microbatches that share a wiring, in order."""
        state = self._settings.number()
        found = [self.variants.find(part, outputs=outputs, state=state) for part in parts]
        alike = groupby(range(len(parts)), key=lambda mb: found[mb].wiring)
        return [([found[mb] for mb in members], members) for members in (list(g) for _, g in alike)]

    def _run(self, groups: Groups, parts: Sequence[Batch], scale: float, step: int) -> list[GroupOutputs]:
        counters = [variant.shares for variants, _ in groups for variant in variants]
        shares = counters[0].of(list(parts), counters)
        results = []
        self._crew.start_step()
        for variants, members in groups:
            if torch.is_grad_enabled():
                self._adopt(variants)
            inputs = [[self._crew.here(t) for t in parts[mb].tensors()] for mb in members]
            weights = [shares[mb] * scale for mb in members]
            seeds = [seeder(self._seed, step, mb) for mb in members]
            results.append(self._crew.run(variants, self._stage, inputs, weights, seeds))
            results[-1].shares = [shares[mb] for mb in members]
        self._settings.ran()
        self.variants.trim()
        return results

    def _adopt(self, variants: Sequence[Variant]) -> None:
        for variant in {v.number: v for v in variants}.values():
            self._ownership.adopt(lambda cut=variant.cut: placement_of_cut(cut, self._model))

    def _ready(self, groups: Groups, parts: Sequence[Batch]) -> None:
        self._settle(groups)
        insist_on_values(self._ownership.used(), parts[0])

    def _settle(self, groups: Groups) -> None:
        self._ownership.settle(lambda: placement_of_cut(groups[0][0][0].cut, self._model))

    def _stage(self, variant: Variant, program: StageProgram) -> Stage:
        """A stage of this rank at work, as the plan says."""
        device = self._crew.device_of(program.stage)
        if device is not None and self._home is not None:
            program = placed(program, variant.cut.tape, self._model, self._home, device)
        how, again = self._plan.recompute_of(program.stage), None
        if how == "full":
            whole = Recompute(self._model, program.written, self._statistics)
            again = partial(whole.run, program.function)
        elif how == "selective":
            runs, modes = self._segments(variant, program.stage), variant.tape.modes
            again = InSegments(program.spec, runs, self._model, modes, self._statistics)
        return Stage(program, self._model, again)

    def _segments(self, variant: Variant, stage: int) -> list[tuple[int, int]]:
        """Runs of instructions that the stage recomputes."""
        names, starts = [u.name for u in variant.captured.graph.units], variant.captured.starts
        chosen = self._plan.recomputed(stage, names)
        return [(starts[a], starts[b]) for a, b in segments(blocks(names), chosen)]

    def _collecting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._statistics is None else self._statistics.collecting()

    def _total(self, results: list[GroupOutputs]) -> Tensor | None:
        """Sum of the microbatches' losses by their shares, in order, on every rank."""
        total: Any = None
        for result in results:
            for loss, share in zip(result.losses, result.shares, strict=False):
                part = loss * share
                total = part if total is None else total + part
        dtype, rank = results[0].loss_dtype, results[0].loss_rank
        return self._crew.broadcast(total, dtype, rank) if dtype is not None else None
