"""Problem: some ranks wait. For whom, and will it come?

Ranks are nodes; an edge leads from a rank to those that it waits for (knots and cycles of wait-for graphs:
Knapp, Deadlock detection in distributed databases, ACM Computing Surveys 19(4), 1987).

    0 -> 1 -> 2 (stopped)       2 holds up the others, and will not come: a hang
    0 -> 1 -> 2 (user's code)   2 holds up the others, and may come: it is named, and the run goes on
    0 -> 1 -> 0                 nobody will come: a hang
    0 in torch's backward       and computes nothing, for twice the limit: a hang, whoever waits for it

The ends of the chains are the culprits; where there are none, those on the cycle that are in a collective of
the user's own, or else those that are behind. Complexity: ranks squared, once per alarm. Oracle:
tests/unit/ops/watchdog/test_diagnosis.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from typing import Final, Literal, final

from outsize.ops.watchdog.reports import BUSY_SHARE, RankReport, SilentRank

Kind = Literal["nothing", "busy", "between", "stuck", "collective", "cycle", "left", "silent", "stopped"]
_HANGS: Final[frozenset[Kind]] = frozenset({"stuck", "collective", "cycle", "left", "silent", "stopped"})
# Where several ranks hold up the others, these are named first; a rank that may still come is no hang.
_ORDER: Final[tuple[Kind, ...]] = ("stopped", "left", "silent", "between", "busy", "stuck")
_MOST_PATIENCE: Final = 2.0


@final
@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Names the ranks that hold up the `waiting` ones."""

    kind: Kind
    culprits: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()

    @property
    def is_hang(self) -> bool:
        """Tells whether the run cannot go on by itself."""
        return self.kind in _HANGS


NOTHING: Final = Diagnosis("nothing")


def diagnose(reports: Mapping[int, RankReport], silent: Mapping[int, SilentRank]) -> Diagnosis:
    """Returns who holds up those ranks that have waited for longer than their limit."""
    waiting = tuple(rank for rank, report in reports.items() if report.has_waited)
    if not waiting:
        return _hidden(reports)
    edges = {rank: _edges(rank, reports, silent) for rank in reports}
    reached = _reached(waiting, edges)
    longest_s = max(reports[rank].stalled_s / reports[rank].limit_s for rank in waiting)
    ends = {
        rank: _kind(rank, reports, silent, patience=longest_s)
        for rank in sorted(reached)
        if rank in silent
        or not reports[rank].is_waiting
        or (reports[rank].where == "saves" and not edges[rank])
    }
    for kind in _ORDER:
        if culprits := tuple(rank for rank, found in ends.items() if found == kind):
            return Diagnosis(kind, culprits, waiting)
    return _deadlock(reached & set(reports), reports, waiting)


def _edges(rank: int, reports: Mapping[int, RankReport], silent: Mapping[int, SilentRank]) -> set[int]:
    """Returns the ranks that a rank waits for."""
    report = reports[rank]
    if not report.is_waiting:
        return set()
    others = (set(reports) | set(silent)) - {rank}
    if report.where == "saves":  # Others may still write, which takes as long as it takes.
        return others & set(silent)
    if report.waits:
        return {wait.rank for wait in report.waits} & others
    return {other for other in others if other in silent or not _is_with(report, reports[other])}


def _is_with(report: RankReport, other: RankReport) -> bool:
    """Tells whether another rank is in the same collective, or has ended the step that this one is in."""
    ours, theirs = report.card, other.card
    if other.is_waiting and not other.waits:
        return (other.where, other.call) == (report.where, report.call) and theirs.place == ours.place
    has_ended_step = not theirs.doing and theirs.step > ours.step
    return bool(ours.doing) and has_ended_step and not other.is_waiting


def _reached(start: Collection[int], edges: Mapping[int, Set[int]]) -> set[int]:
    reached, front = set(start), list(start)
    while front:
        new = edges.get(front.pop(), set()) - reached
        reached |= new
        front += new
    return reached


def _kind(
    rank: int, reports: Mapping[int, RankReport], silent: Mapping[int, SilentRank], *, patience: float
) -> Kind:
    """Returns what the end of a chain does. `patience` is how often over the limit a rank has waited."""
    if rank in silent:
        return _silence(silent[rank], patience)
    report = reports[rank]
    if report.card.doing == "left":
        return "left"
    if report.where == "debugger" or not report.still:
        return "busy"
    if not report.card.doing or report.where == "saves":
        return "between"
    # What a first step does besides computing, such as reading code from a disk, is not in a backward.
    may_load = report.is_first and not (report.is_idle_in_backward and patience >= _MOST_PATIENCE)
    computes = report.busy > BUSY_SHARE or may_load or report.stalled_s < report.limit_s
    return "busy" if computes else "stuck"


def _hidden(reports: Mapping[int, RankReport]) -> Diagnosis:
    """Returns the ranks that wait in torch's backward for something that no Python calls, and nobody else."""
    ranks = tuple(
        rank
        for rank, report in sorted(reports.items())
        if report.is_idle_in_backward and report.stalled_s >= _MOST_PATIENCE * report.limit_s
    )
    return Diagnosis("stuck", ranks, ranks) if ranks else NOTHING


def _silence(rank: SilentRank, patience: float) -> Kind:
    """Returns what silence means: a process that computes, reads a disk or is debugged may not answer."""
    if rank.card.doing == "left":
        return "left"
    if rank.state in ("stopped", "gone"):
        return "stopped"
    if rank.state == "unknown":  # another machine, whose network may be slow
        return "silent" if patience >= _MOST_PATIENCE else "busy"
    return "silent" if rank.state == "asleep" else "busy"


def _deadlock(ranks: Set[int], reports: Mapping[int, RankReport], waiting: tuple[int, ...]) -> Diagnosis:
    """Returns those of a cycle that are in a collective of the user's, or else those that are behind."""
    theirs = [rank for rank in sorted(ranks) if reports[rank].where == "collective"]
    if theirs:
        return Diagnosis("collective", tuple(theirs), waiting)
    behind = min(reports[rank].card.step for rank in ranks)
    last = tuple(rank for rank in sorted(ranks) if reports[rank].card.step == behind)
    return Diagnosis("cycle", last, waiting)
