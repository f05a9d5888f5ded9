"""Problem: do branches of the model, run at the same time, make a step shorter than runs of its own order?

    1  who is on which rank (levels.py), and what stages these are: three and more on two ranks
    2  a schedule for them, composed for their seconds, links and memory (schedules/compose.py)
    3  what that costs, as any plan is priced (estimate.py): units stage after stage are a model whose stages
       are runs, so nothing else is different
    4  it is taken where a step is shorter by WORTH and fits

Asked for schedule "auto", a plan gets a composed schedule in any case, also in a V and in turns where stages
form a chain. On further axes each device of a group follows the row of its rank in the pipeline: seconds,
bytes and messages are those of such a device, and replicas add up behind its last action. Source of the idea:
the branches of PipeDream's and Piper's graphs (arXiv 1806.03377; Tarnawski et al., NeurIPS 2021). No
randomness. Complexity: a few hundred list schedules, for the TRIED most promising ways.
Oracle: tests/unit/planner/test_branched.py, by hand; step times: benchmarks/branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise, product
from math import inf
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from outsize.ir.cluster import Cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Expected, Plan, stages_from_units
from outsize.ir.profile import Profile
from outsize.ir.quotient import in_stages
from outsize.ir.schedule import Schedule, placed
from outsize.ir.text import percent_text, seconds_text
from outsize.planner.branches import branches
from outsize.planner.edges import Edge, Edges, edges_among, edges_of, flows
from outsize.planner.either import as_alternative
from outsize.planner.estimate import Estimate, estimate, expected, forward_bytes, reasons, stage_cost
from outsize.planner.floor import Work
from outsize.planner.layout import Layout, grouped
from outsize.planner.levels import Placed, by_branches, stages_of
from outsize.planner.limits import limited_by
from outsize.planner.memory import Alive, Phase, held_bytes
from outsize.planner.menu import Menu
from outsize.planner.ranges import Ranges
from outsize.planner.reasons import microbatches_text
from outsize.planner.seconds import fastest
from outsize.planner.split import Pipeline
from outsize.schedules.builders import NAMES, SEVERAL, build
from outsize.schedules.compose import compose, is_split, quick_s
from outsize.schedules.job import Job, StageCost
from outsize.schedules.planned import written

Candidates = Mapping[int, tuple[ModelGraph, Profile]]
Seconds = dict[Edge, float]
# A plan that is no run of the model's order, or splits backwards, has to be faster by so much.
WORTH: Final = 0.03
# What a further stage on a rank costs for each microbatch, beside what is simulated: two actions.
MORE_S: Final = 2e-4
# Ways that are composed, schedules of each that are priced, and forwards of a step above which none is.
TRIED: Final = 12
PRICED: Final = 4
# Of the most promising ways each stage is tried on the other ranks.
MOVED: Final = 3
ALTERNATIVES: Final = 3
MOST_FORWARDS: Final = 1024
MOST_UNITS: Final = 1500
# A stage between microbatches, and at work on one with none or one more in flight.
REST: Final = Alive(0, 0, 0, 0, Phase.WAIT, batch=0)
ONE: Final = Alive(1, 1, 1, 1, Phase.BACKWARD, batch=0)
TWO: Final = Alive(2, 1, 1, 1, Phase.BACKWARD, batch=0)


def branched(plan: Plan, candidates: Candidates, cluster: Cluster, *, anyhow: bool = False) -> Plan:
    """The plan, or one with branches at the same time; `anyhow`: with a composed schedule, chain or not.

    `candidates`: microbatches of a replica -> the model at that size.
    """
    in_turn = plan.axes.pp == 1 or plan.axes.group_size > 1
    if plan.expected is None or plan.form == "modules" or (in_turn and not anyhow):
        return plan
    best, limit_s = None, inf if anyhow else plan.expected.step_s * (1 - WORTH)
    for count, model in sorted(candidates.items()):
        found = _Composer(plan, count, *model, cluster, anyhow).best(limit_s)
        if found is not None:
            best, limit_s = found, found.judged_s
    return plan if best is None else best.written(plan, plan.expected, anyhow)


@final
@dataclass(frozen=True, eq=False)
class _Found:
    """Stages with their schedule, priced; `graph` is in the model's order, the estimate in the stages'."""

    graph: ModelGraph
    placed: Placed
    estimate: Estimate
    split: bool
    judged_s: float

    def written(self, plan: Plan, before: Expected, anyhow: bool) -> Plan:
        """As a plan, beside the one that it takes the place of."""
        found, layout = self.estimate, self.estimate.layout
        figures = expected(found, plan.batch_size, found.bounds)
        seconds = fastest([case.seconds for case in found.cases])
        limit = limited_by(found, Work.of(found.graph, seconds), found.graph, found.bounds)
        least_s = max(
            layout.microbatches * float(seconds.total.sum()) / layout.axes.pp,
            _path_s(found.graph, seconds.total),
        )
        gap = max(0.0, found.step_s / least_s - 1) if least_s else None
        return plan.model_copy(
            update={
                "microbatches": layout.microbatches,
                "schedule": "auto",
                "actions": layout.actions,
                "stages": stages_from_units(self.graph, self.placed.units, [d.name for d in found.devices]),
                "expected": figures.model_copy(update={"gap": gap, "limited_by": limit}),
                "alternatives": (as_alternative(plan), *plan.alternatives)[:ALTERNATIVES],
                "why": (self._why(plan, before, anyhow), *reasons(found, found.graph, found.bounds)),
            }
        )

    def _why(self, plan: Plan, before: Expected, anyhow: bool) -> str:
        step_s, many = self.estimate.step_s, microbatches_text(plan.microbatches)
        what = "a schedule composed for these stages" if anyhow else "branches run at the same time"
        halves = ", weights' gradients in the gaps" if self.split else ""
        if before.step_s < step_s:
            return f"{what}{halves}: {len(self.placed.ranks)} stages on {plan.axes.pp} devices"
        return (
            f"{what}{halves}: {len(self.placed.ranks)} stages on {plan.axes.pp} devices, "
            f"{seconds_text(step_s)} a step; runs of the model's own order under {plan.schedule} with {many} "
            f"take {seconds_text(before.step_s)}, {percent_text(before.step_s / step_s - 1)} more"
        )


def even_runs(seconds: Sequence[float], runs: int) -> list[int]:
    """The run of each unit: about the same work in each, and at least one unit."""
    total, done, found = sum(seconds), 0.0, list[int]()
    for unit, each in enumerate(seconds):
        wanted = int((done + each / 2) / total * runs) if total else 0
        last = found[-1] if found else -1
        left = len(seconds) - unit  # units for the runs that have none yet
        found.append(max(min(wanted, last + 1, runs - 1), last, 0, runs - left))
        done += each
    return found


def _path_s(graph: ModelGraph, seconds: NDArray[np.float64]) -> float:
    """Seconds of the longest way through the model, there and back."""
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
    """The best of all ways that are tried for one size of microbatches."""

    def __init__(
        self, plan: Plan, count: int, graph: ModelGraph, profile: Profile, cluster: Cluster, anyhow: bool
    ) -> None:
        self._plan, self._count, self._cluster, self._anyhow = plan, count, cluster, anyhow
        self._graph, self._profile, self._p = graph, profile, plan.axes.pp
        self._layout = Layout(plan.axes, self._p, "auto", count, count, plan.weights)
        self._layout = replace(self._layout, sequence=plan.sequence_parallel)
        whole, groups = self._menu((graph, profile)), grouped(cluster, plan.axes.group_size)
        assert groups is not None, "the plan is laid out on them"
        self._groups, self._flows = groups, flows(graph)
        self._seconds = whole.whole(self._layout, cluster.devices[0])[2]

    def _menu(self, model: tuple[ModelGraph, Profile]) -> Menu:
        """Of the model unit by unit."""
        units = len(model[0].units)
        return Menu({self._count: model}, self._cluster, self._plan.optimizer, most=units)

    def best(self, limit_s: float) -> _Found | None:
        """None where nothing can be composed, nothing fits, or no step is below the limit."""
        if len(self._graph.units) > MOST_UNITS or self._count * self._p > MOST_FORWARDS:
            return None
        seconds = self._seconds.total
        if max(self._count * float(seconds.sum()) / self._p, _path_s(self._graph, seconds)) >= limit_s:
            return None
        tried = dict.fromkeys(islice(self._ranked(self._ways()), TRIED))
        better = (moved for way in islice(tried, MOVED) for moved in self._moved(way))
        tried = islice(self._ranked(iter({**tried, **dict.fromkeys(better)})), TRIED)
        best = None
        for way in tried:
            for found in self._priced(way, limit_s):
                best, limit_s = found, found.judged_s
        return best

    def _ways(self) -> Iterator[Placed]:
        ranks = dict.fromkeys(self._on_ranks())
        found = (stages_of(self._graph, each, apart=apart) for each in ranks for apart in (False, True))
        yield from dict.fromkeys(way for way in found if way is not None)
        yield from self._chunked()

    def _chunked(self) -> Iterator[Placed]:
        """Runs of which each rank has two, in turns and in a V, neighbours on a rank apart."""
        runs = even_runs(self._seconds.total.tolist(), 2 * self._p)
        if self._anyhow and len(self._graph.units) >= 2 * self._p > 2:
            yield from (Placed(tuple(runs), placed(name, 2 * self._p, self._p)) for name in SEVERAL)

    def _on_ranks(self) -> Iterator[tuple[int, ...]]:
        """The rank of each unit."""
        plan, p = self._plan, self._p
        if self._count == plan.microbatches:
            yield tuple(plan.ranks[stage] for stage in plan.owners(self._graph))
        yield self._runs(range(p))
        found = branches(self._graph, self._seconds, p)
        if found is not None:
            of = {unit: stage for stage, units in enumerate(found.stages) for unit in units}
            yield tuple(of[unit] for unit in range(len(of)))
        yield from by_branches(self._graph, self._seconds.total, p)

    def _runs(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(ranks[run] for run in even_runs(self._seconds.total.tolist(), len(ranks)))

    def _moved(self, way: Placed) -> Iterator[Placed]:
        """Each stage on each other rank."""
        for stage, rank in product(range(len(way.ranks)), range(self._p)):
            ranks = [rank if own == stage else way.ranks[own] for own in way.owners]
            moved = stages_of(self._graph, ranks)
            if moved is not None:
                yield moved

    def _ranked(self, ways: Iterator[Placed]) -> Iterator[Placed]:
        """The most promising first; those that are a chain only if they are asked for."""
        fine = [
            way
            for way in ways
            if len(set(way.ranks)) == self._p and self._count * len(way.ranks) < MOST_FORWARDS
        ]
        fine = [way for way in fine if self._anyhow or not self._is_chain(way)]
        return iter(sorted(fine, key=lambda way: (self._quick_s(way), way.ranks)))

    def _is_chain(self, way: Placed) -> bool:
        """Does each stage wait for the one before?"""
        forward = edges_among(self._flows, way.owners.__getitem__).forward
        return all(pair in forward for pair in pairwise(range(len(way.ranks))))

    def _quick_s(self, way: Placed) -> float:
        """Seconds of a step by one rule, without memory, on devices like the first."""
        each = (
            [seconds[units].sum() for units in way.units]
            for seconds in (self._seconds.forward, self._seconds.backward)
        )
        costs = tuple(StageCost(float(f), float(b)) for f, b in zip(*each, strict=True))
        edges = edges_among(self._flows, way.owners.__getitem__)
        messages = self._messages(way.ranks, edges, self._groups)
        return quick_s(Job(way.ranks, self._count, costs, *messages, (0,) * len(costs), (0,) * self._p))

    def _messages(self, ranks: Sequence[int], edges: Edges, room: Cluster) -> tuple[Seconds, Seconds]:
        """Seconds of a message over each edge: of values, and of gradients."""
        forward, backward = (
            {
                (a, b): room.link(ranks[a], ranks[b]).seconds(size) if ranks[a] != ranks[b] else 0.0
                for (a, b), size in sizes.items()
            }
            for sizes in (forward_bytes(edges, self._count), edges.backward)
        )
        return forward, backward

    # -- what it costs ------------------------------------------------------------------------------------

    def _priced(self, way: Placed, limit_s: float) -> Iterator[_Found]:
        """Schedules below the limit that fit, each shorter than the one before."""
        order = in_stages(way.owners)
        model = self._graph.in_order(order), self._profile.in_order(order)
        layout = replace(self._layout, stages=len(way.ranks))
        again = "full" if self._plan.recompute == "full" else "none"
        pipeline = self._menu(model).pipeline(layout, (again,), way.ranks)
        if pipeline is None:
            return
        bounds = (0, *accumulate(map(len, way.units)))
        for composed in islice(compose(self._job(pipeline, bounds), rivals=self._rivals(way)), PRICED):
            if composed.step_s >= limit_s:
                return  # played with messages that queue it is no shorter
            named = replace(layout, actions=written(composed.schedule))
            found = estimate(replace(pipeline, layout=named), bounds, [0] * len(way.ranks))
            judged_s = found.step_s + (0.0 if self._anyhow else MORE_S * self._count * (named.chunks - 1))
            if judged_s < limit_s and found.fits:
                limit_s = judged_s
                yield _Found(self._graph, way, found, is_split(composed), judged_s)

    def _rivals(self, way: Placed) -> Iterator[Schedule]:
        """Schedules with a name that have their stages on these ranks."""
        stages = len(way.ranks)
        for name in NAMES if self._anyhow else ():
            fits = stages == self._p or (name in SEVERAL and stages % self._p == 0)
            if fits and placed(name, stages, self._p) == way.ranks:
                yield build(name, stages, self._count, self._p)

    def _job(self, pipeline: Pipeline, bounds: Sequence[int]) -> Job:
        runs, cases = tuple(pairwise(bounds)), [ways[0] for ways in pipeline.ways]
        costs = [stage_cost(case, *run) for case, run in zip(cases, runs, strict=True)]
        edges, ranks = edges_of(pipeline.case.flows, bounds), pipeline.ranks
        messages = self._messages(ranks, edges, pipeline.room)
        here = [case.ranges.only(*run) for case, run in zip(cases, runs, strict=True)]
        held = [held_bytes(r, TWO) - held_bytes(r, ONE) for r in here]
        waiting = tuple(int(r.waiting) for r in here)
        room = self._room(pipeline, here, held)
        return Job(ranks, self._count, tuple(costs), *messages, tuple(held), room, waiting)

    def _room(self, pipeline: Pipeline, here: Sequence[Ranges], held: Sequence[int]) -> tuple[float, ...]:
        """Of each rank for microbatches in flight: without what is there anyway, and what work adds."""
        found = []
        for rank in range(self._p):
            own = [s for s, at in enumerate(pipeline.ranks) if at == rank]
            resting = [held_bytes(here[s], REST) for s in own]
            working = max(held_bytes(here[s], ONE) - held[s] - r for s, r in zip(own, resting, strict=True))
            whole = self._count * int(here[0].inputs)
            found.append(pipeline.room.devices[rank].memory_bytes - sum(resting) - working - whole)
        return tuple(found)
