"""List schedules: never worse than those with names, near the best of all orders, within the room."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from outsize.ir.schedule import Action, Kind, Schedule, placed
from outsize.schedules.builders import build
from outsize.schedules.check import check, check_compute
from outsize.schedules.compose import Composed, compose, played_s
from outsize.schedules.grid import listing
from outsize.schedules.job import Job, StageCost
from outsize.schedules.lower import lower


def job(
    ranks: Sequence[int],
    microbatches: int,
    costs: Sequence[StageCost],
    room: float,
    edges: Sequence[tuple[int, int]] | None = None,
    link_s: float = 0.0,
) -> Job:
    """A chain, or other edges; a microbatch in flight takes one byte of `room`."""
    along = list(pairwise(range(len(ranks)))) if edges is None else edges
    forward = {(a, b): link_s * (ranks[a] != ranks[b]) for a, b in along}
    backward = {(b, a): seconds for (a, b), seconds in forward.items()}
    held, rooms = (1,) * len(ranks), (room,) * (max(ranks) + 1)
    return Job(tuple(ranks), microbatches, tuple(costs), forward, backward, held, rooms)


def test_docstring_picture() -> None:
    found = compose(job((0, 1), 4, (StageCost(1, 2, 1), StageCost(2, 4, 2)), room=2))[0]
    assert found.step_s == 25
    assert listing(found.schedule) in (inspect.getdoc(compose) or "")


def random_costs(draw: random.Random, stages: int) -> list[StageCost]:
    def cost() -> StageCost:
        forward, inner, weight = (draw.choice((1, 2, 3, 4, 7)) for _ in range(3))
        return StageCost(forward, inner + weight, weight)

    return [cost() for _ in range(stages)]


def in_flight(schedule: Schedule) -> list[int]:
    """The most microbatches, of all stages together, that a rank has forwarded and not finished."""
    most = []
    for row in schedule.actions:
        held, peak = 0, 0
        for action in row:
            held += (action.kind is Kind.F) - (action.kind in (Kind.B, Kind.W))
            peak = max(peak, held)
        most.append(peak)
    return most


NAMED = [
    ("naive", 1),
    ("1f1b", 1),
    ("gpipe", 1),
    ("zero-bubble", 1),
    ("interleaved", 2),
    ("zero-bubble-v", 2),
]


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(8, 25))]
)
@pytest.mark.parametrize(("name", "chunks"), NAMED)
def test_never_worse_than_a_schedule_with_a_name(name: str, chunks: int, seed: int) -> None:
    """Same stages on the same ranks, on no rank more microbatches than the named one has on its fullest."""
    draw = random.Random(f"{name} {seed}")
    p, m = draw.choice((2, 3, 4)), draw.choice((1, 2, 4, 6, 8))
    ranks = placed(name, p * chunks, p)
    known = build(name, p * chunks, m, p)
    room = max(in_flight(known))
    given = job(ranks, m, random_costs(draw, p * chunks), room, link_s=draw.choice((0.0, 0.5)))
    best = compose(given, rivals=[known])[0]
    check_compute(best.schedule)
    assert best.step_s <= played_s(given, known) * (1 + 1e-9)
    assert max(in_flight(best.schedule)) <= room


def test_without_help_it_finds_what_the_named_ones_are() -> None:
    """Equal stages: the closed forms of families.py, at their memory."""
    for p, m in ((2, 4), (3, 5), (4, 8)):
        whole = [StageCost(1, 2)] * p
        assert compose(job(range(p), m, whole, p))[0].step_s == 3 * (m + p - 1)
        split = [StageCost(1, 2, 1)] * p
        assert compose(job(range(p), m, split, p))[0].step_s <= 3 * m + 2 * (p - 1)


def orders(given: Job, rows: list[list[Action]], left: set[Action]) -> Iterator[list[list[Action]]]:
    """Every schedule with whole backwards, by what may run next on any rank; each is found often."""
    if not left:
        yield rows
        return
    for action in sorted(left, key=str):
        earlier = Action(action.stage, action.kind, action.microbatch - 1)
        needs = [earlier] if action.microbatch else []
        if action.kind is Kind.B:
            needs += [Action(action.stage, Kind.F, action.microbatch)]
        sources = given.before_forward if action.kind is Kind.F else given.before_backward
        needs += [Action(source, action.kind, action.microbatch) for source, _ in sources[action.stage]]
        if left.isdisjoint(needs):
            row = rows[given.ranks[action.stage]]
            row.append(action)
            yield from orders(given, rows, left - {action})
            row.pop()


@pytest.mark.parametrize("seed", range(12))
def test_near_the_best_of_all_orders(seed: int) -> None:
    draw = random.Random(seed)
    ranks, edges = draw.choice(
        [((0, 1), [(0, 1)]), ((0, 1, 1), [(0, 2), (1, 2)]), ((0, 1, 0), [(0, 1), (1, 2)])]
    )
    m = 2 if len(ranks) == 2 else 1
    costs = [StageCost(c.forward_s, c.backward_s) for c in random_costs(draw, len(ranks))]
    given = job(ranks, m, costs, 99, edges, draw.choice((0.0, 1.0)))
    everything = {Action(s, k, mb) for s in range(len(ranks)) for k in (Kind.F, Kind.B) for mb in range(m)}
    rows = [[] for _ in given.on_rank]
    found = {tuple(map(tuple, order)) for order in orders(given, rows, everything)}
    best = min(played_s(given, Schedule("any", m, order)) for order in found)
    assert compose(given)[0].step_s == pytest.approx(best)


def test_branches_run_at_the_same_time_already_with_one_microbatch() -> None:
    """Two towers of 10 + 20 and a head of 1 + 2 on the second rank: towers beside each other."""
    towers, head = StageCost(10, 20), StageCost(1, 2)
    given = job((0, 1, 1), 1, [towers, towers, head], 9, [(0, 2), (1, 2)], link_s=0.5)
    best = compose(given)[0]
    assert best.step_s == 10 + 0.5 + 3 + 0.5 + 20
    assert best.schedule.to_csv() == "0F0,0B0\n1F0,2F0,2B0,1B0\n"
    edges = frozenset({(0, 2), (1, 2)}), frozenset({(2, 0), (2, 1)})
    check(lower(best.schedule, *edges), *edges)


def test_backwards_stay_whole_where_splitting_does_not_pay() -> None:
    def is_split(found: Composed) -> bool:
        return any(action.kind is Kind.W for row in found.schedule.actions for action in row)

    assert not is_split(compose(job((0,), 4, [StageCost(1, 2, 1)], 9))[0])
    assert is_split(compose(job((0, 1, 2, 3), 4, [StageCost(1, 2, 1)] * 4, 4))[0])
    costly = StageCost(1, 2, 1, split_s=1)
    assert not is_split(compose(job((0, 1, 2, 3), 4, [costly] * 4, 4))[0])


def test_a_rank_without_room_says_so_by_what_it_holds() -> None:
    """Three stages of one rank need room for one microbatch each; with less there is still a schedule."""
    given = job((0, 1, 0, 1, 0), 3, [StageCost(1, 2)] * 5, 1)
    best = compose(given)[0]
    check_compute(best.schedule)
    assert max(in_flight(best.schedule)) > 1
    assert max(in_flight(compose(job((0, 1, 0, 1, 0), 3, [StageCost(1, 2)] * 5, 3))[0].schedule)) == 3


def test_the_same_question_has_the_same_answer() -> None:
    costs = random_costs(random.Random(3), 8)
    first, second = (compose(job(placed("interleaved", 8, 4), 6, costs, 8, link_s=0.25))[0] for _ in range(2))
    assert first == second
