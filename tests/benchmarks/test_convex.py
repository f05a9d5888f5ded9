"""Oracle: every convex split of small DAGs in every way to run; a checker recomputes time and peak."""

from __future__ import annotations

from dataclasses import replace

import pytest
from convex import Convex
from dag_planner import compare_step, planned, step_of
from dag_problems import Manner, Problem, brute_force_step, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.errors import BadOption
from outsize.planner.dag.dag import Dag

few = settings(max_examples=30, derandomize=True, deadline=None)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(problems())
def test_same_as_trying_all_splits_in_all_ways(problem: Problem) -> None:
    compare_step(problem)


def scaled(problem: Problem, factor: int) -> Problem:
    manners = tuple(
        replace(m, steady=tuple(factor * x for x in m.steady), once=tuple(factor * x for x in m.once))
        for m in problem.manners
    )
    return replace(problem, manners=manners, boundary=tuple(factor * x for x in problem.boundary))


def relabelled(problem: Problem, order: list[int]) -> Problem:
    """Unit order[i] becomes unit i."""
    place = {u: i for i, u in enumerate(order)}

    def moved(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(numbers[u] for u in order)

    manners = tuple(
        replace(m, steady=moved(m.steady), once=moved(m.once), held=moved(m.held)) for m in problem.manners
    )
    return replace(
        problem,
        edges=tuple((place[a], place[b]) for a, b in problem.edges),
        fixed=moved(problem.fixed),
        boundary=moved(problem.boundary),
        manners=manners,
    )


@few
@given(problems(), st.integers(0, 3), st.integers(1, 50))
def test_more_memory_never_hurts(problem: Problem, stage: int, more: int) -> None:
    rooms = [room + more * (s == stage) for s, room in enumerate(problem.rooms)]
    assert step_of(replace(problem, rooms=tuple(rooms))) <= step_of(problem)


@few
@given(problems(), st.integers(0, 5))
def test_a_faster_link_never_hurts(problem: Problem, less: int) -> None:
    faster = tuple(max(b - less, 0) for b in problem.boundary)
    assert step_of(replace(problem, boundary=faster)) <= step_of(problem)


@few
@given(problems(), st.sampled_from([2, 1024]))
def test_scaling_all_times_scales_the_step(problem: Problem, factor: int) -> None:
    choice, larger = planned(problem)[1], planned(scaled(problem, factor))[1]
    assert (choice and (choice.bounds, choice.ways)) == (larger and (larger.bounds, larger.ways))
    assert step_of(scaled(problem, factor)) == factor * step_of(problem)


@few
@given(problems(), st.randoms(use_true_random=False))
def test_relabelling_changes_nothing(problem: Problem, random: object) -> None:
    order = list(range(problem.units))
    random.shuffle(order)  # pyright: ignore[reportAttributeAccessIssue]
    assert step_of(relabelled(problem, order)) == step_of(problem)


def test_too_many_downsets_are_refused_and_not_sampled() -> None:
    with pytest.raises(BadOption, match="more than 100 downsets"):
        Convex.of(Dag.of([1] * 9, []), most=100)


def test_a_plan_that_must_mix_ways_by_position() -> None:
    """Two units, equal stages: the first holds two microbatches and must recompute, the second need not."""
    plain, anew = Manner((4, 4), (4, 4), (10, 10)), Manner((5, 5), (5, 5), (1, 1))
    problem = Problem(2, ((0, 1),), 2, 8, (0, 0), (0, 0), (plain, anew), (12, 12))
    choice = planned(problem)[1]
    assert choice is not None
    assert choice.ways == (1, 0)
    assert choice.step_s == brute_force_step(problem) == 9 + 7 * 5
