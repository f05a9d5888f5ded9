"""Choices come by ascending sharp bounds, and no bound is sharpened that cannot matter."""

from __future__ import annotations

from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.planner.bounds.best_first import BestFirst, Bounded

Steps = list[list[float]]
"""Holds for each choice its bounds, each sharper than the one before."""
steps = st.lists(
    st.lists(st.integers(0, 20).map(float), min_size=1, max_size=4).map(sorted), min_size=0, max_size=8
)


def queue_of(bounds: Steps, sharpened: list[int]) -> BestFirst:
    """A queue that goes on to the next bound of a choice, and writes down of which."""
    level = [0] * len(bounds)

    def sharper(choice: Bounded, next_s: float) -> Bounded:
        number = choice.number
        sharpened.append(number)
        level[number] = min(level[number] + 1, len(bounds[number]) - 1)
        last = level[number] == len(bounds[number]) - 1
        return Bounded(bounds[number][level[number]], last, number)

    return BestFirst([each[0] for each in bounds], sharper)


def taken_from(queue: BestFirst, most_s: float = inf) -> list[Bounded]:
    """All that are taken while the least bound is at most this."""
    taken = list[Bounded]()
    while not queue.is_empty and queue.least_s <= most_s:
        if (choice := queue.pop()) is not None:
            taken.append(choice)
    return taken


@settings(max_examples=200, derandomize=True, deadline=None)
@given(steps)
def test_choices_come_as_if_all_bounds_were_sharpened_and_sorted(bounds: Steps) -> None:
    taken = taken_from(queue_of(bounds, []))
    assert [choice.least_s for choice in taken] == sorted(each[-1] for each in bounds)
    assert sorted(choice.number for choice in taken) == list(range(len(bounds)))


@settings(max_examples=200, derandomize=True, deadline=None)
@given(steps, st.integers(0, 20).map(float))
def test_what_is_taken_up_to_a_limit_is_all_that_is_within_it(bounds: Steps, most_s: float) -> None:
    sharpened = list[int]()
    queue = queue_of(bounds, sharpened)
    taken = taken_from(queue, most_s)
    assert {choice.number for choice in taken} == {n for n, each in enumerate(bounds) if each[-1] <= most_s}
    assert all(bounds[number][0] <= most_s for number in sharpened), "only what could be within it"
    assert all(choice.least_s > most_s for choice in queue.waiting)


def test_the_least_is_not_sharpened_once_it_is_above_another() -> None:
    sharpened = list[int]()
    queue = queue_of([[1.0, 9.0, 10.0], [2.0, 3.0]], sharpened)
    first = next(choice for _ in range(9) if (choice := queue.pop()) is not None)
    assert (first.number, first.least_s) == (1, 3.0)
    assert sharpened == [0, 1], "the other's second bound is above it, and its third was never asked for"
