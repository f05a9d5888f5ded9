"""LOAD and UNLOAD: which weights come and go at each of them, and with which gradients.

`room` for two stages: weights come for each pass (schedules/offload.py). Room for all: once a step, and what
goes are gradients (ZeRO-Offload). A weight that several stages use comes with the first of them and goes with
the last; the others with their stage. Gradients of steps before come with a stage that begins with its
backward, and else when its backward begins, so that no more of them are there than are at work; they go when
there was one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final, final

from torch.optim import Optimizer

from outsize.ir.schedule import COMPUTE, Action, Kind, Schedule
from outsize.run.cut import Cut
from outsize.run.moves import Moves
from outsize.run.residency import Guest, Residency
from outsize.run.speculation import Speculation
from outsize.schedules.offload import ROOM, check_loads, places, with_loads

_MOVING: Final = frozenset({Kind.LOAD, Kind.UNLOAD})
_BACKWARD: Final = frozenset({Kind.B, Kind.I, Kind.W})


@final
class HostMoves(Moves):
    """Of one rank, whose device has room for so many stages, for steps with these programs."""

    def __init__(self, residency: Residency, room: int = ROOM, cuts: Sequence[Cut] = ()) -> None:
        self.residency, self._room, self._cuts = residency, room, cuts
        self._found: list[Guest] | None = None

    def scheduled(self, schedule: Schedule, cut: Cut) -> Schedule:
        loaded = with_loads(schedule, self._room)
        check_loads(loaded, self._room)
        return loaded

    def of(self, cuts: Sequence[Cut]) -> Moves:
        return HostMoves(self.residency, self._room, cuts)

    @contextmanager
    def at_work(self, optimizer: Optimizer | None) -> Iterator[None]:
        landing = self.residency.landing
        landing.use(optimizer)
        try:
            with self.residency.at_work():
                yield
        except BaseException:
            landing.abandon()
            raise
        finally:
            landing.finish()

    def speculation(self) -> Speculation:
        return self.residency.landing.speculate()

    def action(self, row: Sequence[Action], at: int) -> Callable[[], None]:
        moving, residency = row[at], self.residency
        own = [g for g in self._guests(row) if moving.stage in g.users]
        if moving.kind is Kind.LOAD:
            coming = [g for g in own if not _elsewhere(row[:at], moving, g)]
            graded = [g for g in coming if _trains(islice(_stay(row[at:], g), 1))]
            return lambda: residency.load(coming, graded)
        going = [g for g in own if not _elsewhere(row[at + 1 :], moving, g)]
        trained = [g for g in going if _trains(_stay(row[at::-1], g))]
        final = not any(a.stage == moving.stage and a.kind is Kind.LOAD for a in row[at:])
        return lambda: residency.unload(going, trained, final, at + 1 == len(row))

    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        """The first of a stage's actions since it was loaded waits for the copies, and so does its first
        backward where forwards were before.
        """
        stage, residency = row[at].stage, self.residency
        known = (a.kind for a in reversed(row[:at]) if a.stage == stage and a.kind in COMPUTE | _MOVING)
        before = next(known, Kind.LOAD)
        comes, backward = before not in COMPUTE, row[at].kind in _BACKWARD
        if not comes and (before in _BACKWARD or not backward):
            return None
        own = [g for g in self._guests(row) if stage in g.users]
        graded = [g for g in own if backward and _turns(row[at::-1], g)]
        if not (comes or graded):
            return None

        def wait() -> None:
            residency.bring(graded)
            for guest in own:
                assert guest.loaded is not None
                residency.compute.after(guest.loaded)

        return wait

    def _guests(self, row: Sequence[Action]) -> list[Guest]:
        """All of the row."""
        if self._found is None:
            users = users_of(self._cuts, {action.stage for action in row})
            self._found = self.residency.guests(users, places(row))
        return self._found


def _elsewhere(beside: Sequence[Action], moving: Action, guest: Guest) -> bool:
    """One that several stages use comes with the first of them and goes with the last."""
    users = guest.users if len(guest.users) > 1 else ()
    return any(a.kind is moving.kind and a.stage in users for a in beside)


def _stay(row: Sequence[Action], guest: Guest) -> Iterator[Action]:
    """The actions that use the guest, from where it comes to where it goes, or back."""
    first = row[0]
    for action in row[1:]:
        if len(guest.users) == 1 and action.stage == first.stage and action.kind in _MOVING - {first.kind}:
            return
        if action.stage in guest.users and action.kind in COMPUTE:
            yield action


def _trains(stay: Iterable[Action]) -> bool:
    return any(action.kind in _BACKWARD for action in stay)


def _turns(row: Sequence[Action], guest: Guest) -> bool:
    """Whether what the guest was used for, from here back to where it came, are forwards."""
    used = False
    for action in _stay(row, guest):
        if action.kind in _BACKWARD:
            return False
        used = True
    return used


def users_of(cuts: Sequence[Cut], own: Collection[int]) -> dict[str, frozenset[int]]:
    """Weight of these stages -> those that compute with it, in some of these cuts; and stages of any rank
    that only have it lent, for which it stays where it is.
    """
    found: dict[str, set[int]] = {}
    for cut in cuts:
        for program in (program for program in cut.programs if program.stage in own):
            for name in program.weights:
                found.setdefault(name, set()).add(program.stage)
        for boundary in cut.boundaries:
            if boundary.weight is not None and boundary.producer in own:
                found.setdefault(boundary.weight, set()).update((boundary.producer, *boundary.consumers))
    return {name: frozenset(stages) for name, stages in found.items()}
