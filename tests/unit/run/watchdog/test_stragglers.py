"""Stragglers of a run, from the paces of its ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.run.watchdog.stragglers import SAMPLES, Pace, Straggler, Stragglers
from outsize.run.watchdog.words import slow


def named(
    seconds: list[list[float]], planned_s: float = 0.2, inputs: list[float] | None = None
) -> list[Straggler]:
    """What is said of steps in which the ranks compute for `seconds`, one list a step."""
    stragglers, found = Stragglers(), list[Straggler | None]()
    for step, of_ranks in enumerate(seconds):
        gaps = inputs or [0.0] * len(of_ranks)
        paces = {r: Pace(step, s, planned_s, gaps[r], (r,)) for r, s in enumerate(of_ranks)}
        found.append(stragglers.look(paces))
    return [one for one in found if one is not None]


def test_a_rank_that_takes_twice_as_long_is_named_once() -> None:
    (one,) = named([[0.2, 0.4, 0.2]] * 10)
    assert (one.rank, one.stages, one.cause, one.step) == (1, (1,), "compute", SAMPLES - 1)
    assert slow(one, "node1") == (
        "outsize: rank 1 (stage 1) holds up the others in step 2: it computes 2.0x as long as the others, "
        "by the plan's seconds (compute). Next: look at what else runs on node1, or outsize tune MODEL for "
        "a plan that fits its speed"
    )


def test_without_a_plan_the_own_fastest_step_counts() -> None:
    assert named([[0.2, 0.3]] * 5, planned_s=0) == []  # it is the larger stage
    (one,) = named([[0.2, 0.3]] * 5 + [[0.2, 0.7]] * 5, planned_s=0)
    assert (one.rank, one.step) == (1, 5 + SAMPLES - 1)


def test_a_plan_that_is_far_off_does_not_count() -> None:
    assert named([[0.2, 0.4]] * 9, planned_s=1e-4) == []


def test_slow_input_is_told_from_slow_computing() -> None:
    (one,) = named([[0.2, 0.2]] * 5, inputs=[0.5, 0.01])
    assert (one.rank, one.cause) == (0, "input")
    assert "its code before a step takes 0.50 s, that of others 0.01 s (input)" in slow(one, "node1")


@pytest.mark.parametrize(
    "seconds",
    [
        [[0.2, 0.2]] * 9,
        [[0.4, 0.4]] * 9,  # the machine is slower than planned
        [[0.2, 0.26]] * 9,
        [[0.2, 0.2], [0.2, 0.2], [0.2, 0.9], [0.2, 0.2]] * 4,  # single disturbed steps
        [[0.9, 0.2], [0.2, 0.9]] * 9,
        [[0.001, 0.004]] * 9,  # too small to matter
        [[0.2]] * 9,
    ],
)
def test_nobody_is_named_in_vain(seconds: list[list[float]]) -> None:
    assert named(seconds) == []


def test_a_step_that_was_seen_counts_once() -> None:
    stragglers = Stragglers()
    paces = {rank: Pace(7, 0.2 * (1 + rank), 0.2, 0.0) for rank in range(2)}
    assert [stragglers.look(paces) for _ in range(9)] == [None] * 9


@given(st.integers(2, 8), st.data())
def test_who_is_twice_as_slow_is_found_in_noise(ranks: int, data: st.DataObject) -> None:
    slow_rank = data.draw(st.integers(0, ranks - 1))
    noise = st.floats(0.9, 1.1)
    steps = [[0.2 * data.draw(noise) * (1 + (r == slow_rank)) for r in range(ranks)] for _ in range(10)]
    assert [one.rank for one in named(steps)] == [slow_rank]


def test_a_pace_travels_as_text() -> None:
    pace = Pace(3, 0.5, 0.25, 0.125, (1, 3))
    assert Pace.from_json(pace.to_json()) == pace
