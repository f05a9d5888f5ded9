"""Problem: do branches of the model, run in parallel, make a step shorter than runs of its own order?

    1  assign units to ranks (dag/stage_levels.py), which gives the stages: three and more on two ranks
    2  compose a schedule for them, from their seconds, links and memory (schedules/compose.py)
       a bound (bounds/placement.py) leaves out ranks of units on which no step is below the limit
    3  price it as any plan (evaluate/candidate.py): with units sorted by stage the stages are runs, so
       nothing else differs
    4  take it where a step is shorter by WORTH and fits

With schedule auto, a plan gets a composed schedule in any case, also in a V and in round-robin where stages
form a chain. On further axes each device of a group follows the row of its rank in the pipeline: seconds,
bytes and messages are those of such a device, and replicas reduce after its last action. Source of the idea:
the branches of PipeDream's and Piper's graphs (arXiv 1806.03377; Tarnawski et al., NeurIPS 2021). There is no
randomness. Complexity: a few hundred list schedules, for the TRIED most promising placements. Oracle:
tests/unit/planner/strategies/test_parallel_branches.py, by hand; step times: benchmarks/branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, pairwise, product
from math import inf
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.cluster import Cluster
from outsize.ir.findings import ComposedSchedule
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Expected, Plan, stages_from_units
from outsize.ir.profile import Profile
from outsize.ir.schedule import Kind, Schedule
from outsize.ir.stage_graph import in_stages
from outsize.planner.bounds.placement import PlacementBound
from outsize.planner.bounds.step_time import PrefixTimes
from outsize.planner.costs.stage_edges import Edge, Edges, edges_among, edges_of, flows
from outsize.planner.costs.unit_times import fastest
from outsize.planner.dag.stage_levels import Placed, StageLevels, by_branches
from outsize.planner.evaluate.bottleneck import limited_by
from outsize.planner.evaluate.candidate import Candidate, expected, reasons
from outsize.planner.evaluate.played_step import stage_cost
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.evaluate.ranking import as_alternative
from outsize.planner.layout.layout import Layout, grouped
from outsize.planner.memory.account import InFlightState, Phase, bytes_in_state
from outsize.planner.memory.range_tables import RangeTables
from outsize.planner.partition.stage_prices import Pipeline
from outsize.policies.activations import KEEP, RECOMPUTE, activation_policy
from outsize.schedules.builders import build, written
from outsize.schedules.compose import compose, is_split, quick_s
from outsize.schedules.families import COMPOSED, families
from outsize.schedules.job import Job, StageCost

Models = Mapping[int, tuple[ModelGraph, Profile]]
Seconds = dict[Edge, float]
# A plan with stages that are not runs, or with split backwards, has to be faster by this share.
WORTH: Final = 0.03
# A further stage on a rank costs this much for each microbatch besides the simulated time: two actions.
MORE_S: Final = 2e-4
# Limits the placements that are composed, the schedules of each that are priced, and the forwards of a step.
TRIED: Final = 12
PRICED: Final = 4
# No rule makes a step shorter than two of them do by more than this.
FAR: Final = 1.1
# So many placements in a row that bring nothing end the search where another plan wins as it is.
IN_VAIN: Final = 3
# In this many of the most promising placements each stage is tried on the other ranks.
MOVED: Final = 3
ALTERNATIVES: Final = 3
# Further placements seldom make a step shorter by more than this.
NEAR: Final = 1.05
MOST_FORWARDS: Final = 1024
MOST_UNITS: Final = 1500
# Describes a stage between microbatches, and computing one with none or one more in flight.
REST: Final = InFlightState(0, 0, 0, 0, Phase.WAIT, batch=0)
ONE: Final = InFlightState(1, 1, 1, 1, Phase.BACKWARD, batch=0)
TWO: Final = InFlightState(2, 1, 1, 1, Phase.BACKWARD, batch=0)


def branched(
    plan: Plan, models: Models, cluster: Cluster, *, always: bool = False, most_s: float = inf
) -> Plan:
    """Returns the plan, or one with parallel branches; `always`: with a composed schedule, chain or not.

    `models` map microbatches of a replica -> the model at that size. Above `most_s` another plan wins, so the
    most promising placement alone is composed where it is not near.
    """
    no_branches = plan.axes.pp == 1 or plan.axes.group_size > 1
    if plan.expected is None or plan.form == "modules" or (no_branches and not always):
        return plan
    best, limit_s = None, inf if always else plan.expected.step_s * (1 - WORTH)
    for count, model in sorted(models.items()):
        composed = _Composer(plan, count, *model, cluster, always).best(limit_s, most_s)
        if composed is not None:
            best, limit_s = composed, composed.judged_s
    return plan if best is None else best.written(plan, plan.expected, always)


@final
@dataclass(frozen=True, eq=False)
class _PricedPlacement:
    """Holds stages with their schedule, priced; `graph` is in the model's order, the estimate in
    the stages'.
    """

    graph: ModelGraph
    placed: Placed
    estimate: Candidate
    split: bool
    judged_s: float

    def written(self, plan: Plan, before: Expected, always: bool) -> Plan:
        """Returns it as a plan, with the plan that it replaces among the alternatives."""
        candidate, layout = self.estimate, self.estimate.layout
        figures = expected(candidate, plan.batch_size, candidate.bounds)
        seconds = fastest([case.seconds for case in candidate.cases])
        limit = limited_by(
            candidate, PrefixTimes.of(candidate.graph, seconds), candidate.graph, candidate.bounds
        )
        least_s = max(
            layout.microbatches * float(seconds.total.sum()) / layout.axes.pp,
            _path_s(candidate.graph, seconds.total),
        )
        gap = max(0.0, candidate.step_s / least_s - 1) if least_s else None
        return plan.model_copy(
            update={
                "microbatches": layout.microbatches,
                "schedule": COMPOSED.name,
                "actions": layout.actions,
                "stages": stages_from_units(
                    self.graph, self.placed.units, [d.name for d in candidate.devices]
                ),
                "expected": figures.model_copy(update={"gap": gap, "limited_by": limit}),
                "alternatives": (as_alternative(plan), *plan.alternatives)[:ALTERNATIVES],
                "why": (
                    self._why(plan, before, always),
                    *reasons(candidate, candidate.graph, candidate.bounds),
                ),
            }
        )

    def _why(self, plan: Plan, before: Expected, always: bool) -> ComposedSchedule:
        return ComposedSchedule(
            branches=not always,
            split_backward=self.split,
            stages=len(self.placed.ranks),
            devices=plan.axes.pp,
            step_s=self.estimate.step_s,
            named_schedule=plan.schedule,
            microbatches=plan.microbatches,
            named_step_s=before.step_s,
        )


def even_runs(seconds: Sequence[float], runs: int) -> list[int]:
    """Returns the run of each unit: about the same work in each, and at least one unit."""
    total, done, run_of = sum(seconds), 0.0, list[int]()
    for unit, unit_s in enumerate(seconds):
        target = int((done + unit_s / 2) / total * runs) if total else 0
        last = run_of[-1] if run_of else -1
        remaining = len(seconds) - unit  # These units are left for the runs that have none yet.
        run_of.append(max(min(target, last + 1, runs - 1), last, 0, runs - remaining))
        done += unit_s
    return run_of


def _path_s(graph: ModelGraph, seconds: NDArray[np.float64]) -> float:
    """Returns the seconds of the longest path through the model, forward and backward."""
    begins, ends = np.zeros_like(seconds), np.zeros_like(seconds)
    users: list[list[int]] = [[] for _ in graph.units]
    for value in graph.values:
        users[value.producer] += value.consumers
    for unit, after in enumerate(users):
        ends[unit] = begins[unit] + seconds[unit]
        begins[after] = np.maximum(begins[after], ends[unit])
    return float(ends.max())


@final
class _Composer:
    """Finds the best of all placements that are tried for one microbatch size."""

    def __init__(
        self, plan: Plan, count: int, graph: ModelGraph, profile: Profile, cluster: Cluster, always: bool
    ) -> None:
        self._plan, self._count, self._cluster, self._always = plan, count, cluster, always
        self._graph, self._profile, self._p = graph, profile, plan.axes.pp
        self._layout = Layout(plan.axes, self._p, COMPOSED.name, count, count, plan.weights)
        self._layout = replace(self._layout, sequence=plan.sequence_parallel)
        whole, groups = self._unit_by_unit((graph, profile)), grouped(cluster, plan.axes.group_size)
        assert groups is not None, "the plan is laid out on them"
        self._groups, self._flows = groups, flows(graph)
        kinds = {device.kind: device for device in reversed(cluster.devices)}
        seconds_of = {kind: whole.units.whole(self._layout, device)[2] for kind, device in kinds.items()}
        self._seconds = seconds_of[cluster.devices[0].kind]
        self._bound = PlacementBound.of(graph, fastest([*seconds_of.values()]))
        self._levels = StageLevels(graph)

    def _unit_by_unit(self, model: tuple[ModelGraph, Profile]) -> Pricing:
        """Returns the prices of the model unit by unit."""
        units = len(model[0].units)
        return Pricing({self._count: model}, self._cluster, self._plan.optimizer, most=units)

    def best(self, limit_s: float, most_s: float) -> _PricedPlacement | None:
        """Returns the best placement; None where nothing can be composed, nothing fits, or no step is below
        the limit. Others than the most promising one are composed while `most_s` is near.
        """
        if len(self._graph.units) > MOST_UNITS or self._count * self._p > MOST_FORWARDS:
            return None
        seconds = self._seconds.total
        if max(self._count * float(seconds.sum()) / self._p, _path_s(self._graph, seconds)) >= limit_s:
            return None
        ranked = tuple(islice(self._ranked(self._placements()), TRIED))
        promising = (placement for placement in ranked if self._least_s(placement) < limit_s)
        moved = (moved for placement in ranked[:MOVED] for moved in self._moved(placement, limit_s))
        tried = islice(self._ranked(iter(dict.fromkeys(chain(promising, moved)))), TRIED)
        best, in_vain = None, 0
        for number, placement in enumerate(tried):
            if (number and limit_s > NEAR * most_s) or (in_vain == IN_VAIN and limit_s > most_s):
                break
            in_vain += 1
            for candidate in self._priced(placement, limit_s):
                best, limit_s, in_vain = candidate, candidate.judged_s, 0
        return best

    def _placements(self) -> Iterator[Placed]:
        ranks = dict.fromkeys(self._on_ranks())
        placements = (
            self._levels.stages(rank_of, apart=apart) for rank_of in ranks for apart in (False, True)
        )
        yield from dict.fromkeys(placement for placement in placements if placement is not None)
        yield from self._chunked()

    def _chunked(self) -> Iterator[Placed]:
        """Yields runs of which each rank has two, in round-robin and in a V, neighbours on
        different ranks.
        """
        runs = even_runs(self._seconds.total.tolist(), 2 * self._p)
        if self._always and len(self._graph.units) >= 2 * self._p > 2:
            chunked = (family for family in families() if family.interleaves)
            yield from (Placed(tuple(runs), family.placement(2 * self._p, self._p)) for family in chunked)

    def _on_ranks(self) -> Iterator[tuple[int, ...]]:
        """Yields assignments of a rank to each unit."""
        plan, p = self._plan, self._p
        if self._count == plan.microbatches:
            yield tuple(plan.ranks[stage] for stage in plan.owners(self._graph))
        yield self._runs(range(p))
        yield from by_branches(self._graph, self._seconds.total, p)

    def _runs(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(ranks[run] for run in even_runs(self._seconds.total.tolist(), len(ranks)))

    def _moved(self, placement: Placed, limit_s: float) -> Iterator[Placed]:
        """Yields placements with each stage on each other rank, of which a step may be below the limit."""
        owners, rank_of = np.array(placement.owners), np.array(placement.ranks)[list(placement.owners)]
        for stage, rank in product(range(len(placement.ranks)), range(self._p)):
            ranks = np.where(owners == stage, rank, rank_of)
            if self._bound.least_s(ranks, self._count) < limit_s:
                changed = self._levels.stages(ranks.tolist())
                if changed is not None:
                    yield changed

    def _least_s(self, placement: Placed) -> float:
        """Returns the seconds that a step on these ranks takes at least."""
        return self._bound.least_s(np.array(placement.ranks)[list(placement.owners)], self._count)

    def _ranked(self, placements: Iterator[Placed]) -> Iterator[Placed]:
        """Returns the most promising placements first; chains only if they are asked for."""
        suitable = [
            placement
            for placement in placements
            if len(set(placement.ranks)) == self._p and self._count * len(placement.ranks) < MOST_FORWARDS
        ]
        suitable = [placement for placement in suitable if self._always or not self._is_chain(placement)]
        return iter(sorted(suitable, key=lambda placement: (self._quick_s(placement), placement.ranks)))

    def _is_chain(self, placement: Placed) -> bool:
        """Returns whether each stage waits for the one before."""
        forward = edges_among(self._flows, placement.owners.__getitem__).forward
        return all(pair in forward for pair in pairwise(range(len(placement.ranks))))

    def _quick_s(self, placement: Placed) -> float:
        """Returns the seconds of a step by one rule, without memory, on devices like the first."""
        stage_seconds = (
            [seconds[units].sum() for units in placement.units]
            for seconds in (self._seconds.forward, self._seconds.backward)
        )
        costs = tuple(StageCost(float(f), float(b)) for f, b in zip(*stage_seconds, strict=True))
        edges = edges_among(self._flows, placement.owners.__getitem__)
        messages = self._messages(placement.ranks, edges, self._groups)
        return quick_s(Job(placement.ranks, self._count, costs, *messages, (0,) * len(costs), (0,) * self._p))

    def _messages(self, ranks: Sequence[int], edges: Edges, room: Cluster) -> tuple[Seconds, Seconds]:
        """Returns the seconds of a message over each edge: of values, and of gradients."""
        seconds = edges.message_s(self._count, lambda a, b: room.link(ranks[a], ranks[b]))
        forward, backward = (
            {
                (a, b): message_s if ranks[a] != ranks[b] else 0.0
                for (of, a, b), message_s in seconds.items()
                if of is kind
            }
            for kind in (Kind.F, Kind.B)
        )
        return forward, backward

    # -- what it costs ------------------------------------------------------------------------------------

    def _priced(self, placement: Placed, limit_s: float) -> Iterator[_PricedPlacement]:
        """Yields schedules below the limit that fit, each shorter than the one before."""
        order = in_stages(placement.owners)
        model = self._graph.in_order(order), self._profile.in_order(order)
        layout = replace(self._layout, stages=len(placement.ranks))
        whole = activation_policy(self._plan.recompute).recomputes_all
        recompute = RECOMPUTE.name if whole else KEEP.name
        pipeline = self._unit_by_unit(model).pipeline(layout, (recompute,), placement.ranks)
        if pipeline is None:
            return
        bounds = (0, *accumulate(map(len, placement.units)))
        job = self._job(pipeline, bounds)
        if quick_s(job) >= FAR * limit_s:
            return
        for composed in islice(compose(job, rivals=self._rivals(placement)), PRICED):
            if composed.step_s >= limit_s:
                return  # Simulated with messages that queue it is no shorter.
            named = replace(layout, actions=written(composed.schedule))
            candidate = Candidate.of(replace(pipeline, layout=named), bounds, [0] * len(placement.ranks))
            judged_s = candidate.step_s + (0.0 if self._always else MORE_S * self._count * (named.chunks - 1))
            if judged_s < limit_s and candidate.may_be_chosen:
                limit_s = judged_s
                yield _PricedPlacement(self._graph, placement, candidate, is_split(composed), judged_s)

    def _rivals(self, placement: Placed) -> Iterator[Schedule]:
        """Yields named schedules that have their stages on these ranks."""
        stages = len(placement.ranks)
        for family in families() if self._always else ():
            fits = stages == self._p or (family.interleaves and stages % self._p == 0)
            if (
                family.row is not None
                and family.trains
                and fits
                and family.placement(stages, self._p) == placement.ranks
            ):
                yield build(family.name, stages, self._count, self._p)

    def _job(self, pipeline: Pipeline, bounds: Sequence[int]) -> Job:
        runs, cases = tuple(pairwise(bounds)), [options[0] for options in pipeline.options]
        costs = [stage_cost(case, *run) for case, run in zip(cases, runs, strict=True)]
        edges, ranks = edges_of(pipeline.case.flows, bounds), pipeline.ranks
        messages = self._messages(ranks, edges, pipeline.room)
        stage_tables = [case.ranges.of_run(*run) for case, run in zip(cases, runs, strict=True)]
        in_flight_bytes = [bytes_in_state(r, TWO) - bytes_in_state(r, ONE) for r in stage_tables]
        waiting = tuple(int(r.between_halves) for r in stage_tables)
        room = self._room(pipeline, stage_tables, in_flight_bytes)
        return Job(ranks, self._count, tuple(costs), *messages, tuple(in_flight_bytes), room, waiting)

    def _room(
        self, pipeline: Pipeline, stage_tables: Sequence[RangeTables], in_flight_bytes: Sequence[int]
    ) -> tuple[float, ...]:
        """Returns each rank's bytes for microbatches in flight: without permanent bytes and those of
        computing.
        """
        rooms = []
        for rank in range(self._p):
            own = [s for s, at in enumerate(pipeline.ranks) if at == rank]
            resting = [bytes_in_state(stage_tables[s], REST) for s in own]
            working = max(
                bytes_in_state(stage_tables[s], ONE) - in_flight_bytes[s] - r
                for s, r in zip(own, resting, strict=True)
            )
            batch_bytes = self._count * int(stage_tables[0].inputs)
            rooms.append(pipeline.room.devices[rank].memory_bytes - sum(resting) - working - batch_bytes)
        return tuple(rooms)
