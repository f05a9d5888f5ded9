"""Words a diagnosis: who holds up whom, a line for each rank, and the culprit's Python stack.

RunHung [E404]: rank 1 is stopped (SIGSTOP) in step 12; ranks 0, 2 have waited for 11 s. Next: kill -CONT 47
  rank 0  step 12  0B1: 0RECV_B1 waits for 1SEND_B1 of rank 1
  rank 1  step 12  stopped, pid 4711
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from outsize.errors import RunHung
from outsize.ops.watchdog.diagnosis import Diagnosis
from outsize.ops.watchdog.reports import Card, RankReport, SilentRank
from outsize.run.progress import Straggler

_LINES: Final = 16
_TOLD_S: Final = 0.02
_STATES: Final = {
    "stopped": "stopped by a signal (SIGSTOP)",
    "traced": "held by a debugger",
    "gone": "gone",
    "busy": "computing",
    "disk": "waiting for a disk",
    "asleep": "asleep, and holds Python's lock",
    "unknown": "silent",
}


def hang(
    diagnosis: Diagnosis, reports: Mapping[int, RankReport], silent: Mapping[int, SilentRank]
) -> RunHung:
    """Returns the error that names the culprits."""
    what, next_step = _what(diagnosis, reports, silent)
    first = reports.get(diagnosis.culprits[0])
    picture = [_line(rank, reports, silent) for rank in _shown(diagnosis, reports, silent)]
    if first is not None and first.stack:
        head = f"stack of rank {diagnosis.culprits[0]} without outsize's frames, the innermost call last:"
        picture += [head, first.stack.rstrip("\n")]
    return RunHung(what, numbers=_waited(diagnosis, reports), next_step=next_step, picture="\n".join(picture))


def notice(diagnosis: Diagnosis, reports: Mapping[int, RankReport]) -> str:
    """Returns one line on ranks that hold up others, and may still come."""
    return f"outsize: {_between(diagnosis.culprits, reports)}; {_waited(diagnosis, reports)}"


def slow(straggler: Straggler, host: str, peer_host: str = "") -> str:
    """Returns one line on a straggler, with its likely cause and the next step."""
    one, plural = straggler, "s" if len(straggler.stages) > 1 else ""
    who = f"rank {one.rank} (stage{plural} {', '.join(map(str, one.stages))})"
    what = f"{who} holds up the others in step {one.step}"
    if one.cause == "link":
        what = f"the link between {who} and rank {one.peer} holds up the others in step {one.step}"
        how = f"they wait {one.own:.2f} s a step for messages that are sent, {1e3 * one.others:.0f} ms each"
        next_step = f"measure the network between {host} and {peer_host}; GLOO_SOCKET_IFNAME chooses it"
    elif one.cause == "input":
        how = f"its code before a step takes {one.own:.2f} s, that of others {one.others:.2f} s"
        next_step = "look at its loader and disk"
    else:
        how = f"it computes {one.own / one.others:.1f}x as long as the others, by the plan's seconds"
        next_step = f"look at what else runs on {host}, or outsize tune MODEL for a plan that fits its speed"
    if one.core_wait_s >= _TOLD_S:
        how += f", {one.core_wait_s:.2f} s a step of it in wait for a core"
    return f"outsize: {what}: {how} ({one.cause}). Next: {next_step}"


def _what(
    diagnosis: Diagnosis, reports: Mapping[int, RankReport], silent: Mapping[int, SilentRank]
) -> tuple[str, str]:
    """Returns what happened and the next step."""
    rank, several = diagnosis.culprits[0], named(diagnosis.culprits)
    if diagnosis.kind in ("stopped", "silent"):
        card, state = silent[rank].card, silent[rank].state
        if state == "stopped":
            return f"{several} is stopped (SIGSTOP) {card.place}", f"kill -CONT {card.pid}"
        if state == "gone":
            return f"the process of {several} is gone, {card.place}", "see what this rank said last"
        how = f"does not answer: {_STATES[state]}" if state == "asleep" else "does not answer"
        return f"{several} on {card.host} {how}, {card.place}", f"py-spy dump --pid {card.pid}"
    if diagnosis.kind == "left":
        card = reports[rank].card if rank in reports else silent[rank].card
        return f"{several} has left the loop {card.place}", "run as many steps on every rank"
    report = reports[rank]
    if diagnosis.kind == "collective":
        absent = named([r for r in {**reports, **silent} if r not in diagnosis.culprits])
        others = f", which {absent} {'have' if ',' in absent else 'has'} not called" if absent else ""
        where = f"{report.call} of {report.line}, {report.card.place}"
        return f"{several} waits in {where}{others}", "call it on every rank of its group, in one order"
    if diagnosis.kind == "stuck":
        where = f"{report.card.action or report.card.doing} of step {report.card.step}"
        how = f"has been in {where} for {report.stalled_s:.0f} s and computes nothing"
        if report.where == "backward":
            return (
                f"{several} {how}; it is in torch's backward, where C++ waits for other ranks",
                "leave out what communicates in the backward: DistributedDataParallel, a hook, a custom op",
            )
        return f"{several} {how}; it is in {report.line}", "see its stack below"
    calls = {one.card.doing: rank for rank, one in [*reports.items()][::-1] if one.card.doing}
    if len(calls) > 1:
        said = ", ".join(f"rank {rank} has called {call}()" for call, rank in sorted(calls.items()))
        return f"ranks wait in other calls than each other: {said}", (
            f"call {min(calls)}() on every rank, without `if rank == 0`; rank 0 alone may print its result"
        )
    return f"{several} and others wait for each other {report.card.place}", "outsize explain E404"


def _between(culprits: Sequence[int], reports: Mapping[int, RankReport]) -> str:
    parts = [
        f"rank {rank} has not called step {reports[rank].card.step}; it is in {reports[rank].line}"
        for rank in culprits
        if rank in reports
    ]
    return "; ".join(parts)


def _waited(diagnosis: Diagnosis, reports: Mapping[int, RankReport]) -> str:
    longest_s = max(reports[rank].stalled_s for rank in diagnosis.waiting)
    verb = "have" if len(diagnosis.waiting) > 1 else "has"
    return f"{named(diagnosis.waiting)} {verb} waited for {longest_s:.0f} s"


def _shown(
    diagnosis: Diagnosis, reports: Mapping[int, RankReport], silent: Mapping[int, SilentRank]
) -> list[int]:
    """Returns the ranks that get a line: the culprits first where there are too many."""
    order = dict.fromkeys([*diagnosis.culprits, *diagnosis.waiting, *reports, *silent])
    return sorted(list(order)[:_LINES])


def _line(rank: int, reports: Mapping[int, RankReport], silent: Mapping[int, SilentRank]) -> str:
    if rank in silent:
        one = silent[rank]
        where = f"pid {one.card.pid} on {one.card.host}"
        return f"  rank {rank}  {_place(one.card)}  {_STATES[one.state]}, {where}"
    report = reports[rank]
    if report.waits:
        doing = "; ".join(f"{w.own} waits for {w.other} of rank {w.rank}" for w in report.waits)
    elif report.where == "saves":
        doing = f"waits for its save at {report.line}"
    elif report.is_waiting:
        doing = f"waits in {report.call or 'a message'} at {report.line}"
    elif report.where == "backward":
        doing = "is in torch's backward"
    else:
        doing = f"runs {report.line}"
    return f"  rank {rank}  {_place(report.card)}  {doing}"


def _place(card: Card) -> str:
    return f"{card.place}, {card.action}:" if card.action else f"{card.place}:"


def named(ranks: Sequence[int]) -> str:
    """Returns `rank 1`, `ranks 0, 2` or `8 ranks (0, 1, 2, ...)`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= _LINES // 2:
        return f"ranks {', '.join(map(str, ranks))}" if ranks else ""
    return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:3]))}, ...)"
