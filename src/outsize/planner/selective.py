"""Stages that recompute some of their units: which ones (recompute.py), and what a cut then costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Self, final

import numpy as np

from outsize.ir.graph import ModelGraph
from outsize.ir.names import compress_units
from outsize.ir.plan import Expected, Recompute, Stage
from outsize.ir.profile import Profile
from outsize.ir.segments import Run
from outsize.ir.text import seconds_text
from outsize.planner.anew import StageBytes
from outsize.planner.estimate import Estimate, estimate
from outsize.planner.memory import Alive, Phase, held_bytes
from outsize.planner.menu import Menu
from outsize.planner.moments import moments_by_rank, moments_by_stage
from outsize.planner.optimizer import optimizer_bytes
from outsize.planner.ranges import Bytes, Ranges, owned_gradients
from outsize.planner.reasons import stages_text
from outsize.planner.recompute import BACKWARD, FIRST_BACKWARD, FORWARD, NOTHING, Choice, Limit, choose
from outsize.planner.seconds import UnitSeconds
from outsize.planner.split import Case, Pipeline

Units = frozenset[int]
# So many stages have a line each.
MANY: Final = 3
# What a choice changes of a stage's bytes.
OWN = ("saved", "twice", "again", "forward", "backward", "first_backward", "waiting", "halved")


@final
@dataclass(frozen=True, eq=False)
class Fine:
    """The model of a search unit by unit, where its tables may be of pieces: `ends` of them.

    `gradients`: bytes for the weights that each unit owns.
    """

    graph: ModelGraph
    profile: Profile
    seconds: UnitSeconds
    gradients: Bytes
    ends: tuple[int, ...]

    @classmethod
    def of(cls, menu: Menu, pipeline: Pipeline, stage: int, optimizer: str) -> Self:
        """As the stage's device runs it."""
        layout = pipeline.layout
        graph, profile, seconds = menu.whole(layout, pipeline.device(stage))
        gradients = owned_gradients(graph, optimizer_bytes(optimizer))
        return cls(graph, profile, seconds, gradients, menu.ends(layout))

    def stage(self, run: Run) -> StageBytes:
        """The bytes of the stage with a run of pieces."""
        first, end = self.ends[run[0]], self.ends[run[1]]
        gradients: list[int] = self.gradients[first:end].tolist()
        return StageBytes.of(self.graph, self.profile, gradients, (first, end))


def selective_reasons(found: Estimate, chosen: Mapping[int, Units], bounds: Sequence[int]) -> Iterator[str]:
    """How much each stage recomputes, and what that takes; `bounds` are those of the graph's units."""
    again_s = {stage: _again_s(found, stage) for stage in chosen}
    forward_s = {stage: found.costs[stage].forward_s for stage in chosen}
    units = {stage: bounds[stage + 1] - bounds[stage] for stage in chosen}
    if len(chosen) > MANY:
        count = f"{sum(map(len, chosen.values()))} of {sum(units.values())} units, block by block,"
        share = f"{seconds_text(sum(again_s.values()))} of {seconds_text(sum(forward_s.values()))}"
        yield f"{stages_text(sorted(chosen))} recompute {count} to save memory: {share} of forwards twice"
        return
    for stage, which in chosen.items():
        share = f"{seconds_text(again_s[stage])} of its forward's {seconds_text(forward_s[stage])}"
        how = f"{len(which)} of {units[stage]} units" if len(which) < units[stage] else "all, block by block,"
        yield f"stage {stage} recomputes {how} to save memory: {share} twice"


def by_blocks(found: Estimate, bounds: Sequence[int]) -> dict[int, Units]:
    """The stages that recompute all their units block by block; `bounds` are those of the graph's units."""
    cases = enumerate(zip(found.cases, pairwise(bounds), strict=True))
    return {s: frozenset(range(*run)) for s, (case, run) in cases if case.recompute == "selective"}


def _again_s(found: Estimate, stage: int) -> float:
    """Seconds of a microbatch's forward that a stage computes twice."""
    run, kept = slice(*found.bounds[stage : stage + 2]), kept_case(found.pipeline, stage)
    return float((found.cases[stage].seconds.given - kept.seconds.given)[run].sum())


def counted(figures: Expected, chosen: Mapping[int, Units]) -> Expected:
    """The figures with how many units each stage recomputes."""
    counts = [len(chosen.get(stage, ())) for stage in range(len(figures.stages))]
    pairs = zip(figures.stages, counts, strict=True)
    stages = tuple(figure.model_copy(update={"recomputed": count}) for figure, count in pairs)
    return figures.model_copy(update={"stages": stages})


def written(
    stages: Sequence[Stage],
    cases: Sequence[Case],
    overall: Recompute,
    chosen: Mapping[int, Units],
    graph: ModelGraph,
) -> tuple[Stage, ...]:
    """The stages of a plan, each with how it recomputes and which of its units."""
    names = [unit.name for unit in graph.units]
    units = [compress_units(names, sorted(chosen.get(stage, ()))) for stage in range(len(stages))]
    how = [None if case.recompute == overall else case.recompute for case in cases]
    pairs = zip(stages, how, units, strict=True)
    return tuple(s.model_copy(update={"recompute": h, "recomputed": u}) for s, h, u in pairs)


def recomputing(
    pipeline: Pipeline,
    bounds: Sequence[int],
    ways: Sequence[int],
    chosen: Mapping[int, Units],
    menu: Menu,
    optimizer: str,
) -> Estimate:
    """A cut whose stages recompute these units, as numbered in the model; the others run in their `ways`."""
    options, places, runs = list(pipeline.ways), list(ways), tuple(pairwise(bounds))
    for stage, units in chosen.items():
        fine = Fine.of(menu, pipeline, stage, optimizer)
        places[stage] = len(options[stage])
        options[stage] = (*options[stage], _case(kept_case(pipeline, stage), runs[stage], units, fine))
    return estimate(replace(pipeline, ways=tuple(options)), bounds, places)


def kept_case(pipeline: Pipeline, stage: int) -> Case:
    """The stage's tables when it recomputes nothing."""
    return next(case for case in pipeline.ways[stage] if case.recompute == "none")


def choice(pipeline: Pipeline, stage: int, run: Run, fine: Fine) -> Choice | None:
    """What a stage with a run of pieces does best, units as numbered in the model; None if none fit."""
    layout, here = pipeline.layout, kept_case(pipeline, stage).ranges.only(*run)
    empty = replace(here, **dict.fromkeys(OWN, np.zeros_like(here.saved)))
    how = layout.schedule, layout.stages, layout.microbatches, layout.axes.pp
    limits = [_limit(empty, alive) for alive in moments_by_stage(*how)[stage]]
    return _best(fine, run, limits, pipeline.room_bytes(stage))


def shared_choice(found: Estimate, stage: int, fine: Fine) -> Choice | None:
    """The same for a stage that shares its device, while the others there run as they do."""
    layout, pipeline, runs = found.layout, found.pipeline, tuple(pairwise(found.bounds))
    rank = layout.ranks[stage]
    own = layout.stages_on(rank)
    here, at = [found.cases[s].ranges.only(*runs[s]) for s in own], own.index(stage)
    here[at] = empty = replace(here[at], **dict.fromkeys(OWN, np.zeros_like(here[0].saved)))
    worst = dict[tuple[int, int], int]()
    for moment in moments_by_rank(*layout.how()[:4])[rank]:
        mine = _limit(empty, moment[at])
        key, fixed = (mine.waiting, mine.phase), sum(map(held_bytes, here, moment))
        worst[key] = max(fixed, worst.get(key, fixed))
    limits = [Limit(fixed, *key) for key, fixed in worst.items()]
    return _best(fine, runs[stage], limits, pipeline.room.devices[pipeline.ranks[stage]].memory_bytes)


def _best(fine: Fine, run: Run, limits: Sequence[Limit], room: int) -> Choice | None:
    first, end = fine.ends[run[0]], fine.ends[run[1]]
    forward_s: list[float] = fine.seconds.forward[first:end].tolist()
    found = choose(fine.stage(run), forward_s, limits, room)
    return replace(found, units=frozenset(first + unit for unit in found.units)) if found else None


def _limit(empty: Ranges, alive: Alive) -> Limit:
    back = BACKWARD if alive.graded else FIRST_BACKWARD
    acting = {Phase.FORWARD: FORWARD, Phase.BACKWARD: back, Phase.HALF: back}
    phase = acting.get(alive.phase, NOTHING)
    return Limit(held_bytes(empty, alive), alive.in_flight - (phase != NOTHING), phase)


def _case(kept: Case, run: Run, chosen: Units, fine: Fine) -> Case:
    """The tables with this run's own bytes, and the seconds of units that run twice."""
    first, end = fine.ends[run[0]], fine.ends[run[1]]
    held = fine.stage(run).held({unit - first for unit in chosen if first <= unit < end})
    tables = {name: getattr(kept.ranges, name).copy() for name in OWN}
    again = np.zeros(len(fine.graph.units))
    again[sorted(chosen)] = fine.seconds.forward[sorted(chosen)]
    pieces = np.add.reduceat(again, fine.ends[:-1])
    for piece in np.flatnonzero(pieces >= kept.seconds.forward * (1 - 1e-12)):
        tables["saved"][piece, piece + 1] = 0
    now = {"saved": held.kept, "twice": 0, "again": 0, "forward": held.forward}
    now |= {"backward": held.backward, "first_backward": held.first_backward, "waiting": 0}
    now |= {"halved": max(held.backward, held.first_backward)}
    for name, size in now.items():
        tables[name][run] = size
    seconds = kept.seconds.plus(np.zeros_like(pieces), pieces)
    return replace(kept, ranges=replace(kept.ranges, **tables), seconds=seconds, recompute="selective")
