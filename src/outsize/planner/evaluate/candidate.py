"""Prices one candidate, a layout with its cut and policies: seconds by simulating its schedule, bytes by
counting what its actions hold.

Plans that a person has edited are priced as the search prices its own, by `Candidate.of`. Cuts are not moved.
Seconds are those of playing the step (played_step.py). Oracle:
tests/unit/planner/evaluate/test_evaluate_candidate.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, reduce
from itertools import chain, pairwise
from typing import Final, Protocol, Self, final

import numpy as np

from outsize.errors import TooFewSamples
from outsize.ir.cluster import Device
from outsize.ir.findings import (
    FullestDevice,
    HiddenExchanges,
    SlowestStage,
    UntrainedStages,
    WholeTensorUpdate,
)
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Expected, StageFigures
from outsize.ir.schedule import Kind, partners
from outsize.planner.costs.efficiency import default_of
from outsize.planner.costs.stage_edges import Along
from outsize.planner.evaluate.plan_findings import fullest_device, slowest_stage, untrained_stages
from outsize.planner.evaluate.played_step import PlayedStep, edges_along, played_step, stage_cost
from outsize.planner.layout.layout import Layout, ScheduleKey
from outsize.planner.memory.account import (
    InFlightState,
    StageMemory,
    account_stage,
    component_table,
)
from outsize.planner.memory.headroom import Load, in_use, peak_margin
from outsize.planner.memory.in_flight_states import states_along_edges, states_by_rank, states_by_stage
from outsize.planner.partition.stage_prices import Pipeline, PricedModel
from outsize.planner.simulation.simulate import StageCost
from outsize.schedules.builders import planned

# Autocast reads four bytes of a weight for two bytes of its copy.
MOVED_PER_COPY: Final = 3


class Timed(Protocol):
    """Is a step that can be played."""

    def seconds(self) -> float:
        """Returns the seconds of all microbatches."""
        ...


@final
@dataclass(frozen=True, eq=False)
class Candidate:
    """Is one way to split a model (a layout, a cut, a policy for each stage), which gathers its prices.

    `bounds` count the pieces between which the model is cut, `unit_bounds` its units. `recomputed` has the
    units that a stage recomputes where these are some of its own, numbered in the model.
    `pipeline_s` is for all microbatches, with the collectives of replicas; then for `after_s` the host's
    optimizer works, or for `update_s` that of the device with most gradients. No cut of this layout that fits
    makes a step shorter than `floor_s`, which is 0 where it is unknown. `fastest_step_s` is that of the cut
    that was given up for one between blocks; 0 where none was. `hosted` is the step where weights are on the
    host.

    The step is played when its seconds are asked for: a cut that does not fit never is.
    """

    pipeline: Pipeline
    bounds: tuple[int, ...]
    cases: tuple[PricedModel, ...]
    costs: tuple[StageCost, ...]
    after_s: float
    update_s: float
    floor_s: float = 0.0
    fastest_step_s: float = 0.0
    hosted: Timed | None = None
    recomputed: Mapping[int, frozenset[int]] = field(default_factory=dict[int, frozenset[int]])

    @classmethod
    def of(
        cls, pipeline: Pipeline, bounds: Sequence[int], choices: Sequence[int], floor_s: float = 0.0
    ) -> Self:
        """Returns the candidate of one cut; `choices[stage]` is the index of the stage's case."""
        cases = tuple(pipeline.options[stage][choice] for stage, choice in enumerate(choices))
        runs = tuple(pairwise(bounds))
        costs = tuple(stage_cost(case, *run) for case, run in zip(cases, runs, strict=True))
        after = (
            float(case.after_s[run])
            for case, run in zip(cases, runs, strict=True)
            if case.after_s is not None
        )
        update_s = _update_s(pipeline, cases, bounds)
        return cls(pipeline, tuple(bounds), cases, costs, max(after, default=0.0), update_s, floor_s)

    @property
    def layout(self) -> Layout:
        """Returns everything but the cuts."""
        return self.pipeline.layout

    @property
    def graph(self) -> ModelGraph:
        """Returns the graph of one microbatch."""
        return self.pipeline.case.graph

    @cached_property
    def memories(self) -> tuple[StageMemory, ...]:
        """Returns the memory of each stage at the worst moment of its device."""
        return _memories(self.pipeline, self.bounds, self.cases)

    @property
    def unit_bounds(self) -> tuple[int, ...]:
        """Returns the first unit of each stage, then their number, unit by unit."""
        return tuple(self.pipeline.ends[bound] for bound in self.bounds)

    @property
    def choices(self) -> tuple[int, ...]:
        """Returns the index of each stage's case among its options."""
        pairs = zip(self.pipeline.options, self.cases, strict=True)
        return tuple(options.index(case) for options, case in pairs)

    @property
    def devices(self) -> tuple[Device, ...]:
        """Returns the first device of each stage."""
        return tuple(map(self.pipeline.device, range(self.pipeline.stages)))

    @cached_property
    def step(self) -> PlayedStep:
        """Returns what is played of it."""
        return played_step(self.pipeline, self.bounds, self.cases, self.costs)

    @cached_property
    def pipeline_s(self) -> float:
        """Returns the seconds of all microbatches, played."""
        return (self.step if self.hosted is None else self.hosted).seconds()

    @property
    def step_s(self) -> float:
        """Returns the predicted seconds of a step, with the optimizer's on an accelerator; where weights are
        on the host, the optimizer's of that is played with the rest.
        """
        after_s = self.after_s if self.hosted is None else 0.0
        return self.pipeline_s + after_s + self.update_s + self.late_s

    @cached_property
    def late_s(self) -> float:
        """Returns by how much the way of the last slice of a sequence, through the stages and back to the
        first one, is longer than a mean one's; slices of several microbatches fill each other's bubbles.
        """
        later = [*zip(self.cases, pairwise(self.bounds), strict=True)][1:]
        return sum(case.late_s(run) for case, run in later)

    @cached_property
    def least_s(self) -> float:
        """Returns a lower bound of `step_s` that takes less time to play: stages are whole, and their
        collectives are left out. It is 0 where that would be no less to play.
        """
        if self.hosted is not None or len(self.step.costs) == len(self.costs):
            return 0.0
        whole_s = self.step.in_whole_stages(self.costs).seconds()
        return whole_s + self.after_s + self.update_s + self.late_s

    def least_beside(self, other: Candidate) -> float:
        """Returns a lower bound of `step_s` by what the step of `other`, a cut of the same layout, waits for;
        it plays nothing.
        """
        if self.hosted is not None or other.hosted is not None:
            return 0.0
        return self.step.least_along(other.step) + self.after_s + self.update_s + self.late_s

    @property
    def bubble(self) -> float:
        """Returns the share of all device-seconds in which no device computes."""
        pp, m = self.layout.axes.pp, self.layout.microbatches
        computed = m * sum(c.forward_s + c.backward_s for c in self.costs) - sum(self.hidden_s)
        return 1.0 - computed / self.step_s / pp if self.step_s else 0.0

    @cached_property
    def hidden_s(self) -> tuple[float, ...]:
        """Returns by how much the backwards of each stage are shorter in a step because forwards run beside
        them.
        """
        hidden = [0.0] * len(self.costs)
        for (first, second, kind), count in _pairs(self.layout.schedule_key()) if self.layout.pairs else ():
            cost = self.costs[second]
            hidden[second] += count * (cost.seconds(kind) - cost.beside_s(kind, self.costs[first]))
        return tuple(hidden)

    @property
    def peak_bytes(self) -> int:
        """Returns the peak of the fullest device."""
        return max(self.held_bytes(rank) for rank in range(self.layout.axes.pp))

    def busy(self, stage: int) -> float:
        """Returns the share of the step in which the stage's device computes."""
        own_stages = self.layout.stages_on(self.layout.ranks[stage])
        computed = sum(self.costs[s].forward_s + self.costs[s].backward_s for s in own_stages)
        hidden = sum(self.hidden_s[s] for s in own_stages)
        return (self.layout.microbatches * computed - hidden) / self.step_s if self.step_s else 0.0

    @property
    def fits(self) -> bool:
        """Returns whether every device holds all its stages."""
        room_devices = (self.pipeline.room.devices[rank].memory_bytes for rank in self.pipeline.ranks)
        held = map(self.held_bytes, range(self.layout.axes.pp))
        return all(size <= room for size, room in zip(held, room_devices, strict=False))

    @property
    def may_be_chosen(self) -> bool:
        """Returns whether it fits, and its stages have the weights that they need."""
        demand = self.pipeline.demand
        return (demand is None or demand.met_by(self.bounds, self.layout.ranks)) and self.fits

    def held_bytes(self, rank: int) -> int:
        """Returns the bytes of all stages of a rank."""
        return sum(self.memories[stage].peak_bytes for stage in self.layout.stages_on(rank))


Run = tuple[int, int]


def _memories(
    pipeline: Pipeline, bounds: Sequence[int], cases: Sequence[PricedModel]
) -> tuple[StageMemory, ...]:
    """Returns the memory of each stage in its case, at the worst moment of its device."""
    layout, runs = pipeline.layout, tuple(pairwise(bounds))
    key = layout.schedule_key()
    if layout.chunks == 1 and not layout.actions:
        states = states_by_stage(*key.of_single_stages)
        return tuple(_account(*of) for of in zip(cases, runs, states, strict=True))
    along = edges_along(pipeline.case, tuple(bounds)).along if layout.actions else None
    worst_states: dict[int, InFlightState] = {}
    for rank in range(layout.axes.pp):
        own = layout.stages_on(rank)
        cases_and_runs = tuple(cases[s] for s in own), tuple(runs[s] for s in own)
        worst_states |= dict(zip(own, _worst_states(*cases_and_runs, key, along, rank), strict=True))
    return tuple(_account(*of, (worst_states[s],)) for s, of in enumerate(zip(cases, runs, strict=True)))


# Cuts that are compared differ in a stage or two: the memory of the others is cached. The last tables stay
# alive.
@lru_cache(maxsize=128)
def _account(case: PricedModel, run: Run, moments: tuple[InFlightState, ...]) -> StageMemory:
    return account_stage(case.ranges, case.graph, run, moments)


@lru_cache(maxsize=128)
def _worst_states(
    cases: tuple[PricedModel, ...],
    runs: tuple[Run, ...],
    schedule_key: ScheduleKey,
    along: Along | None,
    rank: int,
) -> tuple[InFlightState, ...]:
    """Returns the joint state in which the stages of a device hold most together."""
    here = (case.ranges.of_run(*run) for case, run in zip(cases, runs, strict=True))
    parts = np.array([component_table(ranges, schedule_key.microbatches) for ranges in here])
    by_rank = (
        states_by_rank(*schedule_key.without_actions)
        if along is None
        else states_along_edges(schedule_key, along)
    )
    return by_rank[rank].at(int(np.argmax(by_rank[rank].bytes_at(parts))))


@lru_cache(maxsize=16)
def _pairs(schedule_key: ScheduleKey) -> tuple[tuple[tuple[int, int, Kind], int], ...]:
    """Returns how often a forward of the first stage runs together with a backward of the second one."""
    found = chain.from_iterable(partners(row).items() for row in planned(*schedule_key).actions)
    return tuple(Counter((first.stage, second.stage, second.kind) for first, second in found).items())


def _update_s(pipeline: Pipeline, cases: Sequence[PricedModel], bounds: Sequence[int]) -> float:
    """Returns the seconds of the slowest device's optimizer, with what goes to owners of whole tensors and
    back, and of casting its weights for the next step.

    All wait for the gradients' norm or for overflows, so none begins earlier.
    """
    spent_s = dict.fromkeys(pipeline.ranks, 0.0)
    for stage, (case, run) in enumerate(zip(cases, pairwise(bounds), strict=True)):
        if case.after_s is None and case.update is not None:
            update, device, layout = case.update, pipeline.device(stage), pipeline.layout
            size = update.moved_per_gradient * float(case.ranges.gradients[run]) / layout.updaters
            size += MOVED_PER_COPY * float(case.ranges.casts[run])
            spent_s[pipeline.ranks[stage]] += (
                default_of(device).update_s(size, device)
                + update.products_s(run, layout, device)
                + pipeline.collectives[stage].owners_s(update.exchanged_bytes(run, layout))
            )
    return max(spent_s.values())


def whole_tensor_updates(candidate: Candidate, optimizer: str) -> Iterator[WholeTensorUpdate]:
    """Yields what products and exchanges of whole tensors the optimizer has; nothing where it has none."""
    layout, works = candidate.layout, dict[int, tuple[float, int]]()
    for stage, (case, run) in enumerate(zip(candidate.cases, pairwise(candidate.bounds), strict=True)):
        if case.after_s is None and case.update is not None:
            flops, size = works.get(layout.ranks[stage], (0.0, 0))
            more = case.update.product_flops(run, layout), case.update.exchanged_bytes(run, layout)
            works[layout.ranks[stage]] = flops + more[0], size + more[1]
    flops, size = max(works.values(), default=(0.0, 0))
    if flops or size:
        yield WholeTensorUpdate(
            optimizer=optimizer, update_s=candidate.update_s, flops=flops, exchanged_bytes=size
        )


def expected(candidate: Candidate, batch_size: int, bounds: Sequence[int]) -> Expected:
    """Returns the figures that a plan shows; `bounds` are those of the graph's units."""
    measured = all(c.source == "measured" for c in candidate.pipeline.case.base.units)
    ranks, units = candidate.layout.ranks, [end - first for first, end in pairwise(bounds)]
    loads = {rank: _load(candidate, rank) for rank in set(ranks)}
    stages = (_figures(candidate, s, units[s], loads[rank]) for s, rank in enumerate(ranks))
    return Expected(
        step_s=candidate.step_s,
        bubble=candidate.bubble,
        samples_per_s=batch_size / candidate.step_s if candidate.step_s else 0.0,
        update_s=candidate.update_s,
        stages=tuple(stages),
        source="measured" if measured else "roofline",
        margins=tuple(dict.fromkeys(map(peak_margin, candidate.devices))),
    )


def reasons(
    candidate: Candidate, graph: ModelGraph, bounds: Sequence[int]
) -> tuple[SlowestStage | FullestDevice | UntrainedStages | HiddenExchanges, ...]:
    """Returns the slowest stage, the fullest device, stages that train nothing, and what hides; `bounds` are
    those of the graph's units.
    """
    return (
        slowest_stage(graph, bounds, candidate.costs),
        fullest_device(candidate.memories, candidate.devices, candidate.layout.ranks, candidate.layout.group),
        *untrained_stages(graph, bounds),
        *_hidden_exchanges(candidate),
    )


def _hidden_exchanges(candidate: Candidate) -> Iterator[HiddenExchanges]:
    """Yields what hides of the exchanges of the device that exchanges most, where anything does."""
    layout = candidate.layout
    exchanged = dict.fromkeys(layout.ranks, 0.0), dict.fromkeys(layout.ranks, 0.0)
    for rank, cost, hidden_s in zip(layout.ranks, candidate.costs, candidate.hidden_s, strict=True):
        exchanged[0][rank] += layout.microbatches * (cost.forward_wait_s + cost.backward_wait_s)
        exchanged[1][rank] += hidden_s
    most = max(layout.ranks, key=lambda rank: (exchanged[0][rank], -rank))
    if exchanged[1][most] > 0:
        yield HiddenExchanges(
            schedule=layout.schedule, exchanged_s=exchanged[0][most], hidden_s=exchanged[1][most]
        )


def check_enough(batch_size: int, microbatches: int) -> None:
    """Raises TooFewSamples when a microbatch would be empty."""
    if microbatches > batch_size:
        raise TooFewSamples(
            f"a batch of {batch_size} cannot be cut into {microbatches} microbatches",
            numbers=f"{microbatches - batch_size} would be empty",
            next_step=f"--microbatches {batch_size}, or a larger --batch",
        )


def _figures(candidate: Candidate, stage: int, units: int, load: Load) -> StageFigures:
    first, end = candidate.bounds[stage], candidate.bounds[stage + 1]
    memory, cost = candidate.memories[stage], candidate.costs[stage]
    rank, device = candidate.layout.ranks[stage], candidate.devices[stage]
    used = in_use(candidate.held_bytes(rank), device, load)
    return StageFigures(
        units=units,
        parameters=sum(p.count for p in candidate.graph.owned_parameters(first, end - 1)),
        forward_s=cost.forward_s,
        backward_s=cost.backward_s,
        weights_bytes=memory.weights_bytes,
        gradients_bytes=memory.gradients_bytes,
        optimizer_bytes=memory.optimizer_bytes,
        activations_bytes=memory.activations_bytes,
        boundary_bytes=memory.boundary_bytes,
        busy=candidate.busy(stage),
        device_bytes=device.memory_bytes,
        p50_bytes=used.p50_bytes,
        p95_bytes=used.p95_bytes,
        context_bytes=used.context_bytes,
        kept_bytes=used.kept_bytes,
    )


def _load(candidate: Candidate, rank: int) -> Load:
    """Returns the load of all stages of a rank; what tp and cp divide are taken to be the largest tensors."""
    layout, bounds = candidate.layout, candidate.bounds
    shards = layout.microbatch_ranks
    loads = (Load.of(candidate.graph, bounds[s], bounds[s + 1], shards) for s in layout.stages_on(rank))
    return reduce(Load.with_stage, loads)
