"""Which small meshes rehearse a plan: each pair of axes meets, and long axes have two neighbours."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest

from outsize.axes.registry import AXES
from outsize.ir.plan import Axes
from outsize.ops.rehearsal.worlds import MOST_RANKS, pairs_met, small_worlds

NAMES = [axis.name for axis in AXES]
PLANS = [
    {"pp": 16},
    {"dp_replicate": 128},
    {"pp": 4, "tp": 4},
    {"pp": 2, "dp_shard": 8, "tp": 8},
    {"pp": 8, "dp_shard": 2, "ep": 8},
    {"pp": 4, "dp_replicate": 4, "tp": 2, "cp": 4},
    {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "ep": 2, "tp": 8},
    {"pp": 11, "cp": 3},
]


@pytest.mark.parametrize("sizes", PLANS, ids=str)
def test_pairs_meet_and_long_axes_stay_long(sizes: dict[str, int]) -> None:
    plan = Axes(**sizes)
    worlds = small_worlds(plan)
    assert all(1 < world.world_size <= MOST_RANKS for world in worlds)
    assert all(world.of(axis) <= plan.of(axis) for world in worlds for axis in AXES)
    met, apart = pairs_met(plan, worlds)
    assert not apart
    assert len(met) == len(list(combinations(sizes, 2)))
    for axis in AXES:
        assert max(world.of(axis) for world in worlds) >= min(3, plan.of(axis))
        if not axis.cuts_stages and plan.of(axis) not in (3, 5, 7, 11):
            assert all(plan.of(axis) % world.of(axis) == 0 for world in worlds)


def test_three_axes_meet_at_once_where_eight_ranks_hold_them() -> None:
    first = small_worlds(Axes(pp=4, dp_shard=4, tp=8))[0]
    assert first.used == {"pp": 2, "dp_shard": 2, "tp": 2}


def test_a_small_plan_is_its_own_world() -> None:
    plan = Axes(pp=2, tp=4)
    assert small_worlds(plan) == [plan]


def test_stages_come_before_replicas() -> None:
    assert small_worlds(Axes(pp=16)) == [Axes(pp=8)]
    assert small_worlds(Axes(pp=4, dp_replicate=4))[0] == Axes(pp=4, dp_replicate=2)


def test_rows_keep_their_ranks() -> None:
    worlds = small_worlds(Axes(pp=4, tp=4), keeps_stages=True)
    assert {world.pp for world in worlds} == {4}


def test_two_ranks_say_which_axes_never_meet() -> None:
    plan = Axes(pp=4, tp=4)
    worlds = small_worlds(plan, 2)
    assert [world.used for world in worlds] == [{"pp": 2}, {"tp": 2}]
    assert pairs_met(plan, worlds) == ([], [("pp", "tp")])


@pytest.mark.parametrize("sizes", [plan for plan in PLANS if len(plan) <= 3], ids=str)
def test_no_set_of_fewer_meshes_shows_as_much(sizes: dict[str, int]) -> None:
    """Oracle: all sets of meshes that are smaller by one."""
    plan = Axes(**sizes)
    worlds = small_worlds(plan)
    names = list(sizes)

    def shown(mesh: dict[str, int]) -> set[tuple[str, ...]]:
        used = [name for name in names if mesh[name] > 1]
        wide = {("wide", name) for name in used if mesh[name] >= 3}
        return {*combinations(used, 2), *wide, *((name,) for name in used)}

    wanted = shown(sizes)
    sides = [range(1, min(sizes[name], MOST_RANKS) + 1) for name in names]
    meshes = [dict(zip(names, each, strict=True)) for each in product(*sides) if prod(each) <= MOST_RANKS]
    features = {frozenset(shown(mesh)) for mesh in meshes}
    best = [each for each in features if not any(each < other for other in features)]
    assert set[tuple[str, ...]]().union(*(shown(world.model_dump()) for world in worlds)) >= wanted
    fewer = combinations(best, len(worlds) - 1) if len(worlds) > 1 else iter(())
    assert not any(set[tuple[str, ...]]().union(*each) >= wanted for each in fewer)
