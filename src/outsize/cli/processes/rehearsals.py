"""Rehearses a plan for many devices with a small model on this machine (`outsize rehearse`).

plan, MODEL  --record on meta-->  axes in small worlds, a small model  --each world in processes of its own-->
first / later / again of each rank  --judge-->  Rehearsal
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

import torch
from torch import nn

from outsize.api.records import Lora
from outsize.axes.registry import AXES
from outsize.cli.model_input import batch_size
from outsize.cli.processes.job import JobFolder
from outsize.cli.processes.limited import run_limited
from outsize.cli.processes.rehearsal_worker import RehearsalJob
from outsize.errors import BadOption, ModelMismatch
from outsize.ir.answers.runs.rehearsal import Rehearsal, RehearsedWorld
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Axes, Plan
from outsize.ops.rehearsal.evidence import Evidence, RankFiles, Reference
from outsize.ops.rehearsal.judge import Judge
from outsize.ops.rehearsal.small_model import ModelShrinker, SmallModel
from outsize.ops.rehearsal.small_plan import kinds_of, small_layout, small_plan, walk
from outsize.ops.rehearsal.worlds import MOST_RANKS, pairs_met, small_worlds
from outsize.policies.precisions import FP32, precision_policy
from outsize.schedules.builders import planned
from outsize.schedules.families import family_of
from outsize.train.measure.training_case import TrainingCase
from outsize.train.world.world import visible_accelerators

LIMIT_S: Final = 300.0
HANG_S: Final = 20.0
_SAME_MODEL: Final = (
    "outsize rehearse MODEL --input SHAPE --lora R --plan FILE with what outsize plan was given; "
    "a plan with --quantize is not rehearsed"
)
_INSTALLED: Final = Path(torch.__file__).parent.parent


@final
@dataclass(frozen=True)
class RehearsedModel:
    """Says what is rehearsed: MODEL with its example, the plan, and how."""

    model: str
    input: str | None
    batch: int | None
    plan: Plan
    most_ranks: int
    seed: int = 0
    lora: Lora = field(default_factory=Lora)
    hang_s: float = HANG_S
    limit_s: float = LIMIT_S

    def rehearsed(self, tell: Callable[[str], None]) -> Rehearsal:
        """Runs all worlds, up to the first that does not hold, and returns what they have shown. Raises
        BadOption, ModelMismatch, and what building the model raises.
        """
        start = time.perf_counter()
        _insist_on_training(self.plan)
        _insist_on_ranks(self.plan, self.most_ranks)
        tell(f"recording {self.model}")
        large = SmallModel(self.model, self.input, self.seed, lora=self.lora)
        built = large.made(batch_size(self.batch, self.plan), meta=True, as_it_is=True)
        _insist_on_class(self.plan, built.model)
        case = built.case.in_pieces(self.plan.loss_pieces, self.plan.module_pieces)
        captured = case.captured(self.plan.microbatch_size)
        graph = captured.graph
        plan = _of_this_model(self.plan, case, graph)
        actions, messages = walk(plan, captured, case.whole) if plan.form == "tape" else (0, 0)
        axes = small_worlds(plan.axes, self.most_ranks, keeps_stages=bool(plan.actions))
        layouts = [small_layout(plan, each) for each in axes]
        with JobFolder.temporary() as folder:
            stages = max(layout.stages for layout in layouts)
            shrinker = ModelShrinker(plan, axes, graph, stages, folder.path, tell)
            shrunken = shrinker.shrunken(large, built.bare)
            plans = [small_plan(plan, graph, shrunken.graph, each, _device_type()) for each in layouts]
            reference = Reference.of(shrunken.small.made(plans[0].batch_size), plans[0])
            worlds = list[RehearsedWorld]()
            for number, each in enumerate(plans, 1):
                tell(f"world {number} of {len(plans)}: {_axes_text(each.axes)}")
                worlds.append(self._world(each, shrunken.small, reference))
                if not worlds[-1].holds:
                    break
        met, apart = pairs_met(plan.axes, [world.axes for world in worlds if world.holds])
        return Rehearsal(
            model=plan.model,
            axes=plan.axes,
            schedule=plan.schedule,
            stages=len(plan.stages),
            microbatches=plan.microbatches,
            actions=actions,
            messages=messages,
            parameters=built.parameters,
            small_parameters=shrunken.parameters,
            changes=shrunken.changes,
            dropped=len(shrunken.small.dropped),
            kinds=len(kinds_of(graph)),
            missing_kinds=shrunken.missing,
            worlds=tuple(worlds),
            met=tuple((a, b) for a, b in met),
            apart=tuple((a, b) for a, b in apart),
            unlike=tuple(_unlike(plan)),
            device=_device_type(),
            seconds=time.perf_counter() - start,
        )

    def _world(self, plan: Plan, small: SmallModel, reference: Reference) -> RehearsedWorld:
        start, threads = time.perf_counter(), torch.get_num_threads()
        torch.set_num_threads(1)  # as in the ranks: some kernels add up in as many parts as there are threads
        try:
            world = self._run(plan, small, reference)
        finally:
            torch.set_num_threads(threads)
        return world.model_copy(update={"seconds": time.perf_counter() - start})

    def _run(self, plan: Plan, small: SmallModel, reference: Reference) -> RehearsedWorld:
        built, ranks = small.made(plan.batch_size), plan.axes.world_size
        rows = planned(
            plan.schedule, len(plan.stages), plan.microbatches, plan.axes.pp, plan.actions, plan.slices
        )
        job = RehearsalJob(
            plan=plan,
            spec=small.spec,
            input=small.input,
            seed=small.seed,
            dropped=small.dropped,
            lora=small.lora,
            killed=ranks // 2,
            hang_s=self.hang_s,
            per_device=_ranks_per_device(ranks),
            preloads=tuple(_libraries(built.model)),
            is_launcher=True,
        )
        with JobFolder.temporary() as folder:
            folder.job.write_text(job.to_json(), encoding="utf-8")
            code, said = run_limited("rehearsal_worker", folder, self.limit_s)
            evidence = Evidence(
                plan=plan,
                built=built,
                reference=reference,
                files=RankFiles(Path(folder.path)),
                seed=small.seed,
                killed=job.killed,
                said=said if code is not None else None,
            )
            return Judge(evidence).judged(sum(map(len, rows.actions)))


def _insist_on_training(plan: Plan) -> None:
    """Raises BadOption for a plan that runs forwards alone."""
    if not family_of(plan.schedule).trains:
        raise BadOption(
            "the plan runs the model and does not train it; a rehearsal takes steps of training",
            numbers=f"schedule {plan.schedule}",
            next_step="outsize plan MODEL --out FILE without --inference, and rehearse that",
        )


def _insist_on_class(plan: Plan, model: nn.Module) -> None:
    """Raises ModelMismatch for a plan of another class of models, before anything is recorded."""
    name = type(model).__name__
    if name != plan.model:
        raise ModelMismatch(
            f"the plan was made for {plan.model}, this model is {name}",
            numbers=f"{len(plan.stages)} stages for {plan.cluster}",
            next_step=_SAME_MODEL,
        )


def _of_this_model(plan: Plan, case: TrainingCase, graph: ModelGraph) -> Plan:
    """Returns the plan for the model in float32, in which it is rehearsed, where it was made for weights of
    another type. Raises ModelMismatch for another model, and what `owners` raises.
    """
    if graph.fingerprint != plan.fingerprint:
        there = case.under(plan.precision).captured(plan.microbatch_size).graph
        if there.fingerprint != plan.fingerprint:
            raise ModelMismatch(
                f"the plan was made for another {plan.model} than this one",
                numbers=f"fingerprint {plan.fingerprint} against {there.fingerprint}",
                next_step=_SAME_MODEL,
            )
        plan = plan.model_copy(update={"fingerprint": graph.fingerprint})
    plan.owners(graph)  # a plan with other units must not pass
    return plan


def _insist_on_ranks(plan: Plan, most: int) -> None:
    """Raises BadOption for a plan of one device, and for one whose rows name more ranks than there may be."""
    if plan.axes.world_size == 1:
        raise BadOption(
            "the plan is for one device, where no message is sent",
            numbers=f"cluster {plan.cluster}",
            next_step="outsize check MODEL --plan FILE",
        )
    if plan.actions and plan.axes.pp > most:
        raise BadOption(
            "the plan's rows name the ranks of its pipeline, so it cannot be shorter",
            numbers=f"{plan.axes.pp} ranks of a pipeline, at most {most} ranks here",
            next_step=f"--ranks {plan.axes.pp}"
            if plan.axes.pp <= MOST_RANKS
            else "outsize plan MODEL --schedule 1f1b --out FILE",
        )


def _libraries(model: nn.Module) -> Iterator[str]:
    """Yields what ranks import to build the model, of installed packages: its classes' modules. A user's own
    module may start threads, which a fork would not have.
    """
    yield from ("outsize.ops.rehearsal.evidence", "outsize.ops.training")
    for name in sorted({type(module).__module__ for module in model.modules()}):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and Path(file).is_relative_to(_INSTALLED):
            yield name


def _unlike(plan: Plan) -> Iterator[str]:
    """Yields what ranks do here in another way than the plan says, but for sizes."""
    if not precision_policy(plan.precision).is_plain:
        yield f"precision {plan.precision}: computed in {FP32.name}"
    if plan.kernels != "eager":
        yield f"kernels {plan.kernels}: computed eagerly"
    if plan.optimizer != "adamw":
        yield f"optimizer {plan.optimizer}: adamw"


def _axes_text(axes: Axes) -> str:
    return " x ".join(f"{axis.name} {axes.of(axis)}" for axis in AXES if axes.of(axis) > 1)


def _device_type() -> str:
    kind, count = visible_accelerators()
    return kind if count else "cpu"


def _ranks_per_device(ranks: int) -> int:
    _, count = visible_accelerators()
    return -(-ranks // count) if count else 1
