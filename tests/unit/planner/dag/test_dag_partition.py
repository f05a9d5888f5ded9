"""Oracles: all splits of small DAGs; for large ones that what is called optimal meets a bound or HiGHS."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dag_planner import assert_split, compare_bottleneck
from dag_problems import Manner, Problem, brute_force_bottleneck, dags, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import BadOption
from outsize.planner.dag.dag import Dag, Units, members
from outsize.planner.dag.ideals import between
from outsize.planner.dag.local_search import random_split
from outsize.planner.dag.partition import lower_bound, split_dag

few = settings(max_examples=30, derandomize=True, deadline=None)


def is_downset(dag: Dag, units: Units) -> bool:
    """Whether the predecessors of all members are members."""
    return all(dag.before[u] & ~units == 0 for u in members(units))


@settings(max_examples=120, derandomize=True, deadline=None)
@given(problems())
def test_same_bottleneck_as_trying_all_splits(problem: Problem) -> None:
    compare_bottleneck(problem)


@few
@given(problems())
def test_without_room_for_the_lattice_it_says_how_far_it_may_be_off(problem: Problem) -> None:
    dag = Dag.of(problem.seconds, problem.edges)
    best = brute_force_bottleneck(problem, (0,) * problem.units)
    split = split_dag(dag, problem.stages, most_downsets=1)
    assert_split(problem, split.stages, split.ticks)
    assert split.bound <= best <= split.ticks
    assert (split.gap == 0) == (split.ticks == split.bound)


@few
@given(problems(), st.integers(1, 3))
def test_one_more_stage_never_hurts(problem: Problem, more: int) -> None:
    dag = Dag.of(problem.seconds, problem.edges)
    for crossing in ((), problem.boundary):
        fewer = split_dag(dag, problem.stages, crossing)
        assert split_dag(dag, problem.stages + more, crossing).ticks <= fewer.ticks


@few
@given(problems(), st.sampled_from([3, 1000]))
def test_scaling_times_scales(problem: Problem, factor: int) -> None:
    plain = split_dag(Dag.of(problem.seconds, problem.edges), problem.stages)
    larger = Dag.of([factor * x for x in problem.seconds], problem.edges)
    assert split_dag(larger, problem.stages).ticks == factor * plain.ticks


def branches(cells: int, width: int, depth: int, seed: int = 0) -> Problem:
    """Cells of parallel branches, each fed by the two cells before: more downsets than can be listed."""
    generator = np.random.default_rng(seed)
    edges: list[tuple[int, int]] = []
    joins: list[int] = []
    count = 0
    for _ in range(cells):
        ends = []
        for branch in range(width):
            if joins:
                edges.append((joins[-1 - branch % min(2, len(joins))], count))
            edges += [(count + d, count + d + 1) for d in range(depth - 1)]
            count += depth
            ends.append(count - 1)
        edges += [(end, count) for end in ends]
        joins.append(count)
        count += 1
    seconds = tuple(generator.integers(50, 400, count).tolist())
    zeros = (0,) * count
    return replace(
        _EMPTY, units=count, edges=tuple(edges), manners=(replace(_MANNER, steady=seconds),), fixed=zeros
    )


_MANNER = Manner((), (), ())
_EMPTY = Problem(0, (), 4, 1, (), (), (_MANNER,), ())


def test_a_wide_network_is_split_into_equal_stages_and_proved() -> None:
    problem = branches(cells=8, width=7, depth=5)
    dag = Dag.of(problem.seconds, problem.edges)
    split = split_dag(dag, 4, most_downsets=2000)
    assert split.gap == 0
    assert split.ticks == lower_bound(dag, 4)
    assert_split(problem, split.stages, split.ticks)


def test_the_same_split_every_time() -> None:
    problem = branches(cells=4, width=6, depth=4)
    dag = Dag.of(problem.seconds, problem.edges)
    assert split_dag(dag, 4, most_downsets=500) == split_dag(dag, 4, most_downsets=500)


@few
@given(problems())
def test_a_hunt_finds_only_what_keeps_the_limit(problem: Problem) -> None:
    dag = Dag.of(problem.seconds, problem.edges)
    limit = lower_bound(dag, problem.stages) + 2
    chain = random_split(dag, problem.boundary, problem.stages, limit)
    best = brute_force_bottleneck(problem, problem.boundary)
    assert chain is None or best <= limit
    for low, high in zip(chain or (), (chain or ())[1:], strict=False):
        assert low & ~high == 0
        assert is_downset(dag, high)
        assert dag.weight(high & ~low) <= limit


@few
@given(dags(8))
def test_what_is_forced_encloses_every_split_under_the_limit(
    graph: tuple[int, tuple[tuple[int, int], ...]],
) -> None:
    n, edges = graph
    dag = Dag.of([1 + u % 3 for u in range(n)], edges)
    split = split_dag(dag, 3)
    least, most = dag.forced(3, split.ticks)
    done = 0
    for s, units in enumerate(split.stages, start=1):
        done |= units
        if len(split.stages) == 3:
            assert least[s] & ~done == 0
            assert done & ~most[s] == 0


@few
@given(dags(8))
def test_all_downsets_are_listed_and_no_other(graph: tuple[int, tuple[tuple[int, int], ...]]) -> None:
    n, edges = graph
    dag = Dag.of([1] * n, edges)
    lattice = between(dag, dag, [1] * n, 0, dag.everything, 1 << n)
    assert lattice is not None
    assert sorted(lattice.downsets) == [d for d in range(1 << n) if is_downset(dag, d)]
    for downset, crossing in zip(lattice.downsets, lattice.crossing.tolist(), strict=True):
        assert crossing == sum(1 for u in members(downset) if dag.after[u] & ~downset)


def test_weightless_units_join_their_neighbours() -> None:
    dag = Dag.of([3, 0, 2], [(0, 1), (1, 2)])
    small, kept = dag.without_weightless()
    assert kept == (0, 2)
    assert small.after == (0b10, 0)


def test_a_cycle_a_negative_weight_and_no_stage_are_refused() -> None:
    with pytest.raises(BadOption, match="cycle"):
        Dag.of([1, 1], [(0, 1), (1, 0)])
    with pytest.raises(BadOption, match="no time"):
        Dag.of([1, -1], [])
    with pytest.raises(BadOption, match="0 stages"):
        split_dag(Dag.of([1], []), 0)
