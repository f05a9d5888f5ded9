"""Oracle: every order of groups of unequal devices, every cut, every choice of recompute, any group idle."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import combinations, permutations, product

import pytest
from findings_of import findings
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from planner_graphs import chain

from outsize.errors import NoFeasiblePlan
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, parse_cluster
from outsize.ir.findings import DeviceKindUse
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan, stages_from_bounds
from outsize.ir.profile import Profile
from outsize.planner.costs.roofline import roofline
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.heterogeneous.assignment import kinds_of
from outsize.planner.layout.layout import Layout, all_layouts, grouped, of_kind
from outsize.planner.memory.headroom import LARGE_SEGMENT, SMALL_SEGMENT, room_bytes
from outsize.planner.search.evaluate_plan import price
from outsize.planner.search.search import search
from outsize.policies.activations import Recompute

Model = tuple[ModelGraph, Profile]
BATCH = 4
few = settings(max_examples=2, derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate])
rows = st.lists(st.integers(1, 9), min_size=4, max_size=5)
TWO = "1x2xv100-32gb+1x2xa100-40gb"
MORE = "2x2xv100-32gb+1x2xa100-40gb"
THREE = "1x2xv100-32gb+1x2xa100-40gb+1x2xh100-80gb"


def small(name: str, rooms: tuple[int, ...]) -> Cluster:
    """Devices of which peaks may take so many bytes by kind, on links that can be felt."""
    cluster = parse_cluster(name)
    names = list(dict.fromkeys(d.kind for d in cluster.devices))
    devices = (
        d.model_copy(update={"memory_bytes": _memory(rooms[names.index(d.kind)], d.fixed_bytes)})
        for d in cluster.devices
    )
    slow = cluster.outer.model_copy(update={"latency_s": 0.0, "bytes_per_s": 500.0})
    parts = tuple(part.model_copy(update={"inner": slow}) for part in cluster.parts)
    fields = {"devices": tuple(devices), "outer": slow, "inner": slow, "parts": parts}
    return cluster.model_copy(update=fields)


def _memory(room: int, fixed_bytes: int) -> int:
    return fixed_bytes + LARGE_SEGMENT + SMALL_SEGMENT + round(room * 1.115) + 2


def model(seconds: list[int], count: int) -> Model:
    """A row whose seconds and bytes shrink with the microbatch; its work is products."""
    graph, profile = chain([s / count for s in seconds], 64 // count, 100, 800 // count, BATCH // count)
    flops = tuple(
        u.model_copy(update={"flops": s * 10**13}) for u, s in zip(graph.units, seconds, strict=True)
    )
    return graph.model_copy(update={"units": flops}), profile


def everyone(models: dict[int, Model], cluster: Cluster, group: int) -> Iterator[Plan]:
    """All plans under 1f1b with groups of this size."""
    for layout in all_layouts(cluster, models, ("1f1b",), len(models[max(models)][0].units)):
        groups = grouped(cluster, layout.group)
        if layout.group == group and groups is not None:
            for ranks in range(1, layout.axes.pp + 1):
                yield from _of(models, cluster, layout.on(ranks), groups)


def _of(models: dict[int, Model], cluster: Cluster, layout: Layout, groups: Cluster) -> Iterator[Plan]:
    graph, profile = models[layout.captured]
    kinds: dict[tuple[str, ...], tuple[str, ...]] = {}
    for order in permutations(groups.devices, layout.stages):
        kinds.setdefault(tuple(d.kind for d in order), tuple(d.name for d in order))
    ways: tuple[Recompute, ...] = ("none", "full")
    for names, inner in product(kinds.values(), combinations(range(1, len(graph.units)), layout.stages - 1)):
        plain = stages_from_bounds(graph, (0, *inner, len(graph.units)), names)
        for again in product(ways, repeat=layout.stages):
            stages = tuple(s.model_copy(update={"recompute": a}) for s, a in zip(plain, again, strict=True))
            plan = Plan(
                model="toy",
                fingerprint="f0",
                cluster=cluster.name,
                axes=layout.axes,
                batch_size=BATCH,
                microbatches=layout.microbatches,
                schedule="1f1b",
                stages=stages,
                weights=layout.weights,
            )
            yield price(plan, graph, profile, cluster)


def fits(plan: Plan, cluster: Cluster) -> bool:
    assert plan.expected is not None
    of = {d.name: room_bytes(d) for d in cluster.devices}
    pairs = zip(plan.stages, plan.expected.stages, strict=True)
    return all(figures.peak_bytes <= of[stage.device] for stage, figures in pairs)


def step_s(plan: Plan) -> float:
    assert plan.expected is not None
    return plan.expected.step_s


def found_s(models: dict[int, Model], cluster: Cluster) -> float:
    try:
        return step_s(search(PlanRequest(batch_size=BATCH), models, cluster))
    except NoFeasiblePlan:
        return float("inf")


@few
@given(rows, st.sampled_from([(1500, 1200), (9000, 9000)]))
def test_no_order_of_groups_beats_the_plan(seconds: list[int], rooms: tuple[int, ...]) -> None:
    models, cluster = {4: model(seconds, 4)}, small(TWO, rooms)
    plans = everyone(models, cluster, 2)
    best = min((step_s(p) for p in plans if fits(p, cluster)), default=float("inf"))
    try:
        found = search(PlanRequest(batch_size=BATCH), models, cluster)
    except NoFeasiblePlan:
        assert best == float("inf")
        return
    assert found.expected is not None
    assert found.expected.gap is not None
    assert found.weights == "host" or step_s(found) <= best * 1.01
    assert step_s(found) / (1 + found.expected.gap) <= best * (1 + 1e-9)


@few
@given(rows, st.sampled_from([TWO, MORE, THREE]))
def test_floors_of_groups_are_below_every_plan(seconds: list[int], name: str) -> None:
    models, cluster = {4: model(seconds[:4], 4)}, small(name, (1500, 1800, 2500))
    menu = Pricing(models, cluster, "adamw", idle=True)
    for layout in all_layouts(cluster, models, ("1f1b",), 4):
        groups = grouped(cluster, layout.group)
        if layout.group == 2 and groups is not None:
            fresh = Pricing(models, cluster, "adamw", idle=True)
            floor_s = fresh.bounds.floor_s(layout, ("none", "full"))
            fewer = map(layout.on, range(1, layout.axes.pp + 1))
            plans = (plan for each in fewer for plan in _of(models, cluster, each, groups))
            best = min((step_s(p) for p in plans if fits(p, cluster)), default=float("inf"))
            assert max(floor_s, menu.bounds.least_s(layout)) <= best * (1 + 1e-9)


@few
@given(rows)
def test_one_more_node_or_a_faster_kind_never_makes_a_step_longer(seconds: list[int]) -> None:
    models, rooms = {4: model(seconds, 4)}, (9000, 9000)
    plain = found_s(models, small(TWO, rooms))
    assert found_s(models, small(MORE, rooms)) <= plain * 1.01
    assert found_s(models, small("1x2xv100-32gb+1x2xh100-80gb", rooms)) <= plain * 1.01


@few
@given(rows)
def test_the_order_in_which_kinds_are_named_changes_nothing(seconds: list[int]) -> None:
    graph, _ = model(seconds, 4)
    clusters = [small(TWO, (3000, 4000)), small("1x2xa100-40gb+1x2xv100-32gb", (4000, 3000))]
    times = [found_s({4: (graph, roofline(graph, c.devices[0]))}, c) for c in clusters]
    assert times[0] == pytest.approx(times[1], rel=1e-6)


def test_groups_are_of_one_kind_and_what_they_do_not_fill_stays_idle() -> None:
    cluster = parse_cluster("1x8xh100-80gb+1x6xv100-32gb")
    sizes = {layout.group: layout.axes.pp for layout in all_layouts(cluster, [48], ("1f1b",), 64)}
    assert sizes == {1: 14, 2: 7, 3: 2, 4: 2, 6: 1, 8: 1}
    groups = grouped(cluster, 4)
    assert groups is not None
    assert [d.name for d in groups.devices] == ["cuda:0", "cuda:4"]
    assert grouped(cluster, 7) is None


def test_devices_of_a_kind_keep_their_nodes_and_links() -> None:
    cluster = parse_cluster("2x4xh100-80gb+1x2xv100-32gb+1x4xh100-80gb")
    kind = kinds_of(cluster)[0]
    alike = of_kind(cluster, *kind)
    assert len(alike.devices) == 12
    assert [alike.node_of(rank) for rank in (0, 3, 4, 8, 11)] == [0, 0, 1, 2, 2]
    assert alike.inner == cluster.inner
    of = partial(of_kind, cluster)
    assert of(*kinds_of(cluster)[1]).inner == cluster.parts[1].inner


def test_a_plan_may_leave_slow_devices_idle() -> None:
    """One unit cannot be divided: a second stage on a slow device is no help."""
    models = {4: model([9], 4)}
    found = search(PlanRequest(batch_size=BATCH), models, small(TWO, (9000, 9000)))
    assert {stage.device for stage in found.stages} == {"cuda:2"}


def test_a_plan_says_what_each_kind_does_and_who_is_idle() -> None:
    models = {4: model([4, 4, 1, 1], 4)}
    whole = search(PlanRequest(batch_size=BATCH), models, small(THREE, (9000,) * 3))
    one = search(PlanRequest(batch_size=BATCH), {4: model([9], 4)}, small(TWO, (9000, 9000)))
    busy, idle = (
        {"stages": (0,), "devices": 2, "busy_devices": 2, "flops_share": 1.0},
        {"stages": (), "devices": 2, "busy_devices": 0, "flops_share": 0.0},
    )
    kinds = {use.kind: use.model_dump(exclude={"code", "kind"}) for use in findings(one, DeviceKindUse)}
    assert (kinds["a100-40gb"], kinds["v100-32gb"]) == (busy, idle)
    assert len(findings(whole, DeviceKindUse)) >= 3
