"""Problem: how long is the step of one cut, and what does each rank do when?

The row that runs is played (simulation/critical_path.py), with the actions that the engine's lowering passes
write into it:

    dp_shard           stages run in blocks (schedules/refine.py), with UNSHARD and REDUCE_GRAD of each block
                       (schedules/sharded.py): for each use where weights are sharded, once a step where they
                       are resident. A rank's collectives have one queue; FSDP2 lets one REDUCE_GRAD run
                       beside the next block, and on a CPU the rank waits for each
    offload            activations of a microbatch leave and come back with OFFLOAD_F and FETCH_B
                       (schedules/offload.py), beside compute on an accelerator and between it on a CPU
    messages           the core of a CPU copies what it sends, as a part of the action that made it
    dp_replicate, cp   a stage's gradients leave in buckets within its last backward, the last units' first
                       (train/ranks/gradient_allreduce.py); nothing but the step's end waits for them. Other
                       systems sum more of them together, of blocks as well (`ModelGraph.bucket_bytes`)
    beside them        compute is slower while a collective runs (`Efficiency.crowded`): by those of one block
                       in a pass of a block, by a share of those that run once a step in each microbatch
    copies             FSDP2 copies gathered weights out of its buffer and gradients into it, on the stream of
                       compute (split_with_sizes_copy, chunk_cat), for each use or once a step; gradients of
                       replicas are copied into buckets and out of them

Of a step of very many microbatches only a part is played: once the pipeline is full it repeats itself (a
max-plus system is periodic), so the remaining time follows from the rate of the played part. Where links set
the pace the period need not divide p: hence the rate is that of half of the played microbatches. With links
of up to ten forwards that is within 0.2 % of a full simulation for up to 16 stages, within 1.5 % for 64 (the
rate of the last p microbatches is up to 6 % off).

The step of a cut beside is at least as long as the path that was the longest one takes there: the network is
the same, with other seconds (`least_along`). Cuts that this shows to be longer are not played.

Deviations: buckets end with a unit, not with a parameter; parameters of one dtype; pieces of models of very
many units count with the block in which they begin; what happens once a step is spread over its microbatches.
Complexity: O(actions that are played). Oracles: tests/unit/planner/evaluate/test_evaluate_candidate.py plays
all microbatches, test_played_step.py has closed forms, tests/dist/test_played_actions.py the actions of real
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise, takewhile
from typing import Final, final

import numpy as np

from outsize.ir.cluster import Link
from outsize.ir.hardware.devices import Device, host_link
from outsize.ir.schedule import COMPUTE, Action, Kind, Schedule
from outsize.ir.timeline import Span, Timeline
from outsize.planner.costs.efficiency import CPU, default_of
from outsize.planner.costs.parallel_times import WeightCollectives
from outsize.planner.costs.stage_edges import Along, Edge, Edges, Flow, edges_of
from outsize.planner.layout.layout import Layout, ScheduleKey
from outsize.planner.memory.range_tables import Bytes
from outsize.planner.partition.stage_prices import Pipeline, PricedModel
from outsize.planner.simulation.critical_path import (
    COLLECTIVES,
    LAST,
    NOBODY,
    Cost,
    MoveWaits,
    Network,
    behind,
)
from outsize.planner.simulation.simulate import StageCost
from outsize.schedules.builders import planned
from outsize.schedules.message import PRODUCERS
from outsize.schedules.offload import with_activation_copies
from outsize.schedules.refine import divided, pieces_of_stages
from outsize.schedules.sharded import BUCKET_BYTES, with_gathers

# At most this many forwards of one step are played, over all stages; of blocks with collectives a part.
PLAYED: Final = 4096
BLOCKS_PLAYED: Final = 1024
# After this many rounds of p microbatches a pipeline repeats itself.
FILLED: Final = 3
_BACKWARD: Final = frozenset({Kind.B, Kind.I, Kind.W})
Run = tuple[int, int]
Bucket = tuple[float, float]
"""The share of the last backward after which a bucket is complete, and the seconds of its all-reduce."""


def is_message(cost: Cost) -> bool:
    """Returns whether a cost is that of a transfer between stages."""
    return cost[-1] >= 0


def is_collective(cost: Cost) -> bool:
    """Returns whether a cost is that of a collective of weights or gradients."""
    return cost[0] in COLLECTIVES


def _nothing(_: Cost) -> bool:
    return False


@final
@dataclass(frozen=True, eq=False)
class Longest:
    """Is what a step that was played in full waits for: how often each cost is on its longest `path`, and how
    often `before` the last backward of the stage whose gradients are summed last (`backward`), if any are.
    """

    path: Mapping[Cost, int]
    backward: Cost | None = None
    before: Mapping[Cost, int] = field(default_factory=dict[Cost, int])


@final
@dataclass(frozen=True)
class _Moves:
    """Says what moves besides messages: weights that are gathered, (owner, user) of the parts, `once` a step
    or for each use; and activations of the parts in `offloads`. `overlaps`: beside compute.
    """

    uses: frozenset[Edge]
    once: bool
    offloads: frozenset[int]
    overlaps: bool

    @property
    def any(self) -> bool:
        """Returns whether anything moves."""
        return bool(self.uses or self.offloads)

    def added(self, schedule: Schedule) -> Schedule:
        """Returns the compute-only schedule with the actions of these moves."""
        gathered = with_gathers(schedule, self.uses, once=self.once) if self.uses else schedule
        return with_activation_copies(gathered, self.offloads) if self.offloads else gathered

    @property
    def waits(self) -> MoveWaits:
        """Returns what waits for them; of earlier REDUCE_GRADs FSDP2 lets one run."""
        needs: dict[int, set[int]] = {}
        for owner, user in self.uses:
            needs.setdefault(user, set()).add(owner)
        return MoveWaits(needs, 1 if self.overlaps else 0, self.overlaps)


@final
@dataclass(frozen=True, eq=False)
class PlayedStep:
    """Describes what is played of a cut.

    Stages have `counts[stage]` parts; part p belongs to `stage_of[p]` and costs `costs[p]` per microbatch.
    `buckets[stage]` are those of its gradients, where weights are whole on all replicas.
    """

    pipeline: Pipeline
    counts: tuple[int, ...]
    stage_of: tuple[int, ...]
    edges: Edges
    costs: tuple[StageCost, ...]
    moves: _Moves
    move_s: Mapping[Cost, float]
    buckets: tuple[Sequence[Bucket], ...]

    @property
    def layout(self) -> Layout:
        """Returns the layout of the cut."""
        return self.pipeline.layout

    @property
    def simulated(self) -> int:
        """Returns how many microbatches are played: all of them, or enough to extrapolate."""
        parts = len(self.costs) if self.moves.any else None
        return simulated_microbatches(self.layout, parts)

    def seconds(self, free: Callable[[Cost], bool] = _nothing) -> float:
        """Returns the seconds of all microbatches; what is `free` costs nothing."""
        count, simulated = self.layout.microbatches, self.simulated
        step_s = self._played_s(simulated, free)
        if simulated == count:
            return step_s
        window = _window(self.layout, simulated)
        shorter_s = self._played_s(simulated - window, free)
        return step_s + (count - simulated) * (step_s - shorter_s) / window

    def in_whole_stages(self, costs: Sequence[StageCost]) -> PlayedStep:
        """Returns a step that is no longer and has fewer actions: each stage is one part, with these costs,
        nothing moves, and a stage waits for another one only where its first part waits for the last one.
        """
        ends = tuple(accumulate(self.counts))
        first = {end - count: stage for stage, (end, count) in enumerate(zip(ends, self.counts, strict=True))}
        last = {end - 1: stage for stage, end in enumerate(ends)}
        edges = Edges(
            _renamed(self.edges.forward, last, first), _renamed(self.edges.backward, first, last), {}
        )
        stages, moves = len(self.counts), _Moves(frozenset(), False, frozenset(), self.moves.overlaps)
        numbers, buckets = tuple(range(stages)), ((),) * stages
        return PlayedStep(self.pipeline, (1,) * stages, numbers, edges, tuple(costs), moves, {}, buckets)

    @cached_property
    def longest(self) -> Longest | None:
        """Returns what the step waits for; None where only a part of it is played."""
        if self.simulated != self.layout.microbatches:
            return None
        network = self._network(self.simulated)
        ends = network.ends_s(self._seconds(self.simulated, _nothing))
        path = network.path(ends, max(range(len(ends)), key=ends.__getitem__))
        reductions = self._reductions(self.simulated, network, ends, _nothing)
        last = max(reductions, key=lambda span: span.end_s, default=None)
        if last is None:
            return Longest(path)
        stage = Action.parse(last.action).stage
        index, kind = _last_backwards(self.layout.schedule_key())[stage]
        before = network.path(ends, int(network.place[index]))
        before[kind, stage, NOBODY] -= kind is Kind.B
        return Longest(path, (kind, stage, NOBODY), before)

    def least_along(self, other: PlayedStep) -> float:
        """Returns a lower bound of the seconds: what the longest path of `other` takes here; 0 where that is
        not known to be a path.
        """
        if not self._waits_as(other) or (longest := other.longest) is None:
            return 0.0
        seconds = self._seconds(self.simulated, _nothing)
        least_s = sum(count * seconds[cost] for cost, count in longest.path.items())
        if longest.backward is None:
            return least_s
        start_s = sum(count * seconds[cost] for cost, count in longest.before.items())
        kind, stage, _ = longest.backward
        lasting_s, end_s = seconds[longest.backward] if kind is Kind.B else 0.0, 0.0
        for fraction, bucket_s in self.buckets[stage]:
            end_s = max(end_s, start_s + fraction * lasting_s) + bucket_s
        return max(least_s, end_s)

    def _waits_as(self, other: PlayedStep) -> bool:
        """Returns whether the same waits for the same."""
        same = self.layout == other.layout and self.counts == other.counts and self.moves == other.moves
        return same and self.edges.along == other.edges.along

    def exposed_s(self, free: Callable[[Cost], bool]) -> float:
        """Returns the seconds by which the step would be shorter if these costs were nothing."""
        return self.seconds() - self.seconds(free)

    def timeline(self) -> Timeline:
        """Returns the predicted Timeline of the microbatches that are played: spans in lanes 'compute',
        'send' (of the sending rank) and 'load' (collectives and copies).
        """
        network, seconds = self._network(self.simulated), self._seconds(self.simulated, _nothing)
        ends = network.ends_s(seconds)
        reduced = self._reductions(self.simulated, network, ends, _nothing)
        computed = network.spans(seconds) if self.moves.overlaps else self._apart(network.spans(seconds))
        spans = sorted(chain(computed, reduced), key=lambda span: (span.start_s, span.end_s, span.rank))
        return Timeline(source="predicted", ranks=self.layout.axes.pp, spans=tuple(spans))

    def schedule(self, microbatches: int) -> Schedule:
        """Returns the rows that are played, without sends and receives."""
        return _moving(self.layout.schedule_key(microbatches), self.counts, self.moves)

    def _played_s(self, microbatches: int, free: Callable[[Cost], bool]) -> float:
        network = self._network(microbatches)
        ends = network.ends_s(self._seconds(microbatches, free))
        reduced = self._reductions(microbatches, network, ends, free)
        return max(max(ends), max((span.end_s for span in reduced), default=0.0))

    def _network(self, microbatches: int) -> Network:
        key = self.layout.schedule_key(microbatches)
        return _network(key, self.edges.along, self.counts, self.moves)

    def _seconds(self, microbatches: int, free: Callable[[Cost], bool]) -> Mapping[Cost, float]:
        """Returns the seconds of every kind of node, as it is played."""
        seconds = {c: 0.0 if free(c) else cost_s for c, cost_s in self._own_seconds(microbatches).items()}
        return seconds if self.moves.overlaps else self._with_copies(seconds)

    def _own_seconds(self, microbatches: int) -> dict[Cost, float]:
        """Returns the seconds of every kind of node by itself."""
        seconds = dict(self.move_s)
        for part, cost in enumerate(self.costs):
            seconds |= {(kind, part, -1): cost.seconds(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}
        for (kind, part, _), first in self._network(microbatches).paired.items():
            seconds[kind, part, behind(first)] = self.costs[part].beside_s(kind, self.costs[first])
        return seconds | self.edges.message_s(microbatches, self._link, self.layout.axes.token_parts)

    def _link(self, source: int, destination: int) -> Link:
        """Returns the link between two parts."""
        return self.pipeline.link(self.stage_of[source], self.stage_of[destination])

    def _apart(self, spans: Iterable[Span]) -> Iterator[Span]:
        """Yields the spans of compute without the copies of messages, and those of the messages with them."""
        seconds = self._own_seconds(self.simulated)
        for span in spans:
            action = Action.parse(span.action)
            if span.lane == "compute":
                own_s = seconds[action.kind, action.stage, -1]
                yield span.model_copy(update={"end_s": min(span.end_s, span.start_s + own_s)})
            elif span.lane == "send":
                kind = Kind.F if action.kind is Kind.SEND_F else Kind.B
                copy_s = seconds[kind, action.stage, action.peer]
                yield span.model_copy(update={"start_s": span.end_s - copy_s})
            else:
                yield span

    def _with_copies(self, seconds: Mapping[Cost, float]) -> dict[Cost, float]:
        """Returns the seconds where messages to other ranks are copied by the core that has made them."""
        ranks, copied = self.layout.ranks, dict(seconds)
        paired = [cost for cost in seconds if cost[-1] <= behind(0)]
        for cost in filter(is_message, seconds):
            kind, source, destination = cost
            if ranks[self.stage_of[source]] != ranks[self.stage_of[destination]]:
                for maker in PRODUCERS[kind]:
                    copied[maker, source, -1] += seconds[cost]
                for maker in (
                    other for other in paired if other[:2] in [(k, source) for k in PRODUCERS[kind]]
                ):
                    copied[maker] += seconds[cost]
                copied[cost] = 0.0
        return copied

    def _reductions(
        self, microbatches: int, network: Network, ends: Sequence[float], free: Callable[[Cost], bool]
    ) -> Iterator[Span]:
        """Yields the all-reduces of buckets, one after the other on each rank, later stages first."""
        if not any(self.buckets) or free is is_collective:
            return
        queue_s = dict.fromkeys(self.layout.ranks, 0.0)
        for stage, (index, kind) in _last_backwards(self.layout.schedule_key(microbatches)).items():
            node, rank = network.place[index], self.layout.ranks[stage]
            end_s = ends[node]
            start_s = max(ends[other] for other in network.waits[:, node]) if kind is Kind.B else end_s
            for fraction, bucket_s in self.buckets[stage]:
                begin_s = max(queue_s[rank], start_s + fraction * (end_s - start_s))
                queue_s[rank] = begin_s + bucket_s
                action = str(Action(stage, Kind.REDUCE_GRAD))
                yield Span(rank=rank, lane="load", action=action, start_s=begin_s, end_s=queue_s[rank])


def played_step(
    pipeline: Pipeline, bounds: Sequence[int], cases: Sequence[PricedModel], costs: Sequence[StageCost]
) -> PlayedStep:
    """Returns what is played of a cut whose stages have these cases and costs."""
    case, layout, stages = cases[0], pipeline.layout, tuple(range(len(cases)))
    shards = layout.shards > 1
    least_bytes = _least_bucket_bytes(case, layout) if layout.weight_policy.gathers_once else 0
    counts, cut = _blocks(case, tuple(bounds), least_bytes) if shards else ((1,) * len(stages), tuple(bounds))
    stage_of = tuple(stage for stage in stages for _ in range(counts[stage]))
    parts = [(cases[stage], run) for stage, run in zip(stage_of, pairwise(cut), strict=True)]
    uses, seconds = frozenset[Edge](), dict[Cost, float]()
    buckets: tuple[Sequence[Bucket], ...] = ((),) * len(stages)
    if shards:
        gathered = _gathered(case, layout)
        uses = frozenset(_uses(case, gathered, cut, [layout.ranks[stage] for stage in stage_of]))
        for part, stage in enumerate(stage_of):
            seconds |= _collective_seconds(
                part, _weights_and_gradients_bytes(*parts[part], layout), pipeline.collectives[stage]
            )
        places = zip(stage_of, parts, strict=True)
        costs = tuple(_beside_gathers(pipeline, (s, p), *own, seconds) for p, (s, own) in enumerate(places))
    elif not layout.hosted and layout.axes.weight_holders > 1:
        least_bytes = _least_bucket_bytes(case, layout) or BUCKET_BYTES
        buckets = tuple(
            _buckets(*own, c, least_bytes) for own, c in zip(parts, pipeline.collectives, strict=True)
        )
        held = [_weights_and_gradients_bytes(*own, layout) for own in parts]
        costs = tuple(_beside_buckets(pipeline, *of) for of in zip(stages, costs, buckets, held, strict=True))
    for part, (own, run) in enumerate(parts):
        if own.copies is not None:
            copy_s = own.copies.seconds(int(own.ranges.on_host[run]))
            seconds |= {(Kind.OFFLOAD_F, part, -1): copy_s, (Kind.FETCH_B, part, -1): copy_s}
    offloads = frozenset(part for part, (own, _) in enumerate(parts) if own.copies is not None)
    moves = _Moves(uses, layout.weight_policy.gathers_once, offloads, _overlaps(pipeline.device(0)))
    edges = edges_along(case, cut)
    return PlayedStep(pipeline, counts, stage_of, edges, tuple(costs), moves, seconds, buckets)


def _renamed(
    sizes: Mapping[Edge, int], sources: Mapping[int, int], destinations: Mapping[int, int]
) -> dict[Edge, int]:
    """Returns the edges between these parts, as edges between their stages."""
    return {
        (sources[source], destinations[destination]): size
        for (source, destination), size in sizes.items()
        if source in sources and destination in destinations
    }


def _overlaps(device: Device) -> bool:
    """Returns whether copies and sums of gradients run beside what the device computes."""
    return host_link(device) is not None


# Cuts that are compared differ in a stage or two. The last tables stay alive.
@lru_cache(maxsize=128)
def stage_cost(case: PricedModel, first: int, end: int) -> StageCost:
    """Returns the costs of the units first..end-1. Gradients of weights that an earlier stage owns are sent
    to it, so they are computed with those of the inputs. What ranks exchange is a part of them where it may
    hide.
    """
    seconds = case.seconds
    passes = seconds.forward, seconds.backward, seconds.backward_weight
    split_units = seconds.backward_weight > 0 if case.split_units is None else case.split_units
    split_s = CPU.split_s * int(np.sum(split_units[first:end])) if case.base.device == "cpu" else 0.0
    forward_s, backward_s, weight_s = (sum(times[first:end].tolist()) for times in passes)
    sent_s = sum(seconds.backward_weight[unit] for unit in _sent_gradients(case.flows, first, end))
    waits = seconds.waits if case.hides else None
    waits_s = (float(np.sum(each[first:end])) for each in waits or ())
    return StageCost(forward_s, backward_s, max(0.0, weight_s - float(sent_s)), split_s, *waits_s)


def _sent_gradients(flows: Sequence[Flow], first: int, end: int) -> set[int]:
    """Returns the units of a stage that use a trained parameter of an earlier one; parameters come last among
    the flows.
    """
    shared = takewhile(lambda flow: flow.step, reversed(flows))
    tied = (flow.consumers for flow in shared if flow.gradient and flow.producer < first)
    return {unit for consumers in tied for unit in consumers if first <= unit < end}


def simulated_microbatches(layout: Layout, parts: int | None = None) -> int:
    """Returns how many microbatches are played: all of them, or enough to extrapolate; `parts`: blocks with
    collectives.
    """
    if layout.actions:
        return layout.microbatches
    enough, each = PLAYED // layout.stages if parts is None else BLOCKS_PLAYED // parts, layout.round
    enough = max(enough, (FILLED + 1) * each)
    return layout.microbatches - max(0, layout.microbatches - enough) // each * each


def _window(layout: Layout, simulated: int) -> int:
    """Returns how many of the played microbatches give the rate: rounds after those that fill a pipeline."""
    each = layout.round
    return max(min(simulated // 2, simulated - FILLED * each) // each, 1) * each


# Options of stages are tried with the same cut.
@lru_cache(maxsize=128)
def edges_along(case: PricedModel, bounds: tuple[int, ...]) -> Edges:
    """Returns the edges between the stages of a cut."""
    return edges_of(case.flows, bounds)


@lru_cache(maxsize=128)
def _blocks(
    case: PricedModel, bounds: tuple[int, ...], least_bytes: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the number of blocks of each stage, and the first unit of each block, then all units. A block
    whose gradients have fewer bytes than the least is one with those before it.
    """
    pieces = pieces_of_stages(case.graph, (range(first, end) for first, end in pairwise(bounds)))
    stages = [
        _joined(case, [piece[0] for piece in stage], end, least_bytes)
        for stage, end in zip(pieces, bounds[1:], strict=True)
    ]
    return tuple(map(len, stages)), (*chain.from_iterable(stages), bounds[-1])


def _joined(case: PricedModel, firsts: Sequence[int], end: int, least_bytes: int) -> list[int]:
    """Returns the first units of blocks of at least so many bytes of gradients, filled from the last unit."""
    found = list[int]()
    for first in reversed(firsts):
        if first == firsts[0] or int(case.ranges.gradients[first, end]) >= least_bytes:
            found.append(first)
            end = first
    return found[::-1]


def _least_bucket_bytes(case: PricedModel, layout: Layout) -> int:
    """Returns the bytes of gradients that replicas sum together at least; 0 where outsize says."""
    of_all, of_rank = case.graph.bucket_bytes
    return max(of_all, of_rank * layout.axes.weight_holders)


@lru_cache(maxsize=64)
def _network(schedule_key: ScheduleKey, along: Along, counts: tuple[int, ...], moves: _Moves) -> Network:
    """Returns the events of one step; the same for all cuts that send along the same edges."""
    return Network.of(_moving(schedule_key, counts, moves), *along, moves.waits if moves.any else None)


def _moving(schedule_key: ScheduleKey, counts: tuple[int, ...], moves: _Moves) -> Schedule:
    schedule = planned(*schedule_key)
    return moves.added(schedule if max(counts) == 1 else divided(schedule, counts))


@lru_cache(maxsize=64)
def _last_backwards(schedule_key: ScheduleKey) -> dict[int, tuple[int, Kind]]:
    """Returns, for each stage, its last backward and its place among all compute actions, row after row;
    later stages first.
    """
    actions = (a for row in planned(*schedule_key).actions for a in row if a.kind in COMPUTE)
    last = {a.stage: (at, a.kind) for at, a in enumerate(actions) if a.kind in _BACKWARD}
    return dict(sorted(last.items(), reverse=True))


Held = tuple[int, int]
"""Bytes of the whole weights and gradients of a part."""


def _weights_and_gradients_bytes(case: PricedModel, run: Run, layout: Layout) -> Held:
    """Returns the bytes of a part; the tables of sharded weights hold a share of them."""
    whole = layout.weight_parts
    return whole * int(_gathered(case, layout)[run]), whole * int(case.ranges.gradients[run])


def _gathered(case: PricedModel, layout: Layout) -> Bytes:
    """Returns the bytes of the weights that replicas gather: frozen ones stay whole where those of a step are
    gathered once, since no step changes them. A plan without a step does not know which ones are.
    """
    ranges = case.ranges
    once = layout.weight_policy.gathers_once and ranges.trained.any()
    return ranges.trained if once else ranges.weights - ranges.buffers


def _collective_seconds(part: int, held: Held, collectives: WeightCollectives) -> dict[Cost, float]:
    """Returns the seconds of the collectives of a part."""
    weights, gradients = held
    return {
        (Kind.UNSHARD, part, -1): collectives.gather_s(weights),
        (Kind.REDUCE_GRAD, part, -1): collectives.reduce_s(gradients, last=False),
        (Kind.REDUCE_GRAD, part, LAST): collectives.reduce_s(gradients, last=True),
    }


def _beside_buckets(
    pipeline: Pipeline, stage: int, cost: StageCost, buckets: Sequence[Bucket], held: Held
) -> StageCost:
    """Returns the cost of a stage whose last backward runs beside those of its gradients' collectives that
    begin before it ends, and copies gradients into buckets and out of them, in the mean over microbatches.
    """
    device, within_s, free_s = pipeline.device(stage), 0.0, 0.0
    for fraction, bucket_s in buckets:
        begin_s = max(free_s, fraction * cost.backward_s)
        free_s = begin_s + bucket_s
        within_s += max(0.0, min(free_s, cost.backward_s) - begin_s)
    slower_s = _slower_s(pipeline, stage, cost.backward_s, within_s)
    slower_s += 2 * default_of(device).copied_s(held[1], device)
    return replace(cost, backward_s=cost.backward_s + slower_s / pipeline.layout.microbatches)


def _beside_gathers(
    pipeline: Pipeline, place: tuple[int, int], case: PricedModel, run: Run, seconds: Mapping[Cost, float]
) -> StageCost:
    """Returns the cost of a part of a stage, `place`, beside the collectives of its like, with copies of its
    weights and gradients, for each use or once a step. What a CPU waits for, its sums, is not beside it.
    """
    (stage, part), cost = place, stage_cost(case, *run)
    once = pipeline.layout.weight_policy.gathers_once
    weights, gradients = _weights_and_gradients_bytes(case, run, pipeline.layout)
    fraction = 1 / pipeline.layout.microbatches
    uses, device = fraction if once else 1.0, pipeline.device(stage)
    gather_s, reduce_s = (seconds[kind, part, -1] * uses for kind in (Kind.UNSHARD, Kind.REDUCE_GRAD))
    summing_s = (seconds[Kind.REDUCE_GRAD, part, LAST] - seconds[Kind.REDUCE_GRAD, part, -1]) * fraction
    if not _overlaps(device):
        reduce_s, summing_s = 0.0, 0.0
    again_s, again_bytes = (0.0, 0) if once else (gather_s, weights)
    forward_s = _slower_s(pipeline, stage, cost.forward_s, gather_s)
    backward_s = _slower_s(pipeline, stage, cost.backward_s, again_s + reduce_s + summing_s)
    forward_s += uses * default_of(device).copied_s(weights, device)
    backward_s += uses * default_of(device).copied_s(again_bytes + gradients, device)
    return replace(cost, forward_s=cost.forward_s + forward_s, backward_s=cost.backward_s + backward_s)


def _slower_s(pipeline: Pipeline, stage: int, compute_s: float, links_s: float) -> float:
    """Returns by how much a pass is slower beside collectives of so many seconds."""
    return default_of(pipeline.device(stage)).beside_s(compute_s, links_s) - compute_s


def _uses(case: PricedModel, gathered: Bytes, cut: Sequence[int], ranks: Sequence[int]) -> Iterator[Edge]:
    """Yields (owner, user) of the parts whose weights are gathered; of other ranks tied ones are copies."""
    yield from ((part, part) for part, run in enumerate(pairwise(cut)) if gathered[run] > 0)
    part_of = np.searchsorted(cut, np.arange(cut[-1]), side="right") - 1
    for flow in case.flows:
        for user in flow.consumers if flow.step else ():
            owner, other = int(part_of[flow.producer]), int(part_of[user])
            if owner != other and ranks[owner] == ranks[other]:
                yield owner, other


def _buckets(case: PricedModel, run: Run, collectives: WeightCollectives, least_bytes: int) -> list[Bucket]:
    """Returns the buckets of a stage in the order in which they are complete.

    A stage that recomputes everything does so before its first gradient.
    """
    units, first, found = slice(*run), run[0], list[Bucket]()
    gradients = np.diagonal(case.ranges.gradients, offset=1)[units]
    own_s, again_s = case.seconds.backward[units], 0.0
    if case.activation_policy.recomputes_all:
        own_s, again_s = own_s - case.seconds.forward[units], float(case.seconds.forward[units].sum())
    whole_s, passed_s, held = again_s + float(own_s.sum()), again_s, 0
    for unit in reversed(range(run[1] - first)):
        passed_s, held = passed_s + float(own_s[unit]), held + int(gradients[unit])
        if held and (held >= least_bytes or not gradients[:unit].any()):
            fraction = passed_s / whole_s if whole_s else 1.0
            found.append((fraction, collectives.reduce_s(held, last=True)))
            held = 0
    return found
