"""Stages that the host computes: which units, in which order, and their seconds against another player.

The other player walks each rank's row as the thread of the run does: a launch on the device returns at once,
a stage of the host keeps the thread, and a copy begins where its value is left.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations, pairwise

import pytest
from findings_of import findings
from planner_graphs import chain

from outsize.errors import NoFeasiblePlan
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, parse_cluster
from outsize.ir.findings import HostStages
from outsize.ir.graph import ModelGraph
from outsize.ir.hardware.devices import host_link
from outsize.ir.plan import Plan, stages_from_bounds
from outsize.ir.profile import Profile
from outsize.ir.schedule import Action, Kind, parse_row
from outsize.planner.costs.host_times import HostSpeed
from outsize.planner.search.evaluate_plan import price, timeline
from outsize.planner.search.search import search
from outsize.planner.strategies import host_computed
from outsize.policies.weights import DEGREES, HOST_COMPUTED, RESIDENT
from outsize.schedules.builders import read
from outsize.schedules.check import check
from outsize.schedules.lower import lower

MIB = 1 << 20
VALUE = 4 * MIB
Model = tuple[ModelGraph, Profile]


def model(sizes_mib: list[int], flops: list[float], saved_mib: int = 1, trains: bool = False) -> Model:
    """A chain of units of these weights, which are frozen, and FLOPs: 2 ms on the device each."""
    seconds = [0.002 / 3] * len(sizes_mib)
    graph, profile = chain(seconds, value_bytes=VALUE, saved_bytes=saved_mib * MIB)
    parameters = (
        p.model_copy(update={"shape": (size * MIB // 4,), "size_bytes": size * MIB, "trainable": trains})
        for p, size in zip(graph.parameters, sizes_mib, strict=True)
    )
    units = (
        u.model_copy(update={"flops": round(flop), "name": f"layers.{u.index}"})
        for u, flop in zip(graph.units, flops, strict=True)
    )
    graph = graph.model_copy(update={"parameters": tuple(parameters), "units": tuple(units)})
    graph = ModelGraph.model_validate(graph.model_dump())
    costs = (
        cost.model_copy(update={"name": unit.name})
        for cost, unit in zip(profile.units, graph.units, strict=True)
    )
    return graph, profile.model_copy(update={"device": "h100-80gb", "units": tuple(costs)})


def cluster(room_mib: int, devices: int = 1, **host: object) -> Cluster:
    """Devices with so much room beside what they use anyway, and a host of 1 TFLOP/s."""
    found = parse_cluster(f"{devices}xh100-80gb")
    memory = (room_mib + 900) * MIB
    small = (
        d.model_copy(update={"memory_bytes": memory, "context_bytes": 530 * MIB, "matmul_bytes": 0})
        for d in found.devices
    )
    return found.model_copy(
        update={"devices": tuple(small), "host_flops_per_s": 1e12, "host_bytes_per_s": 1e12, **host}
    )


def asked(found: Model, where: Cluster, microbatches: int = 4, **wishes: object) -> Plan:
    wishes = {"weights": HOST_COMPUTED.name, "microbatches": microbatches, **wishes}
    request = PlanRequest(batch_size=microbatches, **wishes)  # pyright: ignore[reportArgumentType]
    return search(request, {microbatches: found}, where)


def on_host(plan: Plan) -> list[str]:
    return [unit for stage in plan.stages if stage.on_host for unit in stage.units]


LARGE, SMALL = 400, 20
SIZES = [SMALL, LARGE, SMALL, LARGE, SMALL, LARGE, SMALL, LARGE, SMALL]
FLOPS = [2e10, 3e9, 2e10, 2e9, 2e10, 1e9, 2e10, 4e9, 2e10]
"""A unit of few bytes takes the host 60 ms, a large one 3 to 12."""


def test_units_go_to_the_host_that_cost_it_least_for_their_bytes() -> None:
    found = model(SIZES, FLOPS)
    assert asked(found, cluster(4000), weights=None).weights == RESIDENT.name
    assert on_host(asked(found, cluster(4000))) == ["layers.5"], "it was asked for"
    assert on_host(asked(found, cluster(1500))) == ["layers.5"]
    assert on_host(asked(found, cluster(1100))) == ["layers.3", "layers.5"]
    assert on_host(asked(found, cluster(0))) == ["layers.1", "layers.3", "layers.5", "layers.7"]


def test_a_row_has_each_action_once_and_two_microbatches_together() -> None:
    plan = asked(model(SIZES, FLOPS), cluster(1100))
    assert [stage.on_host for stage in plan.stages] == [False, True, False, True, False]
    assert plan.actions[0].startswith("0F0,0F1,1F0,2F0,1F1,2F1,3F0,4F0,3F1,4F1,4B0,4B1,3B0,2B0,3B1,2B1")
    schedule = read(plan.actions)
    chained = frozenset(pairwise(range(5)))
    back = frozenset((b, a) for a, b in chained)
    check(lower(schedule, chained, back), chained, back)


@pytest.mark.parametrize(
    ("devices", "microbatches", "room"), [(1, 4, 1100), (1, 3, 300), (2, 4, 600), (2, 8, 200), (3, 6, 300)]
)
def test_the_seconds_are_those_of_the_thread_of_each_rank(devices: int, microbatches: int, room: int) -> None:
    """Within 3 %: where one group of microbatches follows another, a launch may wait for the thread."""
    found, where = model(SIZES, FLOPS), cluster(room, devices)
    plan = asked(found, where, microbatches, stages=devices)
    assert plan.axes.pp == devices
    assert plan.host_stages
    step_s = timeline(plan, *found, where).duration_s
    assert step_s == pytest.approx(Walk(plan, found, where).seconds(), rel=0.03)
    again = price(plan, *found, where)
    assert again.expected == plan.expected


def test_few_units_are_as_fast_as_the_best_choice_of_any() -> None:
    """All choices of units of a small model that fit, in the same order of actions."""
    found, where = model(SIZES[:7], FLOPS[:7]), cluster(500)
    plan = asked(found, where)
    least_s = plan.expected.step_s if plan.expected else 0.0
    others = [
        priced.expected.step_s
        for count in range(1, 5)
        for chosen in combinations(range(6), count)
        if (priced := chosen_by_hand(plan, found, where, chosen)).expected is not None
        and priced.expected.degrees[-1].fits
    ]
    assert len(others) > 3
    assert least_s <= min(others) * 1.01
    assert 0 < bound_s(plan, found, where) <= min(others)


def bound_s(plan: Plan, found: Model, where: Cluster) -> float:
    host_s = HostSpeed.of(where, 1).unit_seconds(found[0])
    units = host_computed._Units.of(found, where, plan.axes.pp, plan.optimizer, host_s)
    return units.least_s(plan.microbatches)


def test_nothing_is_priced_where_what_has_no_room_takes_the_host_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a bound that is below the steps of all plans, on several devices as well."""
    for devices, microbatches, room in ((1, 4, 300), (2, 8, 200), (3, 6, 300)):
        found, where = model(SIZES, FLOPS), cluster(room, devices)
        plan = asked(found, where, microbatches, stages=devices)
        assert plan.expected is not None
        assert 0 <= bound_s(plan, found, where) <= plan.expected.step_s
    slow = model(SIZES, [flop * 1000 for flop in FLOPS])
    copied = asked(slow, cluster(1100), weights=None)
    monkeypatch.delattr(host_computed, "_of_most_room")
    assert asked(slow, cluster(1100), weights=None) == copied


def test_the_hosts_memory_is_a_limit_and_ranks_share_its_speed() -> None:
    found = model(SIZES, FLOPS)
    assert len(on_host(asked(found, cluster(0, host_memory_bytes=2000 * MIB)))) == 4
    with pytest.raises(NoFeasiblePlan, match=r"host's memory is 1\.0 GiB"):
        asked(found, cluster(0, host_memory_bytes=1 << 30))
    one, two = (asked(found, cluster(0, devices), 8) for devices in (1, 2))
    (whole,), (shared,) = findings(one, HostStages), findings(two, HostStages)
    assert whole.lasting_bytes == shared.lasting_bytes == 4 * LARGE * MIB
    assert shared.host_s == pytest.approx(whole.host_s, rel=0.5), "half of the stages at half of the speed"


def test_stages_of_the_host_recompute_where_its_memory_is_too_small() -> None:
    """Two microbatches of 64 MiB in four stages wait, or what the stages receive, 4 MiB, and one of 64."""
    found = model(SIZES, FLOPS, saved_mib=64)
    roomy, narrow = (
        asked(found, cluster(300, host_memory_bytes=(4 * LARGE + more) * MIB), recompute="full")
        for more in (600, 200)
    )
    saved = [[each.saved_bytes for each in findings(plan, HostStages)] for plan in (roomy, narrow)]
    assert saved == [[2 * 4 * 64 * MIB], [2 * 4 * VALUE + 64 * MIB]]
    again = [{p.activation_policy(s).recomputes for s in p.host_stages} for p in (roomy, narrow)]
    assert again == [{False}, {True}]
    times = [plan.expected.degrees[-1].bound.host_s for plan in (roomy, narrow) if plan.expected]
    assert times[1] == pytest.approx(4 / 3 * times[0]), "three passes of a forward become four"


def test_what_it_is_compared_with_is_copying() -> None:
    plan = asked(model(SIZES, FLOPS), cluster(0))
    assert plan.expected is not None
    rows = {degree.weights: degree for degree in plan.expected.degrees}
    assert tuple(rows) == (*DEGREES, "host-computed")
    assert not rows["resident"].fits
    assert rows["host-computed"].fits
    assert rows["host-computed"].bound.longest == "compute on the host"
    moved = {name: row.bound.to_device_s for name, row in rows.items()}
    assert moved["host"] > 20 * moved["host-computed"] > 0, "weights against values"


def test_the_faster_of_both_is_taken_where_nothing_else_fits() -> None:
    quick = [flop / 1000 for flop in FLOPS]
    assert asked(model(SIZES, quick), cluster(1100), weights=None).weights == HOST_COMPUTED.name
    slow = [flop * 1000 for flop in FLOPS]
    assert asked(model(SIZES, slow), cluster(1100), weights=None).weights == "host"


def test_trained_weights_stay_on_the_devices() -> None:
    with pytest.raises(NoFeasiblePlan, match="frozen"):
        asked(model(SIZES, FLOPS, trains=True), cluster(1100))


# -- the other player ----------------------------------------------------------------------------------------


class Walk:
    """A step in which each rank's thread walks its row; one direction of a link is one queue."""

    def __init__(self, plan: Plan, found: Model, where: Cluster) -> None:
        link = host_link(where.devices[0])
        assert link is not None
        self.plan, self.where, self.beside_s = plan, where, link.seconds(VALUE)
        runs = [range(*run) for run in pairwise(plan.bounds(found[0]))]
        self.device_s = [sum(found[1].units[u].forward_s for u in run) for run in runs]
        self.host_s = [sum(found[0].units[u].flops for u in run) * plan.axes.pp / 1e12 for run in runs]
        self.thread, self.device = [0.0] * plan.axes.pp, [0.0] * plan.axes.pp
        self.queue = defaultdict[tuple[object, ...], float](float)
        self.arrived = {(0, Kind.F, mb): 0.0 for mb in range(plan.microbatches)}

    def seconds(self) -> float:
        rows = [list(parse_row(row)) for row in self.plan.actions]
        while any(rows):
            for rank, row in enumerate(rows):
                while row and (row[0].stage, row[0].kind, row[0].microbatch) in self.arrived:
                    self.run(rank, row.pop(0))
        return max(*self.thread, *self.device)

    def run(self, rank: int, action: Action) -> None:
        """A device's stage begins when it is launched, its values are there and the device is free."""
        stage, kind, mb = action.stage, action.kind, action.microbatch
        begun = max(self.thread[rank], self.arrived[stage, kind, mb])
        if stage in self.plan.host_stages:
            end = self.thread[rank] = begun + self.host_s[stage] * (1 if kind is Kind.F else 2)
        else:
            again = 1 if kind is Kind.F else 2 + (self.plan.recompute == "full")
            end = self.device[rank] = max(begun, self.device[rank]) + self.device_s[stage] * again
        last, taker = len(self.plan.stages) - 1, stage + (1 if kind is Kind.F else -1)
        if kind is Kind.F and stage == last:
            self.arrived[last, Kind.B, mb] = end
        elif 0 <= taker <= last:
            places = [at in self.plan.host_stages for at in (stage, taker)]
            wire = rank, self.plan.ranks[taker], *places, kind
            arrival = max(end, self.queue[wire]) + self.message_s(stage, taker, places)
            self.arrived[taker, kind, mb] = self.queue[wire] = arrival

    def message_s(self, stage: int, taker: int, on_host: list[bool]) -> float:
        ranks = self.plan.ranks[stage], self.plan.ranks[taker]
        if ranks[0] == ranks[1]:
            return self.beside_s
        return self.where.link(*ranks).seconds(VALUE) + self.beside_s * sum(on_host)


def chosen_by_hand(plan: Plan, found: Model, where: Cluster, units: tuple[int, ...]) -> Plan:
    """The plan of one device whose host computes these units, priced."""
    graph = found[0]
    hosted = [unit in units for unit in range(len(graph.units))]
    bounds = [0, *(u for u in range(1, len(hosted)) if hosted[u] != hosted[u - 1]), len(hosted)]
    places = [
        host_computed._Place(a, b, 0, hosted[a])  # the order of actions is no choice here
        for a, b in pairwise(bounds)
    ]
    stages = stages_from_bounds(graph, bounds, [where.devices[0].name] * len(places))
    marked = tuple(s.model_copy(update={"on_host": p.on_host}) for s, p in zip(stages, places, strict=True))
    choice = host_computed._HostChoice(1, plan.microbatches, 2, "none")
    rows = tuple(host_computed._rows(places, choice))
    return price(plan.model_copy(update={"stages": marked, "actions": rows}), *found, where)
