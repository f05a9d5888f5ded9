"""The watcher's thread: it looks at this rank, answers alarms, and gives the verdict if it is the first to.

    beat            nothing moved for the limit, and the main thread waits -> alarm n
    alarm n         every rank that lives writes report n
    all reports     the lowest rank with a report diagnoses; if it sees a hang, it waits for LASTS_BEATS and
                    asks again: every rank writes another report, which says whether it has stood still
                    meanwhile, and the same rank diagnoses these
    verdict n       end, or wait: all go on to alarm n + 1; after `wait` each is twice as patient until it
                    moves

Reports of one alarm are written up to a beat apart, in which a rank may go on and another begin to wait for
it. So a hang is what two pictures show, between which nobody who is part of it has moved.

Time is counted in beats, so a machine that was suspended has not hung. Messages go over a connection of this
thread's own, since the main thread may block in a call of the store. The package's docstring has the picture.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, final

from outsize.errors import RunHung
from outsize.ops.watchdog.diagnosis import Diagnosis, diagnose
from outsize.ops.watchdog.options import WatchOptions
from outsize.ops.watchdog.pacing import Pacing
from outsize.ops.watchdog.processes import State, look_at, machine, state_between
from outsize.ops.watchdog.reports import BUSY_SHARE, Card, RankReport, SilentRank
from outsize.ops.watchdog.stacks import Stack, stack_of
from outsize.ops.watchdog.waits import awaited
from outsize.ops.watchdog.words import hang, notice, slow
from outsize.run.progress import Progress

BEAT_S: Final = 1.0
BEATS_PER_TIMEOUT: Final = 8
ANSWER_BEATS: Final = 4
LASTS_BEATS: Final = 4
STEPS: Final = 5.0
_POLL_S: Final = 0.01
_SECOND_LOOK_S: Final = 0.3
_RANKS_PER_BEAT: Final = 256  # A larger run beats more rarely, so that the store serves as many messages.


@final
@dataclass(frozen=True, slots=True)
class WatchedRun:
    """The run as the watcher sees it.

    `store` is a connection of its own. `say` writes a line to the user; `end` ends this process, with the
    error on the rank that gives the verdict and with None on the others.
    """

    store: Any
    rank: int
    world_size: int
    say: Callable[[str], None]
    end: Callable[[RunHung | None], None]


@final
@dataclass(slots=True)
class _Stall:
    """How long nothing has moved, and what was at its beginning."""

    place: tuple[int, int] = (-1, -1)
    stalled_s: float = 0.0
    cpu_s: float = 0.0
    patience: float = 1.0
    beat_s: float = field(default_factory=time.monotonic)


@final
class _Stand(NamedTuple):
    """Where this rank was when it wrote a report, and when that was."""

    at_s: float
    place: tuple[Any, ...]


@final
class _Picture(NamedTuple):
    """The reports of an alarm, what is known of silent ranks, and what both show."""

    diagnosis: Diagnosis
    reports: Mapping[int, RankReport]
    silent: Mapping[int, SilentRank]


@final
@dataclass(slots=True)
class _Board:
    """Reads what the ranks of a run tell each other: a card each, and in each alarm reports and a verdict.

    `engine` is the number of the engine that is watched, `machine` that of this process.
    """

    run: WatchedRun
    engine: int
    machine: str
    alarm: int = 0

    def key(self, kind: str, rank: int | None = None) -> str:
        """Returns the name of a message of this alarm."""
        return f"{self.engine}/{self.alarm}/{kind}" + ("" if rank is None else f"/{rank}")

    def card_of(self, rank: int) -> Card:
        """Returns what a rank has last told of itself."""
        key = f"{self.engine}/card/{rank}"
        if self.run.store.check([key]):
            return Card.from_json(self.run.store.get(key))
        return Card(rank, "?", "?", 0)

    def told(self, kind: str) -> list[int]:
        """Returns the ranks that have written a report of this kind."""
        ranks = range(self.run.world_size)
        return [one for one in ranks if self.run.store.check([self.key(kind, one)])]

    def picture(self, kind: str, there: Sequence[int]) -> _Picture:
        """Returns what the reports of the ranks that are there, and the processes of all others, show."""
        store = self.run.store
        reports = {one: RankReport.from_json(store.get(self.key(kind, one))) for one in there}
        silent = self._silent({one for one in range(self.run.world_size) if one not in reports})
        latest = max((r.card.step for r in reports.values() if r.card.doing == "step"), default=0)
        silent = {rank: one.in_step(latest) for rank, one in silent.items()}
        return _Picture(diagnose(reports, silent), reports, silent)

    def _silent(self, ranks: set[int]) -> dict[int, SilentRank]:
        """Returns what is known of ranks without a report."""
        cards = {rank: self.card_of(rank) for rank in ranks}
        here = {rank: card for rank, card in cards.items() if card.machine == self.machine}
        first = {rank: look_at(card.pid) for rank, card in here.items()}
        if here:
            time.sleep(_SECOND_LOOK_S)
        states: dict[int, State] = {
            rank: state_between(first[rank], look_at(card.pid), _SECOND_LOOK_S) for rank, card in here.items()
        }
        return {rank: SilentRank(card, states.get(rank, "unknown")) for rank, card in cards.items()}


@final
class Watchdog:
    """Watches one engine of this rank until `stop`, or until the engine is gone."""

    def __init__(self, progress: Progress, run: WatchedRun, options: WatchOptions) -> None:
        self._progress = weakref.ref(progress)
        self._run, self._options = run, options
        self._number = run.store.add(f"engines/{run.rank}", 1)  # engines are made in one order on all ranks
        shares = options.timeout_s / BEATS_PER_TIMEOUT
        self._beat_s = min(BEAT_S, shares) * max(1.0, run.world_size / _RANKS_PER_BEAT)
        self._card = Card(run.rank, socket.gethostname(), machine(), os.getpid())
        self._board = _Board(run, self._number, self._card.machine)
        self._stall = _Stall()
        self._pacing = Pacing(run.store, str(self._number), run.rank, run.world_size)
        self._far_ranks: Set[int] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="outsize-watchdog", daemon=True)
        self._tell("card", progress)

    def absent(self) -> str:
        """Returns which ranks have left the run; "" where none has, or nobody answers."""
        with _IfStoreAnswers():
            cards = (self._board.card_of(rank) for rank in range(self._run.world_size))
            left = [
                f"rank {card.rank} has left the run {card.place}" for card in cards if card.doing == "left"
            ]
            return "; ".join(left)
        return ""

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and says that this rank takes no further step."""
        progress, self._progress = self._progress(), lambda: None
        self._stopped.set()
        self._thread.join(self._beat_s * ANSWER_BEATS)
        if progress is not None and not self._thread.is_alive():
            with _IfStoreAnswers():
                self._tell("left", progress)

    # -- the thread ----------------------------------------------------------------------------------

    def _work(self) -> None:
        with _IfStoreAnswers():
            while not self._stopped.wait(self._beat_s):
                progress = self._progress()
                if progress is None:
                    return
                self.beat(progress)
                del progress  # An engine that is dropped is freed at once.

    def beat(self, progress: Progress) -> None:
        """Looks once: has this rank moved, is there an alarm, must it raise one?"""
        self._look(progress)
        self._pace(progress)
        if self._run.store.check([self._board.key("alarm")]):
            self._answer(progress)
        elif self._is_stalled(progress) and self._waits(progress):
            self._run.store.set(self._board.key("alarm"), str(self._run.rank))
            self._answer(progress)

    def _look(self, progress: Progress) -> None:
        """Notes whether this rank has moved since the last look, and for how long it has not."""
        stall, now_s, place = self._stall, time.monotonic(), progress.place()
        passed_s = min(now_s - stall.beat_s, 2 * self._beat_s)
        stall.beat_s = now_s
        if place != stall.place:
            self._stall = _Stall(place, 0.0, time.process_time())
            self._tell("card", progress)
        else:
            stall.stalled_s += passed_s

    def _pace(self, progress: Progress) -> None:
        """Tells how fast this rank steps; rank 0 names who holds up the others."""
        if (straggler := self._pacing.beat(progress, self._far)) is not None:
            progress.stragglers.append(straggler)
            peer = self._board.card_of(straggler.peer).host if straggler.cause == "link" else ""
            self._run.say(slow(straggler, self._board.card_of(straggler.rank).host, peer))

    def _far(self) -> Set[int]:
        """Returns the ranks on other machines; they are known once all ranks have told where they are."""
        if self._far_ranks is None:
            cards = [self._board.card_of(rank) for rank in range(self._run.world_size)]
            if any(not card.pid for card in cards):
                return frozenset()
            self._far_ranks = frozenset(card.rank for card in cards if card.machine != self._card.machine)
        return self._far_ranks

    def _limit_s(self, progress: Progress) -> float:
        return max(self._options.timeout_s, STEPS * progress.step_s())

    def _is_stalled(self, progress: Progress) -> bool:
        return self._stall.stalled_s >= self._stall.patience * self._limit_s(progress)

    def _waits(self, progress: Progress) -> bool:
        """Tells whether this rank waits for others; between steps only the youngest engine looks."""
        if not progress.doing and self._run.store.add(f"engines/{self._run.rank}", 0) != self._number:
            return False
        where = self._stack(progress).where
        return where in ("waits", "collective", "saves") or (where == "backward" and self._busy <= BUSY_SHARE)

    @property
    def _busy(self) -> float:
        """Returns the share of the time since this rank last moved in which it computed."""
        used_s = time.process_time() - self._stall.cpu_s
        return used_s / max(self._stall.stalled_s, self._beat_s)

    def _stack(self, progress: Progress) -> Stack:
        # Within a step threads of autograd may call what the user has hooked into the backward.
        helpers = sys._current_frames().keys() - {threading.get_ident()} if progress.doing else ()
        return stack_of(progress.thread, helpers)

    # -- an alarm ------------------------------------------------------------------------------------

    def _answer(self, progress: Progress) -> None:
        """Writes this rank's reports, and gives or awaits the verdict."""
        stall, store, rank = self._stall, self._run.store, self._run.rank
        before = self._tell_report("report", progress)
        there = self._reporting("report", progress, range(self._run.world_size))
        if there[0] == rank and store.add(self._board.key("judges"), 1) == 1:
            self._judge(progress, before, there)
        else:
            self._await_verdict(progress, before)
        self._board.alarm += 1
        stall.patience = 2 * max(1.0, stall.stalled_s / self._limit_s(progress))

    def _judge(self, progress: Progress, before: _Stand, there: Sequence[int]) -> None:
        """Gives the verdict; a hang is one only if all that is part of it stands still for some beats."""
        picture = self._board.picture("report", there)
        if picture.diagnosis.is_hang:
            self._until(progress, LASTS_BEATS, lambda: False)
            self._run.store.set(self._board.key("again"), "")
            self._tell_report("second", progress, before)
            there = self._reporting("second", progress, self._board.told("report"))
            picture = self._board.picture("second", there)
        error = self._judged(picture)
        self._run.store.set(self._board.key("verdict"), "wait" if error is None else "end")
        if error is not None:
            self._run.end(error)

    def _await_verdict(self, progress: Progress, before: _Stand) -> None:
        """Reports again where the judge asks for it, and ends where the verdict says so."""
        store, verdict, again = self._run.store, self._board.key("verdict"), self._board.key("again")
        first = LASTS_BEATS + ANSWER_BEATS
        self._until(progress, first, lambda: store.check([verdict]) or store.check([again]))
        if store.check([again]):
            self._tell_report("second", progress, before)
            self._until(progress, 2 * ANSWER_BEATS, lambda: store.check([verdict]))
        if store.check([verdict]) and store.get(verdict) == b"end":
            self._run.end(None)

    def _judged(self, picture: _Picture) -> RunHung | None:
        """Says what the reports show; returns the error that ends the run, if one does."""
        diagnosis, reports, silent = picture
        if diagnosis.is_hang:
            error = hang(diagnosis, reports, silent)
            if self._options.on_hang == "end":
                return error
            self._run.say(f"outsize: {error}")
        elif diagnosis.kind == "between":
            self._run.say(notice(diagnosis, reports))
        return None

    def _tell_report(self, kind: str, progress: Progress, before: _Stand | None = None) -> _Stand:
        """Writes a report; `before` is how this rank stood at the one before it. Returns how it stands."""
        self._look(progress)
        report = self._report(progress)
        stand = _Stand(time.monotonic(), (progress.place(), report.where, *report.waits_at))
        if before is not None:
            has_stood_s = stand.at_s - before.at_s if stand.place == before.place else 0.0
            report = replace(report, still=has_stood_s >= LASTS_BEATS * self._beat_s / 2)
        self._run.store.set(self._board.key(kind, self._run.rank), report.to_json())
        return stand

    def _reporting(self, kind: str, progress: Progress, awaited: Collection[int]) -> list[int]:
        """Returns the ranks that have written a report, after some beats for those of `awaited` ranks."""
        keys = [self._board.key(kind, one) for one in awaited]
        self._until(progress, ANSWER_BEATS, lambda: self._run.store.check(keys))
        return self._board.told(kind)

    def _report(self, progress: Progress) -> RankReport:
        stack, stall = self._stack(progress), self._stall
        runner, waits, action = progress.runner, (), ""
        if runner is not None:
            at, lacks = runner.place()
            row = runner.schedule.actions[runner.rank]
            action = str(row[at]) if at < len(row) else ""
            if stack.where == "waits":
                found = awaited(runner.schedule, runner.rank, at, lacks_messages=lacks)
                waits = tuple(type(w)(w.own, w.other, progress.ranks[w.rank]) for w in found)
        return RankReport(
            card=self._now("card", progress, action),
            where=stack.where,
            line=stack.line,
            call=stack.call,
            stack=stack.text,
            stalled_s=stall.stalled_s,
            limit_s=self._limit_s(progress),
            busy=self._busy,
            is_first=progress.done == 0,
            waits=waits,
        )

    # -- messages ------------------------------------------------------------------------------------

    def _now(self, kind: str, progress: Progress, action: str = "") -> Card:
        card, doing = self._card, "left" if kind == "left" else progress.doing
        return Card(card.rank, card.host, card.machine, card.pid, doing, progress.step, action)

    def _tell(self, kind: str, progress: Progress) -> None:
        self._run.store.set(f"{self._number}/card/{self._run.rank}", self._now(kind, progress).to_json())

    def _until(self, progress: Progress, beats: int, is_there: Callable[[], bool]) -> None:
        """Waits for messages of the others, for some beats at most, and looks at this rank meanwhile."""
        end_s = time.monotonic() + self._beat_s * beats
        while time.monotonic() < end_s and not self._stopped.is_set() and not is_there():
            time.sleep(_POLL_S)
            self._look(progress)


@final
class _IfStoreAnswers:
    """Ends a block where the store has gone, with its rank or its launcher: the run ends then anyway."""

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        """Swallows what torch's stores raise."""
        return kind is not None and issubclass(kind, RuntimeError | OSError)
