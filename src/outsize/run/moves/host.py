"""Implements LOAD and UNLOAD: which weights move at each of them, and with which gradients.

With `room` for two stages, weights are loaded for each pass (schedules/offload.py). With room for all, they
are loaded once a step, and gradients leave (ZeRO-Offload). A weight that several stages use is loaded with
the first of them and unloaded with the last; the others with their stage. Gradients of earlier steps are
loaded with a stage that begins with its backward, and otherwise when its backward begins, so that only those
in use are on the device; they leave after a backward. A weight that all calls of a step read as autocast's
copy comes as that copy (`read_as_casts`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final, final

import torch
from torch.optim import Optimizer

from outsize.ir.schedule import COMPUTE, Action, Kind, Schedule
from outsize.run.host.residency import Residency, ResidentBlock
from outsize.run.host.speculative_step import Speculation
from outsize.run.moves.base import Moves
from outsize.run.stage.cut import Cut
from outsize.schedules.offload import ROOM, check_loads, places, with_loads

_MOVING: Final = frozenset({Kind.LOAD, Kind.UNLOAD})
_BACKWARD: Final = frozenset({Kind.B, Kind.I, Kind.W})


@final
class HostMoves(Moves):
    """Moves the weights of one rank, whose device has room for `room` stages, for steps with these
    programs.
    """

    def __init__(self, residency: Residency, room: int = ROOM, cuts: Sequence[Cut] = ()) -> None:
        self.residency, self._room, self._cuts = residency, room, cuts
        self._row_blocks: list[ResidentBlock] | None = None

    def scheduled(self, schedule: Schedule, cut: Cut) -> Schedule:
        loaded = with_loads(schedule, self._room)
        check_loads(loaded, self._room)
        return loaded

    def of(self, cuts: Sequence[Cut]) -> Moves:
        return HostMoves(self.residency, self._room, cuts)

    @contextmanager
    def step_context(self, optimizer: Optimizer | None) -> Iterator[None]:
        landing = self.residency.landing
        landing.use(optimizer)
        try:
            with self.residency.step_context():
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
        blocks = [g for g in self._resident_blocks(row) if moving.stage in g.users]
        if moving.kind is Kind.LOAD:
            coming = [g for g in blocks if not _elsewhere(row[:at], moving, g)]
            graded = [g for g in coming if _trains(islice(_stay(row[at:], g), 1))]
            return lambda: residency.load(coming, graded)
        going = [g for g in blocks if not _elsewhere(row[at + 1 :], moving, g)]
        trained = [g for g in going if _trains(_stay(row[at::-1], g))]
        final = not any(a.stage == moving.stage and a.kind is Kind.LOAD for a in row[at:])
        return lambda: residency.unload(going, trained, final, at + 1 == len(row))

    def arrival(self, row: Sequence[Action], at: int) -> Callable[[], None] | None:
        """Returns what a stage's first action since its load, and its first backward, must wait for."""
        stage, residency = row[at].stage, self.residency
        known = (a.kind for a in reversed(row[:at]) if a.stage == stage and a.kind in COMPUTE | _MOVING)
        before = next(known, Kind.LOAD)
        comes, backward = before not in COMPUTE, row[at].kind in _BACKWARD
        if not comes and (before in _BACKWARD or not backward):
            return None
        blocks = [g for g in self._resident_blocks(row) if stage in g.users]
        graded = [g for g in blocks if backward and _turns(row[at::-1], g)]
        if not (comes or graded):
            return None

        def wait() -> None:
            residency.load_gradients(graded)
            for resident in blocks:
                assert resident.loaded is not None
                residency.compute.after(resident.loaded)

        return wait

    def _resident_blocks(self, row: Sequence[Action]) -> list[ResidentBlock]:
        """Returns all blocks that the row uses."""
        if self._row_blocks is None:
            users = users_of(self._cuts, {action.stage for action in row})
            casts = read_as_casts(self._cuts)
            self._row_blocks = self.residency.resident_blocks(users, places(row), casts)
        return self._row_blocks


def _elsewhere(others: Sequence[Action], moving: Action, resident: ResidentBlock) -> bool:
    """Returns whether another action moves a block that several stages use: the first loads it, the last
    unloads.
    """
    users = resident.users if len(resident.users) > 1 else ()
    return any(a.kind is moving.kind and a.stage in users for a in others)


def _stay(row: Sequence[Action], resident: ResidentBlock) -> Iterator[Action]:
    """Yields the actions that use the block, from its load to its unload, or back."""
    first = row[0]
    for action in row[1:]:
        if len(resident.users) == 1 and action.stage == first.stage and action.kind in _MOVING - {first.kind}:
            return
        if action.stage in resident.users and action.kind in COMPUTE:
            yield action


def _trains(stay: Iterable[Action]) -> bool:
    return any(action.kind in _BACKWARD for action in stay)


def _turns(row: Sequence[Action], resident: ResidentBlock) -> bool:
    """Returns whether the block was used by forwards alone, from here back to its load."""
    used = False
    for action in _stay(row, resident):
        if action.kind in _BACKWARD:
            return False
        used = True
    return used


def read_as_casts(cuts: Sequence[Cut]) -> dict[str, torch.dtype]:
    """Returns the weights that every call of these programs reads as autocast's copy in one dtype, with it.

    One that a call reads as it is (a norm in float32, an embedding) is none of them, and neither is one that
    another stage receives, or that goes through a function first.
    """
    found, others = dict[str, torch.dtype](), set[str]()
    for cut in {id(cut): cut for cut in cuts}.values():
        others.update(b.weight for b in cut.boundaries if b.weight is not None)
        for spec in (program.spec for program in cut.programs):
            others.update(spec.through)
            for instruction in spec.instructions:
                casts = dict(instruction.casts)
                for weight in instruction.weights:
                    dtype = casts.get(weight.name)
                    if dtype is None or found.setdefault(weight.name, dtype) is not dtype:
                        others.add(weight.name)
    return {name: dtype for name, dtype in found.items() if name not in others}


def users_of(cuts: Sequence[Cut], stages: Collection[int]) -> dict[str, frozenset[int]]:
    """Maps each weight of these stages to all stages that compute with it in some of these cuts.

    The users include stages of other ranks that receive a tied weight as a message, for which it must stay
    loaded.
    """
    users: dict[str, set[int]] = {}
    for cut in cuts:
        for program in (program for program in cut.programs if program.stage in stages):
            for name in program.weights:
                users.setdefault(name, set()).add(program.stage)
        for boundary in cut.boundaries:
            if boundary.weight is not None and boundary.producer in stages:
                users.setdefault(boundary.weight, set()).update((boundary.producer, *boundary.consumers))
    return {name: frozenset(stages) for name, stages in users.items()}
