"""Layouts counted by hand, and the links between groups."""

from __future__ import annotations

from itertools import product

import pytest

from outsize.ir.cluster import parse_cluster
from outsize.ir.plan import Axes, Plan, ScheduleName
from outsize.planner.layout.layout import AxisChoices, Layout, all_layouts, grouped, host_layouts, pipelines
from outsize.policies.weights import HOSTED

ONE: tuple[ScheduleName, ...] = ("1f1b",)
Mesh = tuple[int, int, int, int, str]


def meshes(name: str, captured: int, units: int = 64) -> list[Mesh]:
    """(pp, dp_replicate, dp_shard, tp, weights) of all layouts under 1f1b."""
    found = all_layouts(parse_cluster(name), [captured], ONE, units)
    return [
        (a.pp, a.dp_replicate, a.dp_shard, a.tp, layout.weights) for layout in found for a in [layout.axes]
    ]


def test_two_devices_by_hand() -> None:
    assert sorted(meshes("2xcpu", 2)) == [
        (1, 1, 1, 2, "resident"),
        (1, 1, 2, 1, "resident"),
        (1, 1, 2, 1, "sharded"),
        (1, 2, 1, 1, "resident"),
        (2, 1, 1, 1, "resident"),
    ]


def test_two_nodes_of_two_by_hand() -> None:
    """Tensor parallel groups stay within a node; replicas share with all, or with those of their node."""
    alone = [(4, 1, 1, 1), (2, 1, 1, 2)]
    spread = [(1, 4, 1, 1), (2, 2, 1, 1), (1, 2, 1, 2)]
    shared = [(1, 1, 4, 1), (1, 2, 2, 1), (2, 1, 2, 1), (1, 1, 2, 2)]
    expected = {(*axes, "resident") for axes in alone + spread + shared} | {(*a, "sharded") for a in shared}
    found = meshes("2x2xcpu", 4)
    assert set(found) == expected
    assert len(found) == len(expected)


@pytest.mark.parametrize(("name", "count"), [("8xcpu", 64), ("2x6xcpu", 12), ("3x2xcpu", 18)])
def test_every_factorisation_is_there_once(name: str, count: int) -> None:
    cluster = parse_cluster(name)
    devices, per_node = len(cluster.devices), cluster.devices_per_node
    found = meshes(name, count)
    assert len(set(found)) == len(found)
    plain = {(pp, dp, tp) for pp, dp, shard, tp, _ in found if shard == 1}
    sizes = range(1, devices + 1)
    possible = {axes for axes in product(sizes, repeat=3) if axes[0] * axes[1] * axes[2] == devices}
    assert plain == {axes for axes in possible if per_node % axes[2] == 0 and count % axes[1] == 0}
    for pp, dp, shard, tp, weights in found:
        assert pp * dp * shard * tp == devices
        assert weights == "resident" or shard > 1
        assert dp == 1 or shard * tp <= per_node, "either all replicas share, or those of a node"


@pytest.mark.parametrize("name", ["8xcpu", "2x4xcpu"])
def test_tokens_are_shared_at_the_sizes_given_and_with_the_smallest_microbatches(name: str) -> None:
    cluster = parse_cluster(name)
    plain = list(all_layouts(cluster, [8, 16], ONE, 64))
    found = list(all_layouts(cluster, [8, 16], ONE, 64, AxisChoices((1, 2, 4))))
    assert [layout for layout in found if layout.axes.cp == 1] == plain
    shared = [layout for layout in found if layout.axes.cp > 1]
    assert {layout.captured for layout in shared} == {16}
    assert {layout.axes.cp for layout in shared} == {2, 4}
    for layout in shared:
        axes = layout.axes
        assert axes.world_size == 8
        assert cluster.devices_per_node % axes.tp == 0
        assert layout.microbatches * axes.replicas == 16, "samples are shared by replicas alone"
        assert (layout.microbatch_ranks, layout.group) == (axes.tp * axes.cp, 8 // axes.pp)
    assert {layout.axes.tp for layout in shared if layout.axes.cp == 4} == {1, 2}
    assert len(set(shared)) == len(shared)


def test_experts_are_over_ep_and_tp_and_each_rank_has_one() -> None:
    """Of four experts; every factorisation of eight devices with them is there once, replicas all share or
    none, and cp is as in layouts without ep.
    """
    cluster = parse_cluster("2x4xcpu")
    plain = list(all_layouts(cluster, [8, 16], ONE, 64, AxisChoices((1, 2))))
    found = list(all_layouts(cluster, [8, 16], ONE, 64, AxisChoices((1, 2), (2, 4))))
    assert [layout for layout in found if layout.axes.ep == 1] == plain
    divided = [layout for layout in found if layout.axes.ep > 1]
    assert len(set(divided)) == len(divided)
    sizes = (1, 2, 4, 8)
    expected = {
        (pp, dp, cp, tp, ep)
        for pp, dp, cp, tp, ep in product(sizes, sizes, (1, 2), sizes, (2, 4))
        if pp * dp * cp * tp * ep == 8 and tp * ep <= 4
    }
    here = {(a.pp, a.dp_replicate * a.dp_shard, a.cp, a.tp, a.ep) for a in (x.axes for x in divided)}
    assert here == expected
    for layout in divided:
        axes = layout.axes
        assert 1 in (axes.dp_replicate, axes.dp_shard)
        assert layout.captured == layout.microbatches * axes.replicas
        assert axes.cp == 1 or layout.captured == 16
        assert layout.weights == "resident" or axes.dp_shard * axes.cp > 1


def test_weights_on_the_host_are_for_one_device_here() -> None:
    """Several take turns (looped.py)."""
    names: tuple[ScheduleName, ...] = ("1f1b", "gpipe")
    found = list(host_layouts(parse_cluster("2xh100-80gb"), [1, 2, 4], names, 64))
    assert {(layout.axes.world_size, layout.hosted) for layout in found} == {(1, True)}
    assert len(found) == len(HOSTED) * 6
    alone = host_layouts(parse_cluster("1xh100-80gb"), [2], names, 64)
    assert [(x.schedule, x.weights) for x in alone] == list(product(names, HOSTED))


def test_a_cpu_is_its_own_host() -> None:
    assert not list(host_layouts(parse_cluster("2xcpu"), [2], ("1f1b",), 64))


def test_replicas_share_the_microbatches() -> None:
    """Captured at 4 and 6 microbatches of the batch: four replicas can have one each, not one and a half."""
    found = list(all_layouts(parse_cluster("4xcpu"), [6, 4], ONE, 64))
    four = [layout for layout in found if layout.replicas == 4]
    assert {(layout.microbatches, layout.captured) for layout in four} == {(1, 4)}
    assert all(layout.microbatches * layout.replicas == layout.captured for layout in found)
    assert {layout.captured for layout in found if layout.replicas == 2} == {4, 6}


def test_a_stage_has_a_unit_and_one_rank_no_bubble() -> None:
    assert all(pp <= 2 for pp, *_ in meshes("4xcpu", 4, units=3))
    names: tuple[ScheduleName, ...] = ("1f1b", "gpipe")
    found = all_layouts(parse_cluster("2xcpu"), [2], names, 8)
    assert {layout.schedule for layout in found if layout.axes.pp == 1} == {"1f1b"}


def test_chunks_need_ranks_that_are_busy_and_units() -> None:
    counts = [(1, 1), (2, 2), (8, 8)]
    names: tuple[ScheduleName, ...] = ("interleaved",)
    assert [(x.stages, x.chunks, x.microbatches) for x in pipelines(Axes(pp=2), counts, names, 64)] == [
        (4, 2, 2), (8, 4, 2), (4, 2, 8), (8, 4, 8),
    ]  # fmt: skip
    assert [x.stages for x in pipelines(Axes(pp=2), [(2, 2)], names, 7)] == [4]
    assert not list(pipelines(Axes(pp=1), counts, names, 64))
    layout = Layout(Axes(pp=2, tp=2, dp_shard=3), 4, "interleaved", 8, 24)
    assert (layout.ranks, layout.chunks, layout.group, layout.replicas) == ((0, 1, 0, 1), 2, 6, 3)


@pytest.mark.parametrize(
    ("name", "group"), [("2x4xa100-80gb", 2), ("2x4xa100-80gb", 4), ("4x2xa100-80gb", 4), ("8xa100-80gb", 2)]
)
def test_groups_have_the_links_of_their_devices(name: str, group: int) -> None:
    cluster = parse_cluster(name)
    found = grouped(cluster, group)
    assert found is not None
    assert [d.name for d in found.devices] == [f"cuda:{rank}" for rank in range(0, 8, group)]
    pairs = [(a, b) for a in range(8 // group) for b in range(8 // group) if a != b]
    for a, b in pairs:
        assert found.link(a, b) == cluster.link(a * group, b * group)


def test_groups_of_unequal_nodes_have_the_links_of_their_devices() -> None:
    cluster = parse_cluster("4xv100-32gb+4xa100-40gb")
    found = grouped(cluster, 2)
    assert found is not None
    assert found.link(0, 2) == cluster.link(0, 4) == cluster.outer
    assert found.link(0, 1) == cluster.link(0, 2)
    assert found.link(2, 3) == cluster.link(4, 6)


def test_a_group_does_not_straddle_nodes() -> None:
    three = parse_cluster("2x3xa100-80gb")
    assert grouped(three, 2) is None
    assert grouped(three, 4) is None
    assert grouped(three, 1) is three


def test_a_plan_says_its_layout() -> None:
    plan = Plan(
        model="toy",
        fingerprint="f0",
        cluster="8xcpu",
        axes=Axes(pp=2, dp_shard=4),
        batch_size=32,
        microbatches=4,
        schedule="gpipe",
        stages=(),
        weights="sharded",
    ).model_copy(update={"stages": ("a", "b", "c", "d")})
    assert Layout.of_plan(plan) == Layout(plan.axes, 4, "gpipe", 4, 4, "sharded")
