"""Problem: some units are too large for the devices. Which of them does the host compute, and how long is a
step?

    device 0   0F0 0F1 .   2F0 .   2F1 ...      stages 0, 2: units of the device, which keeps their weights
    host 0     .   1F0 .   1F1 .   3F0 ...      stages 1, 3: units of the host; values move, weights never
    device 1   ...                              the next ranks of the pipeline, each with its host's share

    units      of frozen weights, with their adapters: those that cost the host least for the bytes that they
               free, until the devices have room: by (seconds on the host - on the device + of moving values)
               / bytes. An embedding, of which rows are read, comes first; experts, of which a token needs a
               few, next; a dense layer last
    stages     runs of units of one rank in one place; ranks have about equal work, and end between blocks
    order      1F1B of groups of two microbatches, or of one where memory is short. Within a group stage k of
               one runs beside stage k - 1 of the other (`_wave`), so the device has one while the host has
               the other; what the device is to do is launched first, and what follows a stage of the host is
               what needs it, so no launch waits for the host's thread
    seconds    the row is played with a lane for each device and one for its share of the host, and a message
               between them for each value that crosses (simulation/simulate.py)
    bytes      those of the device's stages, as of any pipeline; the host has the weights, states and saved
               activations of the others, and all of it must fit its memory where that is known: its stages
               recompute where it would not

Values of a host stage that go to another rank pass over both links one after the other. Deviations: between
two groups a launch may wait for the host's thread, which is not played (3 % in the tests' cases at most); the
optimizer of the host's adapters follows the last backward; within a step the host's share of a rank stays
1 / ranks of a machine, also while other ranks wait; of all choices of ranks, microbatches and recompute only
those are priced that will probably be fastest (`_tries`). Complexity: (these) x O(actions). Oracle:
tests/unit/planner/strategies/test_host_computed.py plays small steps by another player, and all choices of
units of a small model; such plans run bit-equal in tests/device/test_host_stages.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import groupby, islice, pairwise, product
from math import inf
from operator import attrgetter, itemgetter
from typing import Final, NamedTuple, Self, final

import numpy as np

from outsize.errors import NoFeasiblePlan
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.findings import FullestDevice, HostRoofline, HostStages
from outsize.ir.formatting import bytes_text
from outsize.ir.graph import ModelGraph
from outsize.ir.hardware.devices import host_link
from outsize.ir.hardware.links import Link
from outsize.ir.offload import Bound, Degree
from outsize.ir.plan import Axes, Plan, Stage, stages_from_bounds
from outsize.ir.profile import Profile
from outsize.ir.schedule import Action, Kind, Schedule, parse_row
from outsize.ir.timeline import Timeline
from outsize.ir.units.names import compress_units
from outsize.planner.costs.coarsening import between_blocks, coarse_graph, coarse_profile
from outsize.planner.costs.host_times import HostSpeed
from outsize.planner.costs.parallel_times import WeightCollectives
from outsize.planner.costs.stage_edges import Edges, crossing_bytes, edges_of
from outsize.planner.costs.unit_times import UnitSeconds
from outsize.planner.evaluate.candidate import Candidate, check_enough, expected
from outsize.planner.evaluate.plan_findings import fullest_device
from outsize.planner.layout.layout import Layout, rank_named
from outsize.planner.memory.headroom import with_usable_memory
from outsize.planner.memory.optimizer_states import optimizer_bytes
from outsize.planner.memory.range_tables import bytes_of_units
from outsize.planner.offload.host_traffic import updated
from outsize.planner.partition.stage_prices import Pipeline, PricedModel
from outsize.planner.simulation.simulate import StageCost, simulate
from outsize.planner.strategies.host_round_robin import copied, device_shortages
from outsize.policies.activations import KEEP, RECOMPUTE, WHOLE_STAGE, Recompute, activation_policy
from outsize.policies.weights import HOST_COMPUTED
from outsize.schedules.builders import build
from outsize.schedules.families import COMPOSED, DEFAULT

# So many microbatches run together: two, one on the device and one on the host, or one, of which less waits.
TOGETHER: Final = (2, 1)
# So many choices are made, those that will probably be fastest, until so many of them fit.
TRIES: Final = 16
ENOUGH: Final = 3
# The share of the devices that weights may take is tried so much below the likely one, in turn.
LOWER: Final = (0.0, 0.1, 0.25, 0.5)
Model = tuple[ModelGraph, Profile]


@final
class _HostChoice(NamedTuple):
    """Is one try: ranks of the pipeline, microbatches and how many run together, and what stages of the
    devices and of the host do with activations.
    """

    ranks: int
    microbatches: int
    together: int
    recompute: Recompute
    on_host: Recompute = KEEP.name

    def flying(self, rank: int) -> int:
        """Returns the microbatches that a rank has in flight at most."""
        return min(self.together * (self.ranks - rank), self.microbatches)


# -- the choice ------------------------------------------------------------------------------------------


def host_computed(
    request: PlanRequest,
    models: Mapping[int, Model],
    cluster: Cluster,
    recompute: Sequence[Recompute],
    below_s: float = inf,
) -> Plan | None:
    """Returns the fastest plan that fits in which the host computes some stages; None where there is none,
    and where none takes less than `below_s`, by what the host has to compute alone.

    `recompute`: the open options; all stages of the devices take the same one.
    """
    if not _applies(request, models, cluster):
        return None
    options: list[Recompute] = [option for option in WHOLE_STAGE if option in recompute]
    tries = sorted(_tries(request, models, cluster, options), key=attrgetter("is_full", "likely_s"))[:TRIES]
    if below_s < inf and all(each.units.least_s(each.choice.microbatches) >= below_s for each in tries):
        return None
    made = (_of_most_room(request, models, cluster, each) for each in tries)
    fitting = list(islice(filter(None, made), ENOUGH))
    if not fitting:
        return None
    _, best = min(fitting, key=itemgetter(0))
    return priced(best, *models[best.microbatches], cluster)


def _applies(request: PlanRequest, models: Mapping[int, Model], cluster: Cluster) -> bool:
    """Returns whether plans of this kind run at all: pipelines of recorded programs on equal devices."""
    is_open = request.schedule in (None, COMPOSED.name) and request.chunks is None
    is_open &= not (request.has_group_axes or request.inference or request.actions or request.loop)
    is_open &= request.weights in (None, HOST_COMPUTED.name) and not cluster.unequal
    recorded = all(graph.form == "tape" for graph, _ in models.values())
    return is_open and recorded and all(host_link(device) is not None for device in cluster.devices)


def no_host_stages(request: PlanRequest, cluster: Cluster) -> NoFeasiblePlan:
    """Returns the error where no plan has stages on the host."""
    known = cluster.host_memory_bytes
    room = "unknown" if known is None else bytes_text(known)
    return NoFeasiblePlan(
        f"weights={request.weights!r} finds no plan: frozen units that the host computes until the rest fits",
        numbers=f"{len(cluster.devices)} devices of cluster {cluster.name!r}; the host's memory is {room}",
        next_step="a frozen model with adapters (--lora-rank 8) on devices beside a host, no other axes, or "
        "leave out weights",
    )


@final
@dataclass(frozen=True, eq=False)
class _Try:
    """Is a choice whose stages are not made yet: the share of the devices that weights may probably take, and
    the seconds that a step will probably take, of the host's compute in a pipeline of groups.
    """

    choice: _HostChoice
    units: _Units
    share: float
    likely_s: float

    @property
    def is_full(self) -> bool:
        """Tells whether activations probably leave too little for the weights that stay on the devices."""
        return self.share * self.units.ranks * self.units.room_bytes < self.units.stays_bytes


def _tries(
    request: PlanRequest, models: Mapping[int, Model], cluster: Cluster, options: Sequence[Recompute]
) -> Iterator[_Try]:
    """Yields all choices that the request allows."""
    devices = len(cluster.devices)
    sizes = [p for p in range(1, devices + 1) if request.stages == p or not (request.stages or devices % p)]
    for count, model in models.items():
        if request.total_microbatches not in (None, count):
            continue
        whole_s = HostSpeed.of(cluster, 1).unit_seconds(model[0])
        for pp in sizes:
            units = _Units.of(model, cluster, pp, request.optimizer, whole_s)
            orders = product(TOGETHER, options) if units.may_fit else ()
            for together, option in orders:
                choice = _HostChoice(pp, count, together, option)
                share = units.likely_share(choice)
                if not units.likely_fits_host(choice, share, cluster):
                    choice = choice._replace(on_host=RECOMPUTE.name)
                yield _Try(choice, units, share, units.likely_s(choice, share))


def _of_most_room(
    request: PlanRequest, models: Mapping[int, Model], cluster: Cluster, tried: _Try
) -> tuple[float, Plan] | None:
    """Returns the plan of a choice with the first share of the devices that fits, the likely one and lower
    ones, and its seconds; None where none does.
    """
    choice, units = tried.choice, tried.units
    model, last = models[choice.microbatches], tuple[_Place, ...]()
    for lower in LOWER:
        places = units.stages(max(0.0, tried.share - lower))
        if places == last:
            continue
        last = places
        plan = _plan(request, model[0], cluster, choice, places)
        if plan.host_stages and _host_fits(plan, model, cluster):
            candidate, _ = _priced(plan, model, cluster, units.on_host)
            if candidate.fits:
                return candidate.step_s, plan
    return None


@final
@dataclass(frozen=True, eq=False)
class _Units:
    """Holds what decides which units go to the host: their bytes, and their work in both places."""

    ends: tuple[int, ...]
    weights: np.ndarray[tuple[int], np.dtype[np.int64]]
    held: np.ndarray[tuple[int], np.dtype[np.int64]]
    on_device: UnitSeconds
    on_host: UnitSeconds
    moved_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    may_go: np.ndarray[tuple[int], np.dtype[np.bool_]]
    saved: np.ndarray[tuple[int], np.dtype[np.int64]]
    crossing: np.ndarray[tuple[int], np.dtype[np.int64]]
    room_bytes: int
    ranks: int

    @classmethod
    def of(cls, model: Model, cluster: Cluster, ranks: int, optimizer: str, whole_s: UnitSeconds) -> Self:
        """Returns the figures of a model on so many ranks; `whole_s` are its seconds on a host of its own."""
        graph, profile = model
        sizes = bytes_of_units(graph, profile, optimizer_bytes(optimizer))
        held = sizes["weights"] + sizes["gradients"] + sizes["optimizer"]
        crossing, link = crossing_bytes(graph), _slowest_link(cluster)
        moved = [link.seconds(int(a)) + link.seconds(int(b)) for a, b in pairwise(crossing)]
        names = Counter(graph.parameter_of[n].name for u in graph.units for n in {*u.parameters})
        shared = {p.name for p in graph.parameters if p.trainable and names[p.name] > 1}
        tied = [any(graph.parameter_of[n].name in shared for n in u.parameters) for u in graph.units]
        frozen = 2 * sizes["trained"] < sizes["weights"] - sizes["buffers"]
        # A unit goes only if it frees more than the values at its ends take of all microbatches in flight.
        ends_bytes = max(TOGETHER) * ranks * (crossing[:-1] + crossing[1:])
        may_go = frozen & ~np.array(tied) & (held > ends_bytes)
        may_go[-1] = False  # The loss is read on the device.
        room = with_usable_memory(cluster).devices[0].memory_bytes
        return cls(
            ends=between_blocks(graph),
            weights=sizes["weights"] - sizes["buffers"],
            held=held,
            on_device=UnitSeconds.of(profile),
            on_host=_shared(whole_s, cluster, ranks),
            moved_s=2 * np.array(moved),
            may_go=may_go,
            saved=sizes["saved"],
            crossing=crossing,
            room_bytes=room,
            ranks=ranks,
        )

    @property
    def may_fit(self) -> bool:
        """Returns whether each rank can have a block, and the devices what has to stay on them."""
        return self.ranks < len(self.ends) and self.stays_bytes <= self.ranks * self.room_bytes

    @property
    def stays_bytes(self) -> int:
        """Returns the bytes of the units that cannot go to the host."""
        return int(self.held[~self.may_go].sum())

    def least_s(self, microbatches: int) -> float:
        """Returns a lower bound of a step: the weights that have no room on the devices are computed by the
        host, at best those that take it least for their bytes, as much of them on each rank's share.
        """
        left, each_s = float(self.weights.sum()) - self.ranks * self.room_bytes, 0.0
        sizes, host_s = np.maximum(self.weights, 1), self.on_host.total
        for unit in np.argsort(host_s / sizes, kind="stable").tolist():
            each_s += float(host_s[unit]) * min(1.0, max(0.0, left / float(sizes[unit])))
            left -= float(self.weights[unit])
        return microbatches * each_s / self.ranks

    def likely_share(self, choice: _HostChoice) -> float:
        """Returns the share of the devices that activations leave for weights, those of the microbatches that
        the first rank has in flight; less than all weights take, so that the host has some.
        """
        flying = choice.flying(0)
        saved = self.saved * ~self._hosted(1.0)
        held = flying * int(saved.sum()) // self.ranks
        if activation_policy(choice.recompute).recomputes:
            received = int(np.median(self.crossing)) * len(self.ends) // self.ranks
            held = flying * received + 2 * int(saved.max())
        all_weights = float(self.held.sum()) / (self.ranks * self.room_bytes)
        return min(max(1 - held / self.room_bytes, 0.0), all_weights * (1 - 1e-9))

    def likely_fits_host(self, choice: _HostChoice, share: float, cluster: Cluster) -> bool:
        """Returns whether the machines probably hold what their stages save of all microbatches in flight."""
        hosted, known = self._hosted(share), cluster.host_memory_bytes
        flying = sum(map(choice.flying, range(self.ranks)))
        held = int(self.held[hosted].sum()) + flying * int(self.saved[hosted].sum()) // self.ranks
        return known is None or held <= known * cluster.nodes

    def likely_s(self, choice: _HostChoice, share: float) -> float:
        """Returns the seconds of a step whose ranks have equal shares of the work: of the host's and of the
        devices', which are one behind the other where microbatches run one by one.
        """
        hosted = self._hosted(share)
        options: tuple[tuple[Recompute, UnitSeconds], ...] = (
            (choice.on_host, self.on_host),
            (choice.recompute, self.on_device),
        )
        whole = [s.recomputed() if activation_policy(name).recomputes else s for name, s in options]
        places = float(whole[0].total[hosted].sum()), float(whole[1].total[~hosted].sum())
        each_s = max(places) if choice.together > 1 else sum(places)
        groups = -(-choice.microbatches // choice.together) + self.ranks - 1
        return groups * min(choice.together, choice.microbatches) * each_s / self.ranks

    def stages(self, share: float) -> tuple[_Place, ...]:
        """Returns the stages in which weights take at most this share of the devices."""
        hosted = self._hosted(share)
        work = np.where(hosted, self.on_host.total, self.on_device.total)
        rank_of = self._ranks_of(work, np.where(hosted, 0, self.held), share)
        places = [(rank, bool(host)) for rank, host in zip(rank_of, hosted.tolist(), strict=True)]
        found, first = list[_Place](), 0
        for (rank, host), run in groupby(places):
            end = first + len(list(run))
            found.append(_Place(first, end, rank, host))
            first = end
        return tuple(found)

    def _hosted(self, share: float) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Returns which units the host computes: the cheapest for their bytes, until the rest has room."""
        more_s = self.on_host.total - self.on_device.total + self.moved_s
        price = np.where(self.may_go, more_s / np.maximum(self.held, 1), np.inf)
        hosted, left = np.zeros(len(price), np.bool_), int(self.held.sum())
        for unit in np.argsort(price, kind="stable").tolist():
            if left <= share * self.ranks * self.room_bytes or not self.may_go[unit]:
                break
            hosted[unit], left = True, left - int(self.held[unit])
        return hosted

    def _ranks_of(
        self,
        work: np.ndarray[tuple[int], np.dtype[np.float64]],
        held: np.ndarray[tuple[int], np.dtype[np.int64]],
        share: float,
    ) -> list[int]:
        """Returns the rank of each unit: an equal part of the work, and of the bytes on devices, ends where a
        block does.
        """
        done = np.concatenate([[0.0], np.cumsum(work / max(work.sum(), 1e-30))])
        full = np.concatenate([[0.0], np.cumsum(held / max(held.sum(), 1))])
        mixed, cuts = (done + share * full) / (1 + share), [0]
        for rank in range(1, self.ranks):
            ahead = [e for e in self.ends if e > cuts[-1]][: len(self.ends) - (self.ranks - rank)]
            cuts.append(
                min(
                    ahead[: -(self.ranks - rank)] or ahead[:1],
                    key=lambda e: abs(mixed[e] - rank / self.ranks),
                )
            )
        cuts.append(len(work))
        return [rank for rank, (a, b) in enumerate(pairwise(cuts)) for _ in range(a, b)]


@final
@dataclass(frozen=True, slots=True)
class _Place:
    """Is a run of units of one rank in one place."""

    first: int
    end: int
    rank: int
    on_host: bool


def _shared(whole_s: UnitSeconds, cluster: Cluster, ranks: int) -> UnitSeconds:
    """Returns the seconds of units on the share that each of so many ranks has of its host."""
    times = HostSpeed.of(cluster, 1).flops_per_s / HostSpeed.of(cluster, ranks).flops_per_s
    return whole_s.times(times, times, times)


def _slowest_link(cluster: Cluster) -> Link:
    links = (host_link(device) for device in cluster.devices)
    return min((link for link in links if link is not None), key=lambda link: link.bytes_per_s)


def _plan(
    request: PlanRequest,
    graph: ModelGraph,
    cluster: Cluster,
    choice: _HostChoice,
    places: Sequence[_Place],
) -> Plan:
    pp, count, option = choice.ranks, choice.microbatches, choice.recompute
    bounds = [*(place.first for place in places), len(graph.units)]
    names = [cluster.devices[place.rank].name for place in places]
    stages = stages_from_bounds(graph, bounds, names)
    return Plan(
        model=graph.model,
        fingerprint=graph.fingerprint,
        form=graph.form,
        cluster=cluster.name,
        axes=Axes(pp=pp),
        batch_size=request.batch_size,
        microbatches=count,
        schedule=COMPOSED.name,
        actions=tuple(_rows(places, choice)),
        stages=tuple(_marked(stage, place, choice) for stage, place in zip(stages, places, strict=True)),
        optimizer=request.optimizer,
        precision=request.precision,
        weights=HOST_COMPUTED.name,
        recompute=option,
        loss_pieces=request.loss_pieces or 1,
        module_pieces=request.module_pieces or 1,
        kernels=request.kernels,
        bn=request.bn,
    )


def _marked(stage: Stage, place: _Place, choice: _HostChoice) -> Stage:
    """Returns the stage in its place, with its own policy of activations where that is another one."""
    own = None if choice.on_host == choice.recompute else choice.on_host
    return stage.model_copy(update={"on_host": True, "recompute": own}) if place.on_host else stage


# -- the order -------------------------------------------------------------------------------------------


def _rows(places: Sequence[_Place], choice: _HostChoice) -> Iterator[str]:
    """Yields the row of each rank: 1F1B of groups of microbatches, each group as a wave."""
    pp, microbatches, together = choice[:3]
    groups = -(-microbatches // together)
    for rank, row in enumerate(build(DEFAULT.name, pp, groups, pp).actions):
        own = [(stage, place.on_host) for stage, place in enumerate(places) if place.rank == rank]
        cells = list[Action]()
        for action in row:
            first = action.microbatch * together
            group = range(first, min(first + together, microbatches))
            order = own if action.kind is Kind.F else own[::-1]
            cells += _wave(order, group, action.kind)
        yield ",".join(map(str, cells))


def _wave(stages: Sequence[tuple[int, bool]], group: Sequence[int], kind: Kind) -> Iterator[Action]:
    """Yields one pass of a group over stages, given with whether they are on the host: at a time each
    microbatch is one stage behind the one before it, and the device's stages are launched first.

        time      0    1          2          3
        device    0F0  0F1        2F0        2F1
        host           1F0        1F1
    """
    for time in range(len(stages) + len(group) - 1):
        at = [(time - behind, mb) for behind, mb in enumerate(group) if 0 <= time - behind < len(stages)]
        for place, microbatch in sorted(at, key=lambda cell: stages[cell[0]][1]):
            yield Action(stages[place][0], kind, microbatch)


# -- the price -------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class _PlayedLanes:
    """Is a step that is played with two lanes for each rank: 2 r is its device, 2 r + 1 its share of the
    host.
    """

    plan: Plan
    costs: Sequence[StageCost]
    edges: Edges
    between: Callable[[int, int], Link]
    beside: Link

    def seconds(self) -> float:
        """Returns the seconds of all microbatches."""
        return self._played.duration_s

    def timeline(self) -> Timeline:
        """Returns the predicted Timeline; spans of a host's lane are those of its rank."""
        spans = (span.model_copy(update={"rank": span.rank // 2}) for span in self._played.spans)
        return Timeline(source="predicted", ranks=self.plan.axes.pp, spans=tuple(spans))

    @cached_property
    def _played(self) -> Timeline:
        plan = self.plan
        rows: list[list[Action]] = [[] for _ in range(2 * plan.axes.pp)]
        for rank, row in enumerate(plan.actions):
            for action in map(Action.parse, row.split(",")):
                rows[2 * rank + (action.stage in plan.host_stages)].append(action)
        lanes = {lane: place for place, lane in enumerate(lane for lane, row in enumerate(rows) if row)}
        numbers = {place: lane for lane, place in lanes.items()}
        schedule = Schedule(plan.schedule, plan.microbatches, tuple(tuple(rows[lane]) for lane in lanes))
        sizes = self.edges.message_bytes(plan.microbatches)
        return simulate(
            self.edges.lowered(schedule),
            self.costs,
            sizes[Kind.F],
            sizes[Kind.B],
            lambda a, b: self._link(numbers[a], numbers[b]),
        )

    def _link(self, source: int, destination: int) -> Link:
        """Returns the link between two lanes; over several one after the other."""
        links = [self.beside] * (source % 2) * (source // 2 != destination // 2)
        links += [self.beside] * (destination % 2) * (source // 2 != destination // 2)
        links += (
            [self.beside]
            if source // 2 == destination // 2
            else [self.between(source // 2, destination // 2)]
        )
        return Link(
            name="+".join(link.name for link in links),
            latency_s=sum(link.latency_s for link in links),
            bytes_per_s=1 / sum(1 / link.bytes_per_s for link in links),
        )


def priced(
    plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster, host_s: UnitSeconds | None = None
) -> Plan:
    """Prices a plan whose stages are in part on the host, as planner/search/evaluate_plan.py does; raises as
    that does. `host_s`: the seconds of units on a rank's share of the host, where they are known.
    """
    model = graph, profile
    candidate, step = _priced(plan, model, cluster, host_s)
    figures, bound = expected(candidate, plan.batch_size, plan.bounds(graph)), _bound(plan, candidate, step)
    busy = _busy(plan, candidate)
    rows = (
        row.model_copy(update={"busy": busy[rank, stage in plan.host_stages]})
        for stage, (row, rank) in enumerate(zip(figures.stages, plan.ranks, strict=True))
    )
    degree = Degree(
        weights=plan.weights,
        microbatches=plan.microbatches,
        recompute=activation_policy(plan.recompute).recomputes,
        bound=bound,
        step_s=candidate.step_s,
        peak_bytes=candidate.peak_bytes,
        fits=candidate.fits,
    )
    changes = {
        "stages": tuple(rows),
        "bubble": 1 - sum(share for (_, on_host), share in busy.items() if not on_host) / plan.axes.pp,
        "degrees": (*copied(plan, graph, profile, cluster), degree),
    }
    why = (
        *device_shortages(candidate),
        _fullest(candidate),
        _host_stages(plan, model, cluster, bound),
        HostRoofline(bound=bound),
    )
    return plan.model_copy(update={"expected": figures.model_copy(update=changes), "why": why})


def timeline(plan: Plan, graph: ModelGraph, profile: Profile, cluster: Cluster) -> Timeline:
    """Returns the predicted Timeline of one step."""
    return _priced(plan, (graph, profile), cluster)[1].timeline()


def _priced(
    plan: Plan, model: Model, cluster: Cluster, host_s: UnitSeconds | None = None
) -> tuple[Candidate, _PlayedLanes]:
    """Prices a plan; each stage is a piece."""
    check_enough(plan.batch_size, plan.microbatches)
    (graph, profile), layout = model, Layout.of_plan(plan)
    bounds, count = plan.bounds(graph), len(plan.stages)
    speed = HostSpeed.of(cluster, plan.axes.pp)
    whole = PricedModel.of(
        coarse_graph(graph, bounds), coarse_profile(profile, bounds), plan.microbatches, plan.optimizer
    )
    host_s = speed.unit_seconds(graph) if host_s is None else host_s
    on_host = _without_device(whole, host_s.merged(bounds))
    after_s = updated(whole.graph, optimizer_bytes(plan.optimizer)) / speed.bytes_per_s
    on_host = replace(on_host, after_s=np.diag(after_s, 1), update=None)
    places_of = (whole, whole.fully_recomputed()), (on_host, on_host.fully_recomputed())
    again = [policy.recomputes for policy in plan.activation_policies]
    options = tuple((places_of[stage in plan.host_stages][again[stage]],) for stage in range(count))
    places = tuple(rank_named(stage.device, cluster) for stage in plan.stages)
    room, collectives = with_usable_memory(cluster), WeightCollectives(layout, cluster)
    pieces = tuple(range(count + 1))
    pipeline = Pipeline(layout, cluster, room, places, options, (collectives,) * count, pieces, even=False)
    candidate = Candidate.of(pipeline, pieces, (0,) * count)
    edges = edges_of(whole.flows, pieces)
    step = _PlayedLanes(plan, candidate.costs, edges, cluster.link, _slowest_link(cluster))
    return replace(candidate, hosted=step), step


def _without_device(whole: PricedModel, seconds: UnitSeconds) -> PricedModel:
    """Returns the model where the host computes it, which takes nothing of the device."""
    nothing = np.zeros_like(whole.ranges.saved)
    none = {f.name: nothing for f in fields(whole.ranges)}
    return replace(whole, ranges=replace(whole.ranges, **none)).with_seconds(seconds)


def _fullest(candidate: Candidate) -> FullestDevice:
    """Returns the fullest device, with the microbatches that its stages have in flight at most."""
    found = fullest_device(candidate.memories, candidate.devices, candidate.layout.ranks)
    flying = max(memory.in_flight for memory in candidate.memories)
    return found.model_copy(update={"microbatches_in_flight": flying})


def _busy(plan: Plan, candidate: Candidate) -> dict[tuple[int, bool], float]:
    """Returns the share of the step in which the device of each rank computes, and its share of the host."""
    busy = dict.fromkeys(((rank, place) for rank in range(plan.axes.pp) for place in (False, True)), 0.0)
    for stage, (rank, cost) in enumerate(zip(plan.ranks, candidate.costs, strict=True)):
        compute_s = plan.microbatches * (cost.forward_s + cost.backward_s)
        busy[rank, stage in plan.host_stages] += compute_s / candidate.step_s if candidate.step_s else 0.0
    return busy


def _bound(plan: Plan, candidate: Candidate, step: _PlayedLanes) -> Bound:
    """Returns the bound of the rank that takes longest with each of the resources."""
    busy, down, up = _busy(plan, candidate), Counter[int](), Counter[int]()
    hosted = plan.host_stages
    for source, taker, size in (*_crossing(step.edges.forward), *_crossing(step.edges.backward)):
        if (source in hosted) != (taker in hosted):
            (up if source in hosted else down)[plan.ranks[source]] += plan.microbatches * size
    seconds = {place: max(s for (_, p), s in busy.items() if p is place) for place in (False, True)}
    return Bound(
        compute_s=seconds[False] * candidate.step_s,
        to_device_s=max(map(step.beside.seconds, up.values()), default=0.0),
        to_host_s=max(map(step.beside.seconds, down.values()), default=0.0),
        optimizer_s=candidate.after_s,
        host_s=seconds[True] * candidate.step_s,
    )


def _crossing(sizes: Mapping[tuple[int, int], int]) -> Iterator[tuple[int, int, int]]:
    return ((source, taker, size) for (source, taker), size in sizes.items())


# -- the host's memory -----------------------------------------------------------------------------------


def _host_bytes(plan: Plan, model: Model) -> tuple[int, int]:
    """Returns what the hosts hold of the stages that they compute: weights with gradients and states, and
    what is saved of the microbatches that wait for their backward.
    """
    (graph, profile), hosted = model, plan.host_stages
    sizes = bytes_of_units(graph, profile, optimizer_bytes(plan.optimizer))
    held = sizes["weights"] + sizes["gradients"] + sizes["optimizer"]
    lasting, saved, working = 0, 0, [0] * plan.axes.pp
    crossing, flying = crossing_bytes(graph), _flying(plan)
    for stage, (first, end) in enumerate(pairwise(plan.bounds(graph))):
        if stage in hosted:
            rank, own = plan.ranks[stage], int(sizes["saved"][first:end].sum())
            lasting += int(held[first:end].sum())
            if plan.activation_policy(stage).recomputes:
                # What it receives waits, and what one stage at a time saves.
                own, working[rank] = int(crossing[first]), max(working[rank], own)
            saved += flying[stage] * own
    return lasting, saved + sum(working)


def _flying(plan: Plan) -> dict[int, int]:
    """Returns how many microbatches of each stage wait for their backward at most."""
    now, most = Counter[int](), dict[int, int]()
    for action in (action for row in plan.actions for action in parse_row(row)):
        now[action.stage] += (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W))
        most[action.stage] = max(most.get(action.stage, 0), now[action.stage])
    return most


def _host_fits(plan: Plan, model: Model, cluster: Cluster) -> bool:
    """Returns whether the machines have the memory, as far as it is known; stages are on them evenly."""
    known = cluster.host_memory_bytes
    return known is None or sum(_host_bytes(plan, model)) <= known * cluster.nodes


def _host_stages(plan: Plan, model: Model, cluster: Cluster, bound: Bound) -> HostStages:
    (lasting, saved), runs = _host_bytes(plan, model), tuple(pairwise(plan.bounds(model[0])))
    names = [unit.name for unit in model[0].units]
    units = [unit for stage in sorted(plan.host_stages) for unit in range(*runs[stage])]
    speed = HostSpeed.of(cluster, 1)
    return HostStages(
        units=tuple(compress_units(names, units)),
        lasting_bytes=lasting,
        saved_bytes=saved,
        host_s=bound.host_s,
        flops_per_s=speed.flops_per_s,
        bytes_per_s=speed.bytes_per_s,
        is_assumed=cluster.host_flops_per_s is None,
        host_memory_bytes=cluster.host_memory_bytes,
    )
