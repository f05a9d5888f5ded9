"""Makes the plan of a rehearsal: that of many devices, on a small mesh, for the small model.

Everything that decides what is sent stays: schedule, stages on each rank, policies of weights and
activations, pieces and slices, and the place of each cut.

    the plan's cuts        ...mlp | layers.8.norm...   ...mlp | layers.16.norm...    between units of these
    kinds the small model's      ...mlp | layers.1.norm...                                 the same, where
    there is one

A stage of the small plan stands for one of the plan's: the first, the last, and of those between them some at
equal distances, so chosen that each policy of activations occurs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Final, final

from torch import nn

from outsize.capture.graph.build import Captured
from outsize.device.accelerators import CPU
from outsize.errors import BadOption
from outsize.ir.graph import ModelGraph, Unit
from outsize.ir.plan import Axes, Plan, Stage, stages_from_bounds, unsupported
from outsize.policies.activations import KEEP
from outsize.policies.weights import RESIDENT, Weights
from outsize.run.stage.cut import cut as cut_model
from outsize.schedules.builders import planned
from outsize.schedules.message import SENDS
from outsize.train.crew.crew import make_schedule
from outsize.train.variants.instruction_owners import instruction_owners

# More samples than two in a microbatch show nothing more.
_MOST_SAMPLES: Final = 2
_CHUNKS: Final = 2
_NUMBER: Final = re.compile(r"\d+")

Kind = tuple[str, str]


def kind_of(unit: Unit) -> Kind:
    """Returns the kind of a unit: its place in the model without numbers, and what it computes."""
    return _NUMBER.sub("*", unit.name), unit.kind


def kinds_of(graph: ModelGraph) -> frozenset[Kind]:
    """Returns all kinds of units of a model."""
    return frozenset(map(kind_of, graph.units))


@final
@dataclass(frozen=True)
class SmallLayout:
    """Is the layout of one world: its mesh, the stages, and the batch in microbatches."""

    axes: Axes
    stages: int
    microbatches: int
    samples: int

    @property
    def batch_size(self) -> int:
        """Returns the samples of a step."""
        return self.microbatches * self.axes.replicas * self.samples


def small_layout(plan: Plan, axes: Axes) -> SmallLayout:
    """Returns how a plan is laid on a small mesh: with as many stages on each rank, two at most, and with
    so many microbatches that the pipeline is full if the plan's is. Raises BadOption where no number of
    them runs.
    """
    chunks = len(plan.stages) // plan.axes.pp
    chunks = chunks if plan.actions or axes.pp == plan.axes.pp == 1 else min(chunks, _CHUNKS)
    stages = axes.pp * chunks
    samples = min(plan.microbatch_size, _MOST_SAMPLES)
    if plan.actions or plan.microbatches == 1:
        return SmallLayout(axes, stages, plan.microbatches, samples)
    share = plan.microbatches / plan.axes.pp
    short = min(round(share * axes.pp), axes.pp - 1)
    wanted = max(1, short) if share < 1 else axes.pp * min(int(share), 2)
    counts = sorted(range(1, 4 * axes.pp + 1), key=lambda count: (abs(count - wanted), count))
    for count in counts:
        try:
            planned(plan.schedule, stages, count, axes.pp, slices=plan.slices)
        except BadOption:
            continue
        return SmallLayout(axes, stages, count, samples)
    raise BadOption(
        f"the schedule {plan.schedule!r} runs with none of these numbers of microbatches",
        numbers=f"{stages} stages on {axes.pp} ranks, 1 to {4 * axes.pp} microbatches",
        next_step="outsize plan MODEL --schedule 1f1b --out plan.json",
    )


def small_plan(plan: Plan, graph: ModelGraph, small: ModelGraph, layout: SmallLayout, device: str) -> Plan:
    """Returns the plan of a world. Raises BadOption where the small model has too few units."""
    if len(small.units) < layout.stages:
        raise BadOption(
            f"{layout.stages} stages want as many units, and the small {small.model} has {len(small.units)}",
            numbers=f"{plan.axes.pp} ranks of a pipeline, {len(plan.stages)} stages",
            next_step="outsize rehearse MODEL --plan FILE --ranks 4",
        )
    chosen = _chosen(plan, layout.stages)
    order = plan.in_order(graph)
    units = [graph.units[number] for number in order]
    bounds = _bounds_of(plan, graph)
    cuts = [(kind_of(units[bounds[n] - 1]), kind_of(units[bounds[n]])) for n in chosen[1:]]
    small_bounds = _cut(small.units, cuts)
    places = [f"{device}:{rank}" for rank in range(layout.stages)]
    stages = stages_from_bounds(small, small_bounds, places)
    ends = pairwise(small_bounds)
    stages = tuple(
        _with_policy(
            plan, units[bounds[number] : bounds[number + 1]], number, stage, small.units[slice(*run)]
        )
        for number, stage, run in zip(chosen, stages, ends, strict=True)
    )
    return plan.model_copy(
        update={
            "model": small.model,
            "fingerprint": small.fingerprint,
            "cluster": f"{layout.axes.world_size}xcpu" if device == CPU else "local",
            "axes": layout.axes,
            "batch_size": layout.batch_size,
            "microbatches": layout.microbatches,
            "stages": stages,
            "weights": _weights_on(plan, layout.axes),
            "expected": None,
            "alternatives": (),
            "why": (),
        }
    )


def _weights_on(plan: Plan, axes: Axes) -> Weights:
    """Returns where weights are on a small mesh: as in the plan, or on their devices where the mesh has none
    of the ranks that share them.
    """
    return RESIDENT.name if unsupported(axes, plan.weights, plan.form) else plan.weights


def walk(plan: Plan, captured: Captured, model: nn.Module) -> tuple[int, int]:
    """Walks through the whole schedule of a plan, with the messages that its cut of the model has, and
    returns how many actions there are, and how many of them are sends. Raises InvalidSchedule where ranks
    would wait for each other, also where messages have no tags but an order (NCCL), and names the action.
    """
    owners = instruction_owners(plan, captured)
    cut = cut_model(captured.tape, model, owners, outputs=False, stages=len(plan.stages))
    schedule = make_schedule(plan, cut, plan.microbatches, training=True, slices=plan.slices)
    actions = [action for row in schedule.actions for action in row]
    return len(actions), sum(action.kind in SENDS for action in actions)


def _bounds_of(plan: Plan, graph: ModelGraph) -> list[int]:
    """Returns where each stage begins in the order of stages, then the number of units."""
    bounds = [0] * (len(plan.stages) + 1)
    for stage in plan.owners(graph):
        bounds[stage + 1] += 1
    for number in range(len(plan.stages)):
        bounds[number + 1] += bounds[number]
    return bounds


def _chosen(plan: Plan, count: int) -> list[int]:
    """Returns which of the plan's stages the small ones stand for."""
    last = len(plan.stages) - 1
    if count > last:
        return [min(number, last) for number in range(count)]
    chosen = [round(number * last / (count - 1)) if count > 1 else 0 for number in range(count)]
    ways = {_way(plan, number) for number in chosen}
    for number in range(last + 1):
        if _way(plan, number) in ways:
            continue
        there = Counter(_way(plan, each) for each in chosen)
        doubled = [place for place, each in enumerate(chosen) if there[_way(plan, each)] > 1]
        if not doubled:
            break
        near = min(doubled, key=lambda place: (place in (0, count - 1), abs(chosen[place] - number), place))
        chosen = sorted([*chosen[:near], number, *chosen[near + 1 :]])
        ways.add(_way(plan, number))
    return chosen


def _way(plan: Plan, stage: int) -> tuple[str, bool]:
    return plan.recompute_of(stage), plan.stages[stage].on_host


def _cut(units: Sequence[Unit], cuts: Sequence[tuple[Kind, Kind]]) -> list[int]:
    """Returns where the stages begin: at cuts of these kinds where there are some, as evenly as that allows.

    The best cost of the first k cuts with the k-th at unit u is that of the cuts before it, over all places
    of the cut before: O(cuts x units^2).
    """
    count, stages = len(units), len(cuts) + 1
    kinds = [kind_of(unit) for unit in units]
    even = count / stages
    costs = [0.0 if place == 0 else inf for place in range(count + 1)]
    before: list[list[int]] = []
    for number in range(stages):
        is_last = number == stages - 1
        costs_now, from_place = [inf] * (count + 1), [0] * (count + 1)
        for place in range(number + 1, count + 1):
            if is_last != (place == count):
                continue
            other = 0.0 if is_last or (kinds[place - 1], kinds[place]) == cuts[number] else float(count**2)
            for start in range(number, place):
                cost = costs[start] + (place - start - even) ** 2 + other
                if cost < costs_now[place]:
                    costs_now[place], from_place[place] = cost, start
        costs = costs_now
        before.append(from_place)
    bounds = [count]
    for from_place in reversed(before):
        bounds.append(from_place[bounds[-1]])
    return bounds[::-1]


def _with_policy(
    plan: Plan, whole: Sequence[Unit], number: int, stage: Stage, units: Sequence[Unit]
) -> Stage:
    """Returns a stage with the policies of the plan's; what it recomputes are units of the same kinds."""
    original = plan.stages[number]
    copied = stage.model_copy(update={"recompute": original.recompute, "on_host": original.on_host})
    if not plan.activation_policy(number).lists_units:
        return copied
    again = plan.recomputed(number, [unit.name for unit in whole])
    kinds = {kind_of(whole[place]) for place in again}
    names = tuple(unit.name for unit in units if kind_of(unit) in kinds)
    if not names:
        return copied.model_copy(update={"recompute": KEEP.name})
    return copied.model_copy(update={"recomputed": names})
