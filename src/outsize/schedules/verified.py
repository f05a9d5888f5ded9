"""Problem: when does a rank repeat what another one has computed, so that it costs a step least?

`with_checks` takes a lowered schedule. Behind the last action of a microbatch on a stage, and behind the
sends that other ranks wait for, its rank tells what went in and what came out (SHOW, which never blocks). The
rank that checks it repeats both halves where it idles (VERIFY, which waits for what was shown). 1f1b with a
slot for a forward and two for a backward; each rank checks the one before it, the first one checks the last:

    rank 0   0F0 0F1 0F2  .   .  0VERIFY0@2  0B0     0SHOW0 0B1     0B2
    rank 1    .  1F0 1F1  .   .  1B0     1SHOW0 1F2 1B1     1B2     1VERIFY0@0
    rank 2    .   .  2F0 2B0     2SHOW0 2F1 2B1     2F2 2B2     2VERIFY0@1

Other replicas run the same row at the same time, so with replicas a rank repeats the work of its own stage in
another one: `0VERIFY0`, behind its own SHOW, so that a ring of replicas cannot wait for itself.

Method: the row is played with the seconds of its stages, and the gaps of the checking rank in which the rest
of the work was shown are tried, the longest GAPS of them and the end of the row; the shortest step wins, and
of equal ones the earliest place. A place in which ranks would wait for each other forever does not end when
it is played, and is not taken; the end of every row always is one, since nothing waits for a VERIFY.

Deviations: messages take no time; a pair that runs together takes the seconds of both. Complexity: O(checks x
GAPS x actions). Oracles: tests/unit/schedules/test_verified.py tries every place, and plays the result with
planner/simulation/simulate.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple, final

from outsize.ir.schedule import COMPUTE, Action, Kind, Schedule, partners
from outsize.schedules.job import StageCost
from outsize.schedules.message import RECEIVES, SENDS, Ends, Message, message_of

GAPS: Final = 6


@final
@dataclass(frozen=True, slots=True)
class Check:
    """Says that rank `checker` of the pipeline repeats what `stage` computes of a microbatch.

    On the rank of the stage itself it is the work of another replica.
    """

    stage: int
    microbatch: int
    checker: int


def with_checks(schedule: Schedule, checks: Sequence[Check], costs: Sequence[StageCost]) -> Schedule:
    """Returns the lowered schedule with SHOW and VERIFY of these checks; `costs` are those of the stages."""
    for check in checks:
        schedule = _with_show(schedule, check)
    for check in checks:
        schedule = _with_verify(schedule, check, costs)
    return schedule


def verified_stage(action: Action) -> int:
    """Returns the stage whose work a VERIFY repeats."""
    return action.stage if action.peer < 0 else action.peer


def shown_for(action: Action) -> Action:
    """Returns the SHOW for which a VERIFY waits."""
    return Action(verified_stage(action), Kind.SHOW, action.microbatch)


def verified_s(action: Action, costs: Sequence[StageCost]) -> float:
    """Returns the seconds of a VERIFY."""
    cost = costs[verified_stage(action)]
    return cost.forward_s + cost.backward_s if cost.verify_s is None else cost.verify_s


def step_s(schedule: Schedule, costs: Sequence[StageCost]) -> float:
    """Returns the seconds of a lowered schedule whose messages take no time; infinity where it hangs."""
    played = _Play(schedule, costs)
    return max(map(played.end_of, range(schedule.ranks))) if played.has_ended else inf


def _with_show(schedule: Schedule, check: Check) -> Schedule:
    rank = schedule.rank_of[check.stage]
    row = schedule.actions[rank]
    of_work = (check.stage, check.microbatch)
    last = max(at for at, a in enumerate(row) if a.kind in COMPUTE and (a.stage, a.microbatch) == of_work)
    behind = next((at for at in range(last + 1, len(row)) if row[at].kind in COMPUTE), len(row))
    # What is received next is posted before, and partners stay together.
    return _inserted(schedule, rank, behind, Action(check.stage, Kind.SHOW, check.microbatch))


def _with_verify(schedule: Schedule, check: Check, costs: Sequence[StageCost]) -> Schedule:
    own = schedule.rank_of[check.stage]
    row, microbatch = schedule.actions[check.checker], check.microbatch
    shown = Action(check.stage, Kind.SHOW, microbatch)
    if own == check.checker:
        first, action = row.index(shown) + 1, Action(check.stage, Kind.VERIFY, microbatch)
    else:
        first, action = 0, Action(row[0].stage, Kind.VERIFY, microbatch, check.stage)
    base = _Play(schedule, costs)
    gaps = base.gaps(check.checker, base.shown[check.stage, microbatch])
    tried = [_inserted(schedule, check.checker, at, action) for at in sorted(gaps) if at >= first]
    tried.append(_inserted(schedule, check.checker, len(row), action))
    # The first of equal ones is that of the earliest place.
    return min(tried, key=lambda placed: step_s(placed, costs))


def _inserted(schedule: Schedule, rank: int, place: int, action: Action) -> Schedule:
    row = schedule.actions[rank]
    rows = list(schedule.actions)
    rows[rank] = (*row[:place], action, *row[place:])
    return schedule.with_rows(rows)


@final
class _Span(NamedTuple):
    """When an action was reached, began and ended."""

    reached_s: float
    start_s: float
    end_s: float


@final
class _Play:
    """Plays the rows of a lowered schedule, as far as they go."""

    def __init__(self, schedule: Schedule, costs: Sequence[StageCost]) -> None:
        self._rows, self._costs = schedule.actions, costs
        self._spans: list[list[_Span]] = [[] for _ in self._rows]
        self._sent: dict[Message, float] = {}
        self.shown: dict[tuple[int, int], float] = {}
        self._needs = _needs(schedule)
        self._second = [partners(row) for row in self._rows]
        while any(self._advance(rank) for rank in range(len(self._rows))):
            pass

    @property
    def has_ended(self) -> bool:
        """Tells whether all rows have been played to their ends."""
        return all(len(spans) == len(row) for spans, row in zip(self._spans, self._rows, strict=True))

    def end_of(self, rank: int) -> float:
        """Returns when a rank has played as far as it can."""
        return self._spans[rank][-1].end_s if self._spans[rank] else 0.0

    def gaps(self, rank: int, from_s: float) -> list[int]:
        """Returns the places of a row in front of which its rank waits longest after `from_s`."""
        row = self._rows[rank]
        waits = {
            at: span.start_s - max(span.reached_s, from_s)
            for at, span in enumerate(self._spans[rank])
            if row[at].kind in COMPUTE and not (at and row[at - 1].overlaps)
        }
        longest = sorted((at for at, wait_s in waits.items() if wait_s > 0), key=lambda at: (-waits[at], at))
        return longest[:GAPS]

    def _advance(self, rank: int) -> bool:
        row, spans = self._rows[rank], self._spans[rank]
        before = len(spans)
        while len(spans) < len(row):
            action, reached_s = row[len(spans)], self.end_of(rank)
            start_s = self._start_s(rank, action, reached_s)
            if start_s is None:
                break
            end_s = start_s + self._seconds(action)
            spans.append(_Span(reached_s, start_s, end_s))
            if action.kind in SENDS:
                self._sent[message_of(action)] = end_s
            elif action.kind is Kind.SHOW:
                self.shown[action.stage, action.microbatch] = end_s
        return len(spans) > before

    def _start_s(self, rank: int, action: Action, reached_s: float) -> float | None:
        """Returns when an action begins; None while what it waits for has not been sent."""
        if action.kind is Kind.VERIFY:
            of_work = verified_stage(action), action.microbatch
            return max(reached_s, self.shown[of_work]) if of_work in self.shown else None
        second = self._second[rank].get(action)
        needed = [*self._needs[action], *(self._needs[second] if second is not None else ())]
        if any(message not in self._sent for message in needed):
            return None
        return max([reached_s, *(self._sent[message] for message in needed)])

    def _seconds(self, action: Action) -> float:
        if action.kind is Kind.VERIFY:
            return verified_s(action, self._costs)
        cost = self._costs[action.stage]
        if action.kind is Kind.SHOW:
            return cost.show_s
        return cost.seconds(action.kind) if action.kind in COMPUTE else 0.0


def _needs(schedule: Schedule) -> Mapping[Action, list[Message]]:
    """Returns the messages for which each compute action waits."""
    ends, needs = Ends(schedule), defaultdict[Action, list[Message]](list)
    for row in schedule.actions:
        for action in row:
            if action.kind in RECEIVES:
                message = message_of(action)
                needs[ends.consumer(message)].append(message)
    return needs
