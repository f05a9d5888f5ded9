"""The watcher's thread: it looks at this rank, answers alarms, and gives the verdict if it is the first to.

    beat            nothing moved for the limit, and the main thread waits -> alarm n
    alarm n         every rank that lives writes report n
    ANSWER_S later  the lowest rank with a report diagnoses, says it, and writes verdict n: end, or wait
    verdict n       all go on to alarm n + 1; after `wait` each is twice as patient until it moves

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
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final, final

from outsize.errors import RunHung
from outsize.ops.watchdog.diagnosis import diagnose
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
class Watchdog:
    """Watches one engine of this rank until `stop`, or until the engine is gone."""

    def __init__(self, progress: Progress, run: WatchedRun, options: WatchOptions) -> None:
        self._progress = weakref.ref(progress)
        self._run, self._options = run, options
        self._number = run.store.add(f"engines/{run.rank}", 1)  # engines are made in one order on all ranks
        shares = options.timeout_s / BEATS_PER_TIMEOUT
        self._beat_s = min(BEAT_S, shares) * max(1.0, run.world_size / _RANKS_PER_BEAT)
        self._card = Card(run.rank, socket.gethostname(), machine(), os.getpid())
        self._alarm, self._stall = 0, _Stall()
        self._pacing = Pacing(run.store, str(self._number), run.rank, run.world_size)
        self._far_ranks: Set[int] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="outsize-watchdog", daemon=True)
        self._tell("card", progress)

    def absent(self) -> str:
        """Returns which ranks have left the run; "" where none has, or nobody answers."""
        with _IfStoreAnswers():
            cards = (self._card_of(rank) for rank in range(self._run.world_size))
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
        stall, now_s, place = self._stall, time.monotonic(), progress.place()
        passed_s = min(now_s - stall.beat_s, 2 * self._beat_s)
        stall.beat_s = now_s
        if place != stall.place:
            self._stall = _Stall(place, 0.0, time.process_time())
            self._tell("card", progress)
        else:
            stall.stalled_s += passed_s
        self._pace(progress)
        if self._run.store.check([self._key("alarm")]):
            self._answer(progress)
        elif self._is_stalled(progress) and self._waits(progress):
            self._run.store.set(self._key("alarm"), str(self._run.rank))
            self._answer(progress)

    def _pace(self, progress: Progress) -> None:
        """Tells how fast this rank steps; rank 0 names who holds up the others."""
        if (straggler := self._pacing.beat(progress, self._far)) is not None:
            progress.stragglers.append(straggler)
            peer = self._card_of(straggler.peer).host if straggler.cause == "link" else ""
            self._run.say(slow(straggler, self._card_of(straggler.rank).host, peer))

    def _far(self) -> Set[int]:
        """Returns the ranks on other machines; they are known once all ranks have told where they are."""
        if self._far_ranks is None:
            cards = [self._card_of(rank) for rank in range(self._run.world_size)]
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
        """Writes this rank's report, and gives or awaits the verdict."""
        store, rank = self._run.store, self._run.rank
        store.set(self._key("report", rank), self._report(progress).to_json())
        ranks = range(self._run.world_size)
        self._until(lambda: store.check([self._key("report", one) for one in ranks]))
        there = [one for one in ranks if one == rank or store.check([self._key("report", one)])]
        verdict = self._key("verdict")
        if there[0] == rank and store.add(self._key("judges"), 1) == 1:
            reports = {one: RankReport.from_json(store.get(self._key("report", one))) for one in there}
            error = self._judged(reports)
            store.set(verdict, "wait" if error is None else "end")
            if error is not None:
                self._run.end(error)
        else:
            self._until(lambda: store.check([verdict]))
            if store.check([verdict]) and store.get(verdict) == b"end":
                self._run.end(None)
        self._alarm += 1
        self._stall.patience = 2 * max(1.0, self._stall.stalled_s / self._limit_s(progress))

    def _judged(self, reports: Mapping[int, RankReport]) -> RunHung | None:
        """Says what the reports show; returns the error that ends the run, if one does."""
        silent = self._silent({one for one in range(self._run.world_size) if one not in reports})
        latest = max((r.card.step for r in reports.values() if r.card.doing == "step"), default=0)
        silent = {rank: one.in_step(latest) for rank, one in silent.items()}
        diagnosis = diagnose(reports, silent)
        if diagnosis.is_hang:
            error = hang(diagnosis, reports, silent)
            if self._options.on_hang == "end":
                return error
            self._run.say(f"outsize: {error}")
        elif diagnosis.kind == "between":
            self._run.say(notice(diagnosis, reports))
        return None

    def _silent(self, ranks: set[int]) -> dict[int, SilentRank]:
        """Returns what is known of ranks without a report."""
        cards = {rank: self._card_of(rank) for rank in ranks}
        here = {rank: card for rank, card in cards.items() if card.machine == self._card.machine}
        first = {rank: look_at(card.pid) for rank, card in here.items()}
        if here:
            time.sleep(_SECOND_LOOK_S)
        states: dict[int, State] = {
            rank: state_between(first[rank], look_at(card.pid), _SECOND_LOOK_S) for rank, card in here.items()
        }
        return {rank: SilentRank(card, states.get(rank, "unknown")) for rank, card in cards.items()}

    def _card_of(self, rank: int) -> Card:
        key = f"{self._number}/card/{rank}"
        if self._run.store.check([key]):
            return Card.from_json(self._run.store.get(key))
        return Card(rank, "?", "?", 0)

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

    def _key(self, kind: str, rank: int | None = None) -> str:
        return f"{self._number}/{self._alarm}/{kind}" + ("" if rank is None else f"/{rank}")

    def _until(self, is_there: Callable[[], bool]) -> None:
        """Waits for messages of the others, for some beats at most."""
        end_s = time.monotonic() + self._beat_s * ANSWER_BEATS
        while time.monotonic() < end_s and not self._stopped.is_set() and not is_there():
            time.sleep(_POLL_S)


@final
class _IfStoreAnswers:
    """Ends a block where the store has gone, with its rank or its launcher: the run ends then anyway."""

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        """Swallows what torch's stores raise."""
        return kind is not None and issubclass(kind, RuntimeError | OSError)
