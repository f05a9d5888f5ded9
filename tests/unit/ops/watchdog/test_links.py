"""How long messages are under way between two ranks whose clocks differ."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch._C._distributed_c10d import HashStore

from outsize.ir.schedule import Kind
from outsize.ops.watchdog.links import MessageTimes, StepMessages, slowest_link
from outsize.ops.watchdog.pacing import Pacing
from outsize.run.progress import Progress, Straggler
from outsize.schedules.builders import build
from outsize.schedules.lower import lower

STAGES, MICROBATCHES = 2, 4
SCHEDULE = lower(build("1f1b", STAGES, MICROBATCHES), {(0, 1)}, {(1, 0)})


def played(transit_s: float, clocks: Sequence[float], late_s: float = 0.0) -> list[list[float]]:
    """The marks of both ranks' rows, each by its own clock; computing takes 0.1 s, and rank 0's forwards
    `late_s` more.
    """
    arrived: dict[str, float] = {}
    now, at = [1.0, 1.0], [0, 0]
    marks = [[0.0] * (3 * len(row)) for row in SCHEDULE.actions]
    while any(at[rank] < len(SCHEDULE.actions[rank]) for rank in range(STAGES)):
        for rank in range(STAGES):
            times = MessageTimes(SCHEDULE, rank, range(STAGES))
            names = {place: name for rows in times._receives.values() for place, name in rows}
            while at[rank] < len(SCHEDULE.actions[rank]):
                place, action = at[rank], SCHEDULE.actions[rank][at[rank]]
                if place in names and names[place] not in arrived:
                    break
                marks[rank][3 * place] = now[rank]
                if place in names:
                    now[rank] = marks[rank][3 * place + 1] = max(now[rank], arrived[names[place]])
                if action.kind in (Kind.F, Kind.B):
                    now[rank] += 0.1 + late_s * (rank == 0 and action.kind is Kind.F)
                if action.kind in (Kind.SEND_F, Kind.SEND_B):
                    arrived[str(action)] = now[rank] + transit_s
                marks[rank][3 * place + 2] = now[rank]
                at[rank] += 1
    return [[mark and mark + clocks[rank] for mark in row] for rank, row in enumerate(marks)]


def messages(marks: list[list[float]], step: int = 3) -> list[StepMessages]:
    read = [MessageTimes(SCHEDULE, rank, range(STAGES)).read(step, row) for rank, row in enumerate(marks)]
    return [StepMessages.of_data(one.to_data()) for one in read]


@pytest.mark.parametrize("clocks", [(0.0, 0.0), (0.0, 5000.0), (7000.0, 3.0)])
def test_two_clocks_give_one_time_of_a_message(clocks: tuple[float, float]) -> None:
    theirs, ours = messages(played(0.25, clocks))
    link = slowest_link(1, ours, {0: theirs}, {0: MICROBATCHES})
    assert link is not None
    assert (link.step, link.peer) == (3, 0)
    assert link.transit_s == pytest.approx(0.25, abs=1e-4)
    assert link.held_s >= 2 * 0.25


def test_a_late_sender_is_no_slow_link() -> None:
    theirs, ours = messages(played(0.001, (0.0, 9.0), late_s=0.5))
    link = slowest_link(1, ours, {0: theirs}, {0: MICROBATCHES})
    assert link is not None
    assert link.held_s <= MICROBATCHES * 0.0011


class Row:
    """What the pacing sees of an interpreter."""

    def __init__(self, rank: int) -> None:
        self.rank, self.schedule = rank, SCHEDULE

    def place(self) -> tuple[int, bool]:
        return 0, False


def paced(transit_s: float, steps: int) -> list[Straggler]:
    """What rank 0 says of steps of two ranks on two machines, a step a beat."""
    store, far = HashStore(), frozenset(range(STAGES))
    pacings = [Pacing(store, "1", rank, STAGES) for rank in range(STAGES)]
    progresses = [Progress(range(STAGES), stages=(rank,), planned_s=0.8) for rank in range(STAGES)]
    marks, said = played(transit_s, (0.0, 100.0)), list[Straggler]()
    for step in range(steps):
        for rank in (1, 0):
            progress = progresses[rank]
            progress.begin("step", step)
            if progress.samples_now:
                progress.runner = Row(rank)
                progress.keep(lambda rank=rank: (0.8, 0.0, marks[rank]))
            progress.end()
            if (found := pacings[rank].beat(progress, lambda: far)) is not None:
                said.append(found)
    return said


def test_a_slow_link_is_named_within_ten_steps() -> None:
    (one,) = paced(0.4, 10 + 2)  # The first beat asks for samples, and a comparison is a beat late.
    assert (one.rank, one.peer, one.cause) == (1, 0, "link")
    assert paced(0.01, 40) == []


def test_steps_are_sampled_alike_on_all_ranks() -> None:
    """At 100 steps a beat the ranks sample multiples of 32, whenever their beats are."""
    progress, pacing = Progress(range(2)), Pacing(HashStore(), "1", 1, 2)
    sampled: list[int] = []
    for step in range(500):
        progress.begin("step", step)
        if progress.samples_now:
            progress.keep(lambda: (0.01, 0.0, []))
            sampled.append(step)
        progress.end()
        if step % 100 == 10:
            pacing.beat(progress, frozenset)
    assert len(sampled) > 16
    assert all(step % 32 == 0 for step in sampled[12:])
