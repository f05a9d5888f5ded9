"""Prices stages that recompute some of their units, which recompute_knapsack.py chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Final, Self, final

import numpy as np

from outsize.ir.findings import UnitsRecomputed
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Expected, Stage
from outsize.ir.profile import Profile
from outsize.ir.units.names import compress_units
from outsize.ir.units.recompute_segments import Run, blocks
from outsize.planner.costs.unit_times import Seconds, UnitSeconds
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.memory.account import InFlightState, Phase, bytes_in_state, component_table
from outsize.planner.memory.in_flight_states import states_by_rank, states_by_stage
from outsize.planner.memory.optimizer_states import optimizer_bytes
from outsize.planner.memory.range_tables import Bytes, RangeTables, owned_gradients
from outsize.planner.memory.recomputed_stage import MicrobatchBytes, StageBytes
from outsize.planner.memory.sharded import GatheredBytes
from outsize.planner.partition.stage_prices import Pipeline, PricedModel
from outsize.planner.strategies.recompute_knapsack import (
    BACKWARD,
    FIRST_BACKWARD,
    FORWARD,
    NOTHING,
    Choice,
    Limit,
    choose,
)
from outsize.policies.activations import SELECTIVE, Recompute

Units = frozenset[int]
# Up to this many stages have a finding each; more share one.
MANY: Final = 3
# The bytes of this many stages are kept: of all in a long pipeline, which are asked for one after the other.
MOST_STAGES: Final = 1024
# A choice of units changes these tables of a stage.
OWN = (
    "saved",
    "saved_boundary",
    "saved_sent",
    "forward",
    "backward",
    "first_backward",
    "between_halves",
    "split_backward",
)


@final
@dataclass(frozen=True, eq=False)
class UnitLevelModel:
    """Holds the model of a search unit by unit; its tables may be of pieces, whose `ends` are given.

    `gradients`: bytes for the weights that each unit owns. `gathered` is set where weights are sharded.
    """

    graph: ModelGraph
    profile: Profile
    seconds: UnitSeconds
    gradients: Bytes
    ends: tuple[int, ...]
    gathered: GatheredBytes | None = None

    @classmethod
    def of(cls, pricing: Pricing, pipeline: Pipeline, stage: int, optimizer: str) -> Self:
        """Returns the model as the stage's device runs it, which all tries of units share."""
        layout, device = pipeline.layout, pipeline.device(stage)
        ends = pricing.stages.ends(layout)

        def built() -> Self:
            graph, profile, seconds = pricing.units.whole(layout, device)
            gradients = owned_gradients(graph, optimizer_bytes(optimizer))
            gathered = pricing.stages.gathered(layout, device)
            return cls(graph, profile, seconds, gradients, ends, gathered)

        return pricing.once(("unit by unit", layout, ends, device.kind, optimizer), built)

    @cached_property
    def stage(self) -> Callable[[Run], StageBytes]:
        """Returns the function run of pieces -> bytes of the stage with it; it keeps the last results."""
        graph, profile, gradients, ends = self.graph, self.profile, self.gradients, self.ends
        sharded, block_of = self.gathered is not None, blocks([unit.name for unit in graph.units])

        # It does not hold the model that holds it: a cycle would keep all tables until Python looks for one.
        def stage(run: Run) -> StageBytes:
            first, end = ends[run[0]], ends[run[1]]
            own: list[int] = gradients[first:end].tolist()
            whole = StageBytes.of(graph, profile, own, (first, end), block_of)
            # The first backward is bounded by a later one, as in memory/sharded.py.
            later = {"first_backward": whole.backward, "first_passing": whole.passing}
            return replace(whole, **later) if sharded else whole

        return lru_cache(maxsize=MOST_STAGES)(stage)

    @cached_property
    def case(self) -> Callable[[PricedModel, Run, Units], PricedModel]:
        """Returns the function (tables without recompute, run, chosen units) -> tables with this run's own
        bytes, and the seconds of units that are recomputed; it keeps the last results.
        """
        seconds, ends, stage, gathered = self.seconds, self.ends, self.stage, self.gathered  # See `stage`.

        def case(saving: PricedModel, run: Run, chosen: Units) -> PricedModel:
            first, end = ends[run[0]], ends[run[1]]
            held = stage(run).held({unit - first for unit in chosen if first <= unit < end})
            held = held if gathered is None else gathered.beside(held, run)
            return _with_chosen(saving, run, held, _recompute_s(seconds, ends, chosen))

        return lru_cache(maxsize=64)(case)


def _recompute_s(seconds: UnitSeconds, ends: Sequence[int], chosen: Units) -> Seconds:
    """Returns the seconds of the chosen units' second forward, by piece."""
    again_s = np.zeros(ends[-1])
    again_s[sorted(chosen)] = seconds.forward[sorted(chosen)]
    return np.add.reduceat(again_s, ends[:-1])


def _with_chosen(saving: PricedModel, run: Run, held: MicrobatchBytes, pieces_s: Seconds) -> PricedModel:
    """Returns the tables without recompute with this run's own bytes, and the seconds of what it computes
    twice.

    Of other runs nothing is read but what they save, so the other tables are one number each: to copy all of
    them for each stage of a long pipeline took a twentieth of its search.
    """
    saved = saving.ranges.saved.copy()
    for piece in np.flatnonzero(pieces_s >= saving.seconds.forward * (1 - 1e-12)):
        saved[piece, piece + 1] = 0
    saved[run] = held.saved_bytes
    sizes = {"saved_boundary": 0, "saved_sent": 0, "forward": held.forward}
    sizes |= {"backward": held.backward, "first_backward": held.first_backward, "between_halves": 0}
    sizes |= {"split_backward": max(held.backward, held.first_backward)}
    tables = {name: np.broadcast_to(np.int64(size), saved.shape) for name, size in sizes.items()}
    seconds = saving.seconds.plus(np.zeros_like(pieces_s), pieces_s)
    ranges = replace(saving.ranges, saved=saved, **tables)
    return replace(saving, ranges=ranges, seconds=seconds, recompute=SELECTIVE.name)


def selective_reasons(
    candidate: Candidate, chosen: Mapping[int, Units], bounds: Sequence[int]
) -> Iterator[UnitsRecomputed]:
    """Yields how much each stage recomputes, and its seconds; `bounds` are those of the graph's units."""
    findings = [
        UnitsRecomputed(
            stages=(stage,),
            recomputed_units=len(units),
            units=bounds[stage + 1] - bounds[stage],
            again_s=_again_s(candidate, stage),
            forward_s=candidate.costs[stage].forward_s,
        )
        for stage, units in chosen.items()
    ]
    if len(findings) <= MANY:
        yield from findings
        return
    yield UnitsRecomputed(
        stages=tuple(sorted(chosen)),
        recomputed_units=sum(f.recomputed_units for f in findings),
        units=sum(f.units for f in findings),
        again_s=sum(f.again_s for f in findings),
        forward_s=sum(f.forward_s for f in findings),
    )


def by_blocks(candidate: Candidate, bounds: Sequence[int]) -> dict[int, Units]:
    """Returns the stages that recompute all their units block by block; `bounds` are those of the graph's
    units.
    """
    cases = enumerate(zip(candidate.cases, pairwise(bounds), strict=True))
    return {s: frozenset(range(*run)) for s, (case, run) in cases if case.activation_policy.lists_units}


def _again_s(candidate: Candidate, stage: int) -> float:
    """Returns the forward seconds of a microbatch that a stage recomputes: all, where none may be kept."""
    if not any(case.activation_policy.keeps_all for case in candidate.pipeline.options[stage]):
        return candidate.costs[stage].forward_s
    run, saving = slice(*candidate.bounds[stage : stage + 2]), saving_case(candidate.pipeline, stage)
    return float((candidate.cases[stage].seconds.backward_input - saving.seconds.backward_input)[run].sum())


def counted(figures: Expected, chosen: Mapping[int, Units]) -> Expected:
    """Returns the figures with the number of units that each stage recomputes."""
    counts = [len(chosen.get(stage, ())) for stage in range(len(figures.stages))]
    pairs = zip(figures.stages, counts, strict=True)
    stages = tuple(figure.model_copy(update={"recomputed": count}) for figure, count in pairs)
    return figures.model_copy(update={"stages": stages})


def written(
    stages: Sequence[Stage],
    cases: Sequence[PricedModel],
    overall: Recompute,
    chosen: Mapping[int, Units],
    graph: ModelGraph,
) -> tuple[Stage, ...]:
    """Returns the stages of a plan, each with its recompute option and its recomputed units."""
    names = [unit.name for unit in graph.units]
    units = [compress_units(names, sorted(chosen.get(stage, ()))) for stage in range(len(stages))]
    how = [None if case.recompute == overall else case.recompute for case in cases]
    pairs = zip(stages, how, units, strict=True)
    return tuple(s.model_copy(update={"recompute": h, "recomputed": u}) for s, h, u in pairs)


def recomputing(
    pipeline: Pipeline,
    bounds: Sequence[int],
    choices: Sequence[int],
    chosen: Mapping[int, Units],
    pricing: Pricing,
    optimizer: str,
) -> Candidate:
    """Prices a cut whose stages recompute the units in `chosen`, as numbered in the model; the others run
    their options `choices`.
    """
    options, places, runs = list(pipeline.options), list(choices), tuple(pairwise(bounds))
    for stage, units in chosen.items():
        fine = UnitLevelModel.of(pricing, pipeline, stage, optimizer)
        places[stage] = len(options[stage])
        case = fine.case(saving_case(pipeline, stage), runs[stage], units)
        if (again := pricing.stages.read_again(pipeline.layout, units)) > 0:
            case = replace(case, ranges=replace(case.ranges, inputs=case.ranges.inputs + again))
        options[stage] = (*options[stage], case)
    candidate = Candidate.of(replace(pipeline, options=tuple(options)), bounds, places)
    return replace(candidate, recomputed=dict(chosen))


def saving_case(pipeline: Pipeline, stage: int) -> PricedModel:
    """Returns the stage's tables without recompute."""
    return next(case for case in pipeline.options[stage] if case.activation_policy.keeps_all)


def choice(pipeline: Pipeline, stage: int, run: Run, fine: UnitLevelModel) -> Choice | None:
    """Returns the best choice of a stage with a run of pieces, units as numbered in the model; None if none
    fits.
    """
    layout, tables = pipeline.layout, saving_case(pipeline, stage).ranges.of_run(*run)
    empty = replace(tables, **dict.fromkeys(OWN, np.zeros_like(tables.saved)))
    states = states_by_stage(*layout.schedule_key().of_single_stages)
    limits = [_limit(empty, alive) for alive in states[stage]]
    return _best(fine, run, limits, pipeline.room_bytes(stage))


def shared_choice(candidate: Candidate, stage: int, fine: UnitLevelModel) -> Choice | None:
    """Returns the same for a stage that shares its device, while the others there keep their options."""
    layout, pipeline, runs = candidate.layout, candidate.pipeline, tuple(pairwise(candidate.bounds))
    rank = layout.ranks[stage]
    own = layout.stages_on(rank)
    tables, at = [candidate.cases[s].ranges.of_run(*runs[s]) for s in own], own.index(stage)
    tables[at] = empty = replace(tables[at], **dict.fromkeys(OWN, np.zeros_like(tables[0].saved)))
    joint = states_by_rank(*layout.schedule_key().without_actions)[rank]
    # A device holds the inputs of its microbatches once, with its first stage.
    batches = [layout.microbatches, *[0] * (len(own) - 1)]
    parts = np.array(list(map(component_table, tables, batches)))
    held_bytes, own_states = joint.bytes_at(parts), joint.moments[:, at]
    largest_fixed = dict[tuple[int, int], int]()
    for place in dict.fromkeys(own_states.tolist()):
        limit = _limit(empty, joint.distinct[place])
        key, fixed = (limit.awaiting_backward, limit.phase), int(held_bytes[own_states == place].max())
        largest_fixed[key] = max(fixed, largest_fixed.get(key, fixed))
    limits = [Limit(fixed, *key) for key, fixed in largest_fixed.items()]
    return _best(fine, runs[stage], limits, pipeline.room.devices[pipeline.ranks[stage]].memory_bytes)


def _best(fine: UnitLevelModel, run: Run, limits: Sequence[Limit], room: int) -> Choice | None:
    first, end = fine.ends[run[0]], fine.ends[run[1]]
    forward_s: list[float] = fine.seconds.forward[first:end].tolist()
    if (gathered := fine.gathered) is not None:
        limits = [_with_gathered(at, gathered, run) for at in limits]
    cheapest = choose(fine.stage(run), forward_s, limits, room)
    return replace(cheapest, units=frozenset(first + unit for unit in cheapest.units)) if cheapest else None


def _with_gathered(limit: Limit, gathered: GatheredBytes, run: Run) -> Limit:
    if limit.phase == NOTHING:
        return limit
    beside = gathered.forward if limit.phase == FORWARD else gathered.backward
    return replace(limit, fixed_bytes=limit.fixed_bytes + int(beside[run]))


def _limit(empty: RangeTables, state: InFlightState) -> Limit:
    backward = BACKWARD if state.graded else FIRST_BACKWARD
    acting = {Phase.FORWARD: FORWARD, Phase.BACKWARD: backward, Phase.HALF: backward}
    phase = acting.get(state.phase, NOTHING)
    return Limit(bytes_in_state(empty, state), state.in_flight - (phase != NOTHING), phase)
