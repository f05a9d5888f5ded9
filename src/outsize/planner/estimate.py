"""What a given cut costs: seconds by simulating its schedule, bytes by executing it. Cuts are not moved.

`price` is for plans that a person has edited; the search uses the same `estimate` for its own. A step of
very many microbatches is played in part: once the pipeline is full it does the same over and over (a max-plus
system is periodic), so the rest follows from the rate at which it was played. Where links set the pace
the period need not divide p: hence the rate is that of half of what is played. With links of up to ten
forwards that is within 0.2 % of all played in full for up to 16 stages, within 1.5 % for 64 (the rate of the
last p microbatches is up to 6 % off). Oracle: tests/unit/planner/test_estimate.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from outsize.errors import TooFewSamples
from outsize.ir.cluster import Cluster, Device
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Expected, StageFigures
from outsize.ir.schedule import Kind, Schedule
from outsize.ir.timeline import Timeline
from outsize.planner.edges import Edge, Edges, edges_of
from outsize.planner.layout import How, Layout
from outsize.planner.longest import Cost, Network
from outsize.planner.margin import margin_text, p50_bytes, p95_bytes
from outsize.planner.memory import Alive, StageMemory, account_run, columns, counts
from outsize.planner.moments import moments_along, moments_by_rank, moments_by_stage
from outsize.planner.reasons import fullest_reason, pace_reason
from outsize.planner.simulate import StageCost, simulate
from outsize.planner.split import Case, Pipeline
from outsize.planner.spread import sync_s
from outsize.schedules.lower import lower
from outsize.schedules.planned import planned

# Forwards that are played of one step, over all stages.
PLAYED: Final = 4096
# What a backward in two halves costs a CPU for each unit whose weights wait: 80 to 200 us for ResNet-50, MLPs
# and a transformer (docs/decisions/0028-stages-form-a-dag.md).
SPLIT_S: Final = 1e-4
# Rounds of p microbatches until a pipeline does the same in each.
FILLED: Final = 3


@final
@dataclass(frozen=True, eq=False)
class Estimate:
    """One way to run a model, with what it is expected to cost.

    `pipeline_s` of all microbatches; `sync_s`: replicas wait for each other. `floor_s`: no cut of
    this layout that fits makes a shorter step; 0 where nobody knows.
    """

    pipeline: Pipeline
    bounds: tuple[int, ...]
    cases: tuple[Case, ...]
    costs: tuple[StageCost, ...]
    pipeline_s: float
    sync_s: float
    floor_s: float = 0.0

    @property
    def layout(self) -> Layout:
        """All but the cuts."""
        return self.pipeline.layout

    @property
    def graph(self) -> ModelGraph:
        """Of one microbatch."""
        return self.pipeline.case.graph

    @cached_property
    def memories(self) -> tuple[StageMemory, ...]:
        """Of each stage at the worst moment of its device."""
        return _memories(self.pipeline, self.bounds, self.cases)

    @property
    def ways(self) -> tuple[int, ...]:
        """The place of each stage's case among those it could have."""
        pairs = zip(self.pipeline.ways, self.cases, strict=True)
        return tuple(options.index(case) for options, case in pairs)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The first device of each stage."""
        return tuple(map(self.pipeline.device, range(self.pipeline.stages)))

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step without the optimizer's."""
        return self.pipeline_s + self.sync_s

    @property
    def bubble(self) -> float:
        """Share of all device-seconds in which nobody computes."""
        pp, m = self.layout.axes.pp, self.layout.microbatches
        computed = m * sum(c.forward_s + c.backward_s for c in self.costs)
        return 1.0 - computed / self.step_s / pp if self.step_s else 0.0

    @property
    def peak_bytes(self) -> int:
        """Peak of the fullest device."""
        return max(self.held_bytes(rank) for rank in range(self.layout.axes.pp))

    def busy(self, stage: int) -> float:
        """Share of the step in which the stage's device computes."""
        here = self.layout.stages_on(self.layout.ranks[stage])
        computed = sum(self.costs[s].forward_s + self.costs[s].backward_s for s in here)
        return self.layout.microbatches * computed / self.step_s if self.step_s else 0.0

    @property
    def fits(self) -> bool:
        """Whether every device holds all its stages."""
        rooms = (self.pipeline.room.devices[rank].memory_bytes for rank in self.pipeline.ranks)
        held = map(self.held_bytes, range(self.layout.axes.pp))
        return all(size <= room for size, room in zip(held, rooms, strict=False))

    def held_bytes(self, rank: int) -> int:
        """All stages of a rank."""
        return sum(self.memories[stage].peak_bytes for stage in self.layout.stages_on(rank))


def estimate(
    pipeline: Pipeline, bounds: Sequence[int], ways: Sequence[int], floor_s: float = 0.0
) -> Estimate:
    """Simulate and account one cut; `ways[stage]` is the place of the stage's case."""
    edges = edges_of(pipeline.case.flows, bounds)
    cases = tuple(pipeline.ways[stage][way] for stage, way in enumerate(ways))
    flying = in_flight(pipeline.layout) if any(case.aside for case in cases) else (1,) * len(cases)
    runs = zip(cases, pairwise(bounds), flying, strict=True)
    costs = tuple(stage_cost(case, *run, held) for case, run, held in runs)
    return Estimate(
        pipeline,
        tuple(bounds),
        cases,
        costs,
        _step_s(pipeline, edges, costs),
        max(
            _sync_s(pipeline, *of) for of in zip(cases, pairwise(bounds), costs, pipeline.alike, strict=True)
        ),
        floor_s,
    )


def waits_s(found: Estimate) -> float:
    """Seconds of the step that are the links': what it would be shorter if they cost nothing."""
    edges, layout = edges_of(found.pipeline.case.flows, found.bounds), found.layout
    played = played_microbatches(layout)
    seconds = _seconds(found.pipeline, edges, found.costs, played)
    free = {cost: 0.0 if cost[-1] >= 0 else each for cost, each in seconds.items()}
    network = _network_of(layout, played, edges)
    return (network.step_s(seconds) - network.step_s(free)) * layout.microbatches / played


def lower_along(edges: Edges, schedule: Schedule) -> Schedule:
    """The compute-only schedule with the transfers of these edges."""
    return lower(schedule, frozenset(edges.forward), frozenset(edges.backward), frozenset(edges.step))


def played_microbatches(layout: Layout) -> int:
    """All of them, or enough for the others to follow from them."""
    if layout.actions:
        return layout.microbatches
    enough = max(PLAYED // layout.stages, (FILLED + 1) * layout.axes.pp)
    return layout.microbatches - max(0, layout.microbatches - enough) // layout.axes.pp * layout.axes.pp


def _step_s(pipeline: Pipeline, edges: Edges, costs: Sequence[StageCost]) -> float:
    """Seconds of all microbatches, of which the last ones may not have been played."""
    layout = pipeline.layout
    played = played_microbatches(layout)
    seconds = _seconds(pipeline, edges, costs, played)
    step_s = _network_of(layout, played, edges).step_s(seconds)
    if played == layout.microbatches:
        return step_s
    less = _network_of(layout, played - _window(layout, played), edges).step_s(seconds)
    return step_s + (layout.microbatches - played) * (step_s - less) / _window(layout, played)


def _window(layout: Layout, played: int) -> int:
    """How many of the microbatches that are played tell the rate: rounds of p, behind those that fill it."""
    pp = layout.axes.pp
    return max(min(played // 2, played - FILLED * pp) // pp, 1) * pp


Along = frozenset[Edge]


@lru_cache(maxsize=64)
def _network(how: How, forward: Along, backward: Along, step: Along) -> Network:
    """The events of one step; the same for all cuts that send along the same edges."""
    return Network.of(planned(*how), forward, backward, step)


def _network_of(layout: Layout, microbatches: int, edges: Edges) -> Network:
    how = layout.how(microbatches)
    return _network(how, frozenset(edges.forward), frozenset(edges.backward), frozenset(edges.step))


def _seconds(
    pipeline: Pipeline, edges: Edges, costs: Sequence[StageCost], microbatches: int
) -> dict[Cost, float]:
    """Of every kind of node."""
    cp, found = pipeline.layout.axes.cp, dict[Cost, float]()
    for stage, cost in enumerate(costs):
        found |= {(kind, stage, -1): cost.seconds(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}
    for kind, sizes in ((Kind.F, forward_bytes(edges, microbatches)), (Kind.B, edges.backward)):
        for (source, destination), size in _shares(sizes, cp).items():
            found[kind, source, destination] = pipeline.link(source, destination).seconds(size)
    return found


def play(pipeline: Pipeline, bounds: Sequence[int], costs: Sequence[StageCost]) -> Timeline:
    """The predicted Timeline, of the microbatches that are played."""
    layout, edges = pipeline.layout, edges_of(pipeline.case.flows, bounds)
    played = played_microbatches(layout)
    lowered = lower_along(edges, planned(*layout.how(played)))
    first_of = {rank: stage for stage, rank in reversed(tuple(enumerate(layout.ranks)))}
    return simulate(
        lowered,
        costs,
        _shares(forward_bytes(edges, played), layout.axes.cp),
        _shares(edges.backward, layout.axes.cp),
        lambda a, b: pipeline.link(first_of[a], first_of[b]),
    )


def _shares(sizes: Mapping[Edge, int], cp: int) -> Mapping[Edge, int]:
    """Each device of a group sends its part to its like; `divided.py` made sizes those of a rank."""
    return {edge: -(-size // cp) for edge, size in sizes.items()}


Run = tuple[int, int]


def _memories(pipeline: Pipeline, bounds: Sequence[int], cases: Sequence[Case]) -> tuple[StageMemory, ...]:
    """Of each stage as it runs, at the worst moment of its device."""
    layout, runs = pipeline.layout, tuple(pairwise(bounds))
    how = layout.how()
    if layout.chunks == 1 and not layout.actions:
        moments = moments_by_stage(*how[:4])
        return tuple(_account(*of) for of in zip(cases, runs, moments, strict=True))
    along = frozenset[Edge](), frozenset[Edge]()
    if layout.actions:
        edges = edges_of(pipeline.case.flows, bounds)
        along = frozenset({*edges.forward, *edges.step}), frozenset(edges.backward)
    worst: dict[int, Alive] = {}
    for rank in range(layout.axes.pp):
        own = layout.stages_on(rank)
        here = tuple(cases[s] for s in own), tuple(runs[s] for s in own)
        worst |= dict(zip(own, _worst(*here, how, along, rank), strict=True))
    return tuple(_account(*of, (worst[s],)) for s, of in enumerate(zip(cases, runs, strict=True)))


# Cuts that are compared differ in a stage or two: what the others hold is known. The last tables stay alive.
@lru_cache(maxsize=128)
def _account(case: Case, run: Run, moments: tuple[Alive, ...]) -> StageMemory:
    return account_run(case.ranges, case.graph, run, moments)


@lru_cache(maxsize=128)
def _worst(
    cases: tuple[Case, ...], runs: tuple[Run, ...], how: How, along: tuple[Along, Along], rank: int
) -> tuple[Alive, ...]:
    """When the stages of a device hold most together."""
    here = (case.ranges.only(*run) for case, run in zip(cases, runs, strict=True))
    parts = np.concatenate([columns(ranges, how[2]) for ranges in here])
    return _moments(how, along)[rank][int(np.argmax(_counts(how, along, rank) @ parts))]


@lru_cache(maxsize=64)
def _counts(how: How, along: tuple[Along, Along], rank: int) -> NDArray[np.float64]:
    """For each moment of a rank the parts that its stages hold, one stage after the other."""
    return np.array(
        [np.concatenate([counts(alive) for alive in moment]) for moment in _moments(how, along)[rank]]
    )


def _moments(how: How, along: tuple[Along, Along]) -> tuple[tuple[tuple[Alive, ...], ...], ...]:
    return moments_along(how, along) if how[-1] else moments_by_rank(*how[:4])


def _sync_s(pipeline: Pipeline, case: Case, run: tuple[int, int], cost: StageCost, alike: Cluster) -> float:
    layout = pipeline.layout
    if case.after_s is not None:
        return float(case.after_s[run])
    if layout.replicas * layout.axes.cp == 1:
        return 0.0
    ranges = case.ranges
    held = int(ranges.weights[run] - ranges.buffers[run]), int(ranges.gradients[run])
    return sync_s(held, (cost.forward_s, cost.backward_s), layout, alike)


def in_flight(layout: Layout) -> tuple[int, ...]:
    """Microbatches that each stage holds at most, as a chain."""
    found = moments_by_stage(*layout.how()[:4])
    return tuple(max(alive.in_flight for alive in moments) for moments in found)


def stage_cost(case: Case, first: int, end: int, flying: int = 1) -> StageCost:
    """Of the units first..end-1; of microbatches in flight the one at work never goes to the host."""
    seconds = case.seconds
    passes = seconds.forward, seconds.backward, seconds.weight
    split_s = SPLIT_S * int(np.count_nonzero(seconds.weight[first:end])) if case.base.device == "cpu" else 0.0
    forward_s, backward_s, weight_s = (sum(each[first:end].tolist()) for each in passes)
    if case.aside is not None and flying > 1:
        moved = int(case.ranges.away[first, end]), case.microbatches
        forward_s, backward_s = (case.aside.slowed_s(s, *moved) for s in (forward_s, backward_s))
    return StageCost(forward_s, backward_s, weight_s, split_s)


def expected(found: Estimate, batch_size: int, bounds: Sequence[int]) -> Expected:
    """The figures that a plan shows; `bounds` are those of the graph's units."""
    measured = all(c.source == "measured" for c in found.pipeline.case.base.units)
    return Expected(
        step_s=found.step_s,
        bubble=found.bubble,
        samples_per_s=batch_size / found.step_s if found.step_s else 0.0,
        stages=tuple(_figures(found, s, end - first) for s, (first, end) in enumerate(pairwise(bounds))),
        source="measured" if measured else "roofline",
        margins=tuple(dict.fromkeys(map(margin_text, found.devices))),
    )


def reasons(found: Estimate, graph: ModelGraph, bounds: Sequence[int]) -> tuple[str, str]:
    """What sets the pace, and which device is fullest; `bounds` are those of the graph's units."""
    return (
        pace_reason(graph, bounds, found.costs),
        fullest_reason(found.memories, found.devices, found.layout.ranks, found.layout.group),
    )


def check_enough(batch_size: int, microbatches: int) -> None:
    """Raise TooFewSamples when a microbatch would be empty."""
    if microbatches > batch_size:
        raise TooFewSamples(
            f"a batch of {batch_size} cannot be cut into {microbatches} microbatches",
            numbers=f"{microbatches - batch_size} would be empty",
            next_step=f"--microbatches {batch_size}, or a larger --batch",
        )


def forward_bytes(edges: Edges, microbatches: int) -> Mapping[Edge, int]:
    """Bytes per forward message. A step edge beside a forward one is spread over the step's messages."""
    merged = dict(edges.step)
    for edge, size in edges.forward.items():
        merged[edge] = size + edges.step.get(edge, 0) // microbatches
    return merged


def _figures(found: Estimate, stage: int, units: int) -> StageFigures:
    first, end = found.bounds[stage], found.bounds[stage + 1]
    memory, cost = found.memories[stage], found.costs[stage]
    held, device = found.held_bytes(found.layout.ranks[stage]), found.devices[stage]
    return StageFigures(
        units=units,
        parameters=sum(p.numel for p in found.graph.owned_parameters(first, end - 1)),
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        weights_bytes=memory.weights_bytes,
        gradients_bytes=memory.gradients_bytes,
        optimizer_bytes=memory.optimizer_bytes,
        activations_bytes=memory.activations_bytes,
        boundary_bytes=memory.boundary_bytes,
        busy=found.busy(stage),
        device_bytes=device.memory_bytes,
        p50_bytes=p50_bytes(held, device),
        p95_bytes=p95_bytes(held, device),
    )
