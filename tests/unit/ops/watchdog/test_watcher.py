"""The protocol of the watchers, with threads for ranks and torch's HashStore for the store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import until
from torch.distributed import HashStore, PrefixStore

from outsize.errors import BadOption, RunHung
from outsize.ops.watchdog.options import WatchOptions
from outsize.ops.watchdog.processes import look_at, state_between
from outsize.ops.watchdog.stacks import stack_of
from outsize.ops.watchdog.watcher import Watchdog, WatchedRun
from outsize.run.progress import Progress, watched
from outsize.run.stage.stage import run_backward

TIMEOUT_S = 0.4


class HeardStore:
    """A store that calls `heard(key)` after each message."""

    def __init__(self, store: Any, heard: Callable[[str], None]) -> None:
        self._store, self._heard = store, heard

    def set(self, key: str, text: str) -> None:
        self._store.set(key, text)
        self._heard(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Ranks:
    """Watchers of `count` ranks in this process, whose main threads wait here for `freed`."""

    def __init__(
        self, count: int, on_hang: str = "end", heard: Callable[[str], None] = lambda key: None
    ) -> None:
        self.said: list[str] = []
        self.ended: list[RunHung | None] = []
        self.started: list[Watchdog] = []
        self.freed = threading.Event()
        self.progresses = [Progress(range(count)) for _ in range(count)]
        store, options = HashStore(), WatchOptions(TIMEOUT_S, on_hang)  # pyright: ignore[reportArgumentType]
        stores = [HeardStore(PrefixStore("w", store), heard) for _ in range(count)]
        runs = [
            WatchedRun(stores[rank], rank, count, self.said.append, self.ended.append)
            for rank in range(count)
        ]
        self.watchers = [Watchdog(p, run, options) for p, run in zip(self.progresses, runs, strict=True)]

    def step(self, rank: int, wait: bool) -> threading.Thread:
        """Begins step 3 on a thread that waits, as in a collective or in code of its own."""

        def work() -> None:
            if wait:
                self.progresses[rank].begin("step", 3)
                in_collective(self.freed)
                self.progresses[rank].end()
            else:
                self.progresses[rank].thread = threading.get_ident()
                self.progresses[rank].step = 3
                self.freed.wait()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    def start(self, *which: int) -> None:
        for rank in which:
            self.watchers[rank].start()
            self.started.append(self.watchers[rank])

    def stop(self) -> None:
        self.freed.set()
        for watcher in self.started:
            watcher.stop()


def in_collective(event: threading.Event) -> None:
    """Waits in a frame that looks like one of torch.distributed."""
    code = compile(
        "def all_reduce(event):\n    while not event.is_set(): sleep(0.01)",
        "/x/torch/distributed/c.py",
        "exec",
    )
    scope: dict[str, object] = {"sleep": time.sleep}
    exec(code, scope)
    scope["all_reduce"](event)  # pyright: ignore[reportCallIssue]


def test_code_between_steps_is_named_while_others_wait_and_the_run_goes_on() -> None:
    ranks = Ranks(2)
    ranks.step(0, wait=True), ranks.step(1, wait=False)
    ranks.start(0, 1)
    until(lambda: len(ranks.said) >= 2)  # and once more, later
    ranks.stop()
    assert "rank 1 has not called step 3; it is in test_watcher.py:" in ranks.said[0]
    assert ranks.ended == []


@pytest.mark.parametrize("on_hang", ["end", "wait"])
def test_a_deadlock_ends_all_ranks_or_is_said(on_hang: str) -> None:
    ranks = Ranks(2, on_hang)
    ranks.step(0, wait=True), ranks.step(1, wait=True)
    ranks.progresses[1].step = 2
    ranks.start(0, 1)
    until(lambda: len(ranks.ended) >= 2 if on_hang == "end" else ranks.said)
    ranks.stop()
    words = str(next(error for error in ranks.ended if error)) if on_hang == "end" else ranks.said[0]
    assert "RunHung [E404]: rank" in words
    assert "torch.distributed.all_reduce" in words
    if on_hang == "end":
        assert ranks.ended.count(None) == 1  # one rank says it, the other ends with it


@pytest.mark.parametrize("goes_on_to", ["another step", "code of its own"])
def test_who_goes_on_after_its_report_waits_for_nobody(goes_on_to: str) -> None:
    """Rank 0 waits for rank 1, which is slow, and raises the alarm. Just then rank 1 comes and waits for
    rank 0, which goes on: each was seen to wait for the other, though never at one time.
    """
    later, threads = threading.Event(), list[threading.Thread]()

    def heard(key: str) -> None:
        if "report" in key and not ranks.freed.is_set():
            ranks.freed.set()
            threads[0].join()
            if goes_on_to == "another step":
                waits(0, 4)
            waits(1, 3)
            ranks.start(1)
        elif key.endswith("verdict"):
            later.set()

    def waits(rank: int, step: int) -> None:
        ranks.progresses[rank].begin("step", step)
        thread = threading.Thread(target=in_collective, args=(later,), daemon=True)
        thread.start()
        ranks.progresses[rank].thread = thread.ident or 0
        until(lambda: stack_of(thread.ident or 0).where == "collective")

    ranks = Ranks(2, heard=heard)
    threads.append(ranks.step(0, wait=True))
    ranks.start(0)
    until(later.is_set)
    until(lambda: ranks.ended or ranks.watchers[0]._board.alarm)
    ranks.stop()
    assert ranks.ended == []


def test_a_rank_without_a_watcher_is_looked_up_in_the_process_table() -> None:
    ranks = Ranks(2)
    ranks.step(0, wait=True)
    ranks.start(0)
    until(lambda: ranks.ended or ranks.watchers[0]._board.alarm)
    ranks.stop()
    assert ranks.said == []  # the process of this rank is this one, and it computes or sleeps


def test_who_has_left_is_known() -> None:
    ranks = Ranks(2)
    assert ranks.watchers[0].absent() == ""
    ranks.progresses[1].begin("step", 7)
    ranks.progresses[1].end()
    ranks.start(0, 1)
    ranks.watchers[1].stop()
    assert ranks.watchers[0].absent() == "rank 1 has left the run after step 7"
    ranks.stop()


def test_steps_are_counted_and_a_lost_connection_gets_a_note() -> None:
    class Crew:
        progress = Progress()

    class Engine:
        crew, steps = Crew(), 4

        @watched("step")
        def step(self, error: Exception | None) -> str:
            if error is not None:
                raise error
            return self.crew.progress.doing

    engine, progress = Engine(), Crew.progress
    assert engine.step(None) == "step"
    assert (progress.doing, progress.step, progress.done, progress.moves) == ("", 5, 1, 2)
    progress.absent = lambda: "rank 1 has left the run"
    with pytest.raises(ConnectionResetError) as raised:
        engine.step(ConnectionResetError("gone"))
    assert raised.value.__notes__ == ["outsize: rank 1 has left the run"]
    assert progress.done == 1


def test_a_thread_in_a_collective_waits_and_one_in_a_loop_runs() -> None:
    event = threading.Event()
    thread = threading.Thread(target=in_collective, args=(event,), daemon=True)
    thread.start()
    assert thread.ident is not None
    until(lambda: stack_of(thread.ident or 0).where == "collective")
    stack = stack_of(thread.ident)
    event.set()
    assert stack.call == "torch.distributed.all_reduce"
    assert stack.line.startswith("test_watcher.py:")
    assert stack_of(threading.get_ident()).where == "runs"


def test_a_thread_in_torchs_backward_is_there() -> None:
    weight = torch.ones(600, 600, requires_grad=True)
    product = weight
    for _ in range(12):
        product = product @ weight
    thread = threading.Thread(target=run_backward, args=([product], [torch.ones(600, 600)]), daemon=True)
    thread.start()
    until(lambda: stack_of(thread.ident or 0).where == "backward")
    thread.join()


def test_a_process_is_looked_at() -> None:

    first = look_at(os.getpid())
    sum(range(3_000_000))
    assert state_between(first, look_at(os.getpid()), 0.05) == "busy"
    assert look_at(2**22 + 1) is None
    assert state_between(None, None, 1.0) == "gone"


def test_without_proc_a_process_that_is_there_is_unknown_and_not_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Path, "read_text", _missing)
    there = look_at(os.getpid())
    assert there is not None
    assert state_between(there, there, 1.0) == "unknown"
    assert look_at(2**22 + 1) is None


def _missing(path: Path, **_: object) -> str:
    raise FileNotFoundError(path)


@pytest.mark.parametrize(("timeout_s", "on_hang"), [(-1.0, "end"), (float("nan"), "end"), (1.0, "cry")])
def test_options_that_make_no_sense_are_refused(timeout_s: float, on_hang: str) -> None:
    with pytest.raises(BadOption):
        WatchOptions(timeout_s, on_hang)  # pyright: ignore[reportArgumentType]


def test_options_travel_in_the_environment() -> None:
    options = WatchOptions(3.5, "wait", 100)
    assert WatchOptions.of_environment(options.environment()) == options
    assert WatchOptions.of_environment({}) == WatchOptions()
    assert WatchOptions.given(None, "end", None, options.environment()) == WatchOptions(3.5, "end", 100)
    assert WatchOptions.given(None, None, 0, options.environment()) == WatchOptions(3.5, "wait")
    with pytest.raises(BadOption):
        WatchOptions.of_environment({"OUTSIZE_HANG_TIMEOUT": "soon"})
    with pytest.raises(BadOption, match="OUTSIZE_VERIFY='often' is no number of steps"):
        WatchOptions.of_environment({"OUTSIZE_VERIFY": "often"})
