"""Stragglers of a run, from the paces of its ranks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.ops.watchdog.paces import LinkPace, RankPaces
from outsize.ops.watchdog.stragglers import SAMPLES, Stragglers
from outsize.ops.watchdog.words import slow
from outsize.run.progress import Pace, Straggler

FIRST = SAMPLES[0] - 1  # the step in which a rank that is slow from the beginning is named


def named(
    seconds: list[list[float]],
    planned_s: float = 0.2,
    inputs: list[list[float]] | None = None,
    waits: list[list[float]] | None = None,
) -> list[Straggler]:
    """What is said of steps in which the ranks compute for `seconds`, one list a step, and wait for a core
    in `waits` of them.
    """
    stragglers, found = Stragglers(), list[Straggler | None]()
    for step, of_ranks in enumerate(seconds):
        gaps, waited = ([0.0] * len(of_ranks) if rows is None else rows[step] for rows in (inputs, waits))
        steps = [Pace(step, s, gaps[r], waited[r]) for r, s in enumerate(of_ranks)]
        paces = {r: RankPaces((r,), planned_s, (pace,)) for r, pace in enumerate(steps)}
        found.append(stragglers.look(paces))
    return [one for one in found if one is not None]


def test_a_rank_that_takes_twice_as_long_is_named_once() -> None:
    (one,) = named([[0.2, 0.4, 0.2]] * 40)
    assert (one.rank, one.stages, one.cause, one.step) == (1, (1,), "compute", FIRST)
    assert slow(one, "node1") == (
        "outsize: rank 1 (stage 1) holds up the others in step 7: it computes 2.0x as long as the others, "
        "by the plan's seconds (compute). Next: look at what else runs on node1, or outsize tune MODEL for "
        "a plan that fits its speed"
    )


def test_on_a_machine_that_others_use_it_is_named_within_ten_steps() -> None:
    """Each step of each rank waits for a core, for as long as it computes in the mean."""
    for seed in range(50):
        chance = random.Random(seed)
        waits = [[chance.expovariate(1 / 0.2) for _ in range(4)] for _ in range(10)]
        seconds = [[(0.4 if r == 2 else 0.2) + wait for r, wait in enumerate(row)] for row in waits]
        found = named(seconds, waits=waits)
        assert [(one.rank, one.cause) for one in found] == [(2, "compute")], seed


def test_a_rank_whose_cores_others_take_is_named_for_that() -> None:
    (one,) = named([[0.2, 0.5]] * 10, waits=[[0.0, 0.3]] * 10)
    assert (one.rank, one.core_wait_s) == (1, 0.3)
    assert "2.5x as long" in slow(one, "node1")
    assert "by the plan's seconds, 0.30 s a step of it in wait for a core (compute)" in slow(one, "node1")


def test_who_computes_longer_but_is_held_up_by_who_waits_for_a_core_is_not_named() -> None:
    assert named([[0.56, 0.4]] * 20, waits=[[0.36, 0.0]] * 20) == []


def test_without_a_plan_the_own_fastest_step_counts() -> None:
    assert named([[0.2, 0.3]] * 12, planned_s=0) == []  # it is the larger stage
    (one,) = named([[0.2, 0.3]] * 12 + [[0.2, 0.7]] * 10, planned_s=0)
    assert one.rank == 1
    assert one.step < 12 + 10


def test_a_plan_that_is_far_off_does_not_count() -> None:
    assert named([[0.2, 0.4]] * 20, planned_s=1e-4) == []


def test_slow_input_is_told_from_slow_computing() -> None:
    (one,) = named([[0.2, 0.2]] * 12, inputs=[[0.5, 0.01]] * 12)
    assert (one.rank, one.cause) == (0, "input")
    assert "its code before a step takes 0.50 s, that of others 0.01 s (input)" in slow(one, "node1")


@pytest.mark.parametrize(
    ("computes_s", "inputs_s"),
    [(0.01, [0.57, 0.56]), (0.05, [0.89, 0.60]), (0.001, [0.011, 0.0]), (0.4, [0.1, 0.0])],
)
def test_inputs_that_are_alike_or_short_name_nobody(computes_s: float, inputs_s: list[float]) -> None:
    assert named([[computes_s, computes_s]] * 50, planned_s=0, inputs=[inputs_s] * 50) == []


@pytest.mark.parametrize(
    "seconds",
    [
        [[0.2, 0.2]] * 40,
        [[0.4, 0.4]] * 40,  # the machine is slower than planned
        [[0.2, 0.26]] * 40,
        [[0.2, 0.2], [0.2, 0.2], [0.2, 0.9], [0.2, 0.2]] * 9,  # single disturbed steps
        [[0.9, 0.2], [0.2, 0.9]] * 20,
        [[0.001, 0.004]] * 40,  # too small to matter
        [[0.2]] * 40,
    ],
)
def test_nobody_is_named_in_vain(seconds: list[list[float]]) -> None:
    assert named(seconds) == []


def test_a_step_that_was_seen_counts_once() -> None:
    stragglers = Stragglers()
    paces = {rank: RankPaces((), 0.2, (Pace(7, 0.2 * (1 + rank), 0.0),)) for rank in range(2)}
    assert [stragglers.look(paces) for _ in range(20)] == [None] * 20


@given(st.integers(2, 8), st.integers(0, 30), st.data())
def test_who_is_twice_as_slow_is_named_within_ten_steps(ranks: int, at: int, data: st.DataObject) -> None:
    slow_rank = data.draw(st.integers(0, ranks - 1))
    chance = random.Random(data.draw(st.integers(0, 2**32)))
    steps = [
        [0.2 * chance.uniform(0.9, 1.1) * (1 + (r == slow_rank and step >= at)) for r in range(ranks)]
        for step in range(at + 10)
    ]
    (one,) = named(steps)
    assert (one.rank, one.cause) == (slow_rank, "compute")
    assert at <= one.step < at + 10


NOISES: dict[str, Callable[[random.Random], float]] = {
    "even": lambda chance: chance.lognormvariate(0, 0.1),
    "uneven": lambda chance: chance.lognormvariate(0, 0.4) * (5 if chance.random() < 0.05 else 1),
    "waiting": lambda chance: chance.expovariate(1),
}


@pytest.mark.parametrize(("ranks", "noise"), [(2, "even"), (2, "waiting"), (4, "uneven")])
@pytest.mark.sample("2-even", "4-uneven")
def test_an_hour_of_noisy_steps_names_nobody(ranks: int, noise: str) -> None:
    """3,600 steps of a second by a clock that is made up: computing and input of each rank are uneven."""
    chance, drawn = random.Random(ranks), NOISES[noise]
    computing = [[0.3 * NOISES["uneven"](chance) for _ in range(ranks)] for _ in range(3600)]
    inputs = [[0.4 * drawn(chance) for _ in range(ranks)] for _ in range(3600)]
    assert named(computing, 0.25, inputs) == []


def with_links(held: list[float], transit_s: float = 0.05) -> list[Straggler]:
    """What is said where a link holds up the second rank for so many seconds of each step."""
    stragglers, found = Stragglers(), list[Straggler | None]()
    for step, held_s in enumerate(held):
        link = LinkPace(step, 0, held_s, transit_s)
        paces = {r: RankPaces((r,), 0.2, (Pace(step, 0.2, 0.0),), (link,) * r) for r in range(2)}
        found.append(stragglers.look(paces))
    return [one for one in found if one is not None]


def test_a_slow_link_is_a_cause() -> None:
    (one,) = with_links([0.3, 0.31, 0.29, 0.3] * 5)
    assert (one.rank, one.peer, one.cause, one.step) == (1, 0, "link", FIRST)
    assert slow(one, "node1", "node0") == (
        "outsize: the link between rank 1 (stage 1) and rank 0 holds up the others in step 7: they wait "
        "0.30 s a step for messages that are sent, 50 ms each (link). Next: measure the network between "
        "node1 and node0; GLOO_SOCKET_IFNAME chooses it"
    )


@pytest.mark.parametrize("held", [[0.05] * 40, [0.0, 0.0, 0.0, 0.9] * 10, [0.3] * (SAMPLES[0] - 1)])
def test_a_link_that_costs_little_or_now_and_then_is_not_told(held: list[float]) -> None:
    assert with_links(held) == []


def test_paces_travel_as_text() -> None:
    steps = (Pace(3, 0.5, 0.125, 0.25, 0.0625), Pace(4, 0.5, 0.25))
    paces = RankPaces((1, 3), 0.25, steps, (LinkPace(3, 2, 0.5, 0.25),))
    assert RankPaces.from_json(paces.to_json()) == paces
