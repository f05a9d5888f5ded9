"""Crew: the ranks that run a schedule together, in one process or over processes.

`LocalCrew` is all ranks in one process, taking turns (most tests, and `outsize check`). `ProcessCrew` is
one rank per process over a group that is passed in. The engine sees no difference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from outsize.ir.plan import Plan
from outsize.ir.schedule import Action, Kind, Schedule
from outsize.ir.timeline import Lane, Span, Timeline
from outsize.run.boundary import backward_edges, forward_edges, step_edges
from outsize.run.cut import Cut
from outsize.run.interpreter import Interpreter, MakeStage, StepInputs, StepOutputs, run_together
from outsize.run.marks import Marks
from outsize.run.near import connect
from outsize.run.rng import Seed
from outsize.run.transport import CHANNELS, Groups, LocalTransport, Mailboxes
from outsize.schedules.builders import build
from outsize.schedules.check import check
from outsize.schedules.lower import lower
from outsize.train.variant import Variant

RawSpan = tuple[int, str, Lane, float, float]


@final
@dataclass
class GroupOutputs:
    """What one run of microbatches gave: losses where they are computed, outputs on the last stage."""

    variant: Variant
    loss_dtype: torch.dtype | None  # None when there is no loss
    loss_rank: int
    losses: list[Tensor]
    outputs: list[tuple[Any, ...]]
    shares: list[float] = field(default_factory=list)


class Crew(ABC):
    """Runs groups of microbatches."""

    rank: int
    world_size: int
    stages: tuple[int, ...]
    group: dist.ProcessGroup | None = None  # of the ranks, where there are several
    device: torch.device | None = None  # where this rank's weights and batches belong; None: where they are

    def __init__(self) -> None:
        self._marks: list[tuple[int, Marks]] = []

    @abstractmethod
    def run(
        self,
        variant: Variant,
        make_stage: MakeStage,
        inputs: Sequence[Any],
        weights: Sequence[float],
        seeds: Sequence[Seed],
    ) -> GroupOutputs:
        """All microbatches of a group, forward and (with grad on) backward."""

    @abstractmethod
    def forget(self, variant: int) -> None:
        """The variant of this number was dropped: drop what was built for it."""

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
    schedule = build(plan.schedule, len(plan.stages), microbatches, plan.axes.pp)
    if not training:
        schedule = _forwards(len(plan.stages), microbatches, plan.axes.pp)
    back = backward_edges(cut.boundaries) if training else frozenset()
    edges = (forward_edges(cut.boundaries), back, step_edges(cut.boundaries))
    lowered = lower(schedule, *edges)
    if training:
        check(lowered, *edges)
    return lowered


def _forwards(stages: int, microbatches: int, ranks: int) -> Schedule:
    """All microbatches through a rank's stages, one stage after the other."""
    rows = (
        tuple(Action(stage, Kind.F, mb) for stage in range(rank, stages, ranks) for mb in range(microbatches))
        for rank in range(ranks)
    )
    return Schedule("forward", microbatches, tuple(rows))


def _outputs(variant: Variant, schedule: Schedule, results: Iterable[StepOutputs]) -> GroupOutputs:
    stage = next((p.stage for p in variant.cut.programs if p.has_loss), None)
    results = list(results)
    losses = {mb: loss for r in results for mb, loss in r.losses.items()}
    outputs = {mb: out for r in results for mb, out in r.outputs.items()}
    return GroupOutputs(
        variant=variant,
        loss_dtype=_loss_dtype(variant),
        loss_rank=schedule.rank_of[stage] if stage is not None else 0,
        losses=[losses[mb] for mb in sorted(losses)],
        outputs=[outputs[mb] for mb in sorted(outputs)],
    )


def _loss_dtype(variant: Variant) -> torch.dtype | None:
    loss = variant.tape.loss
    return variant.tape.metas[loss.slot].dtype if loss is not None else None


def _key(variant: Variant, microbatches: int) -> tuple[int, int, bool]:
    return variant.number, microbatches, torch.is_grad_enabled()


@final
class LocalCrew(Crew):
    """All ranks in this process."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan
        self.rank, self.world_size = 0, 1
        self.stages = tuple(range(len(plan.stages)))
        self._built: dict[tuple[int, int, bool], list[Interpreter]] = {}

    def run(
        self,
        variant: Variant,
        make_stage: MakeStage,
        inputs: Sequence[Any],
        weights: Sequence[float],
        seeds: Sequence[Seed],
    ) -> GroupOutputs:
        interpreters = self._interpreters(variant, make_stage, len(inputs))
        for interpreter in interpreters:
            interpreter.begin(StepInputs(inputs, weights, seeds))
        try:
            results = run_together(interpreters)
        except BaseException:
            for interpreter in interpreters:
                interpreter.reset()
            self._built.clear()
            raise
        for interpreter, result in zip(interpreters, results, strict=True):
            self.keep(interpreter.rank, result.marks)
        return _outputs(variant, interpreters[0].schedule, results)

    def _interpreters(self, variant: Variant, make_stage: MakeStage, microbatches: int) -> list[Interpreter]:
        key = _key(variant, microbatches)
        if key not in self._built:
            training = torch.is_grad_enabled()
            schedule = make_schedule(self._plan, variant.cut, microbatches, training=training)
            boxes = Mailboxes()
            self._built[key] = [
                Interpreter(rank, schedule, variant.cut, make_stage, LocalTransport(rank, boxes))
                for rank in range(schedule.ranks)
            ]
        return self._built[key]

    def forget(self, variant: int) -> None:
        self._built = {key: built for key, built in self._built.items() if key[0] != variant}

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
    ranks = dist.get_process_group_ranks(group)
    made = [dist.new_group(ranks, backend=b) for b in ("nccl", "nccl", "nccl", "gloo")]
    second, third, fourth, layouts = (g for g in made if isinstance(g, dist.ProcessGroup))
    return Groups((group, second, third, fourth), layouts)


@final
class ProcessCrew(Crew):
    """One rank of a group; the group must have one process per stage."""

    def __init__(self, plan: Plan, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self._plan, self._group, self.device = plan, group, device
        self.group = group
        self.rank, self.world_size = group.rank(), group.size()
        self.stages = tuple(range(self.rank, len(plan.stages), plan.axes.pp))
        self._transport = connect(make_groups(group, device), device)
        self._built: dict[tuple[int, int, bool], Interpreter] = {}

    def run(
        self,
        variant: Variant,
        make_stage: MakeStage,
        inputs: Sequence[Any],
        weights: Sequence[float],
        seeds: Sequence[Seed],
    ) -> GroupOutputs:
        interpreter = self._interpreter(variant, make_stage, len(inputs))
        interpreter.begin(StepInputs(inputs, weights, seeds))
        result = interpreter.run()
        self.keep(self.rank, result.marks)
        return _outputs(variant, interpreter.schedule, [result])

    def _interpreter(self, variant: Variant, make_stage: MakeStage, microbatches: int) -> Interpreter:
        key = _key(variant, microbatches)
        if key not in self._built:
            training = torch.is_grad_enabled()
            schedule = make_schedule(self._plan, variant.cut, microbatches, training=training)
            base = CHANNELS * variant.number
            self._built[key] = Interpreter(
                self.rank, schedule, variant.cut, make_stage, self._transport, base
            )
        return self._built[key]

    def forget(self, variant: int) -> None:
        self._built = {key: built for key, built in self._built.items() if key[0] != variant}
        self._transport.forget(CHANNELS * variant)

    def broadcast(self, value: Tensor | None, dtype: torch.dtype, source: int) -> Tensor:
        # fp64 holds every loss dtype exactly.
        wire = value.to(torch.float64) if value is not None else torch.zeros((), dtype=torch.float64)
        dist.broadcast(wire, group=self._group, group_src=source)
        return wire.to(dtype)

    def sum(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, group=self._group)
        return value

    def rank_of(self, stage: int) -> int:
        return stage % self._plan.axes.pp

    def fetch(self, tensor: Tensor, stage: int) -> Tensor | None:
        return self._transport.to_first(tensor, self.rank_of(stage))

    def gather_spans(self) -> list[RawSpan]:
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, self.own_spans(), group=self._group)
        return [span for spans in found for span in spans]
