"""Signals that ask a run to end: noticed after the step, given back, and not kept from forks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked import on_ranks

from outsize.errors import Preempted
from outsize.run.transport.rank_collectives import RankCollectives
from outsize.train.checkpoint.interval import SaveInterval
from outsize.train.checkpoint.preemption import PreemptionWatch
from outsize.train.checkpoint.timer import SaveRule, StepSaver


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_remembered_and_later_ones_end_nothing(number: signal.Signals) -> None:
    watch = PreemptionWatch()
    assert not watch.received
    for _ in range(3):
        signal.raise_signal(number)
    assert watch.received == number
    watch.close()


def test_a_fork_ends_by_the_signal() -> None:
    watch = PreemptionWatch()
    begun, begin = os.pipe()
    child = os.fork()
    if not child:
        os.write(begin, b"1")  # The interpreter drops signals that come before it has forked.
        while True:
            time.sleep(0.01)
    os.read(begun, 1)
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    assert not watch.received
    watch.close()


def test_another_thread_handles_no_signals() -> None:
    watches: list[PreemptionWatch] = []
    thread = threading.Thread(target=lambda: watches.append(PreemptionWatch()))
    thread.start()
    thread.join()
    assert not watches[0].received
    watches[0].close()


def test_saves_that_are_due_go_beside_and_the_last_one_is_waited_for(tmp_path: Path) -> None:
    saves: list[tuple[Path, int | None, bool]] = []

    def save(root: Path, *, keep: int | None, wait: bool) -> None:
        saves.append((root, keep, wait))

    saver = StepSaver(SaveRule(tmp_path, SaveInterval(2), 3), None)
    assert [saver.after_step(step, save, lambda _: None) for step in (1, 2, 3)] == [False, True, False]
    signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(Preempted, match=r"SIGUSR1 .* saved; step 3, in ") as raised:
        saver.after_step(3, save, lambda _: None)
    assert raised.value.shared
    assert saves == [(tmp_path, 3, False), (tmp_path, 3, True)]


def _saved(group: dist.ProcessGroup, root: Path) -> tuple[list[bool], str]:
    """Which of two steps a rank saves behind, and how it ends once rank 1 alone has received a signal."""
    asked: list[torch.Tensor] = []
    all_reduce = RankCollectives.all_reduce

    def counted(collectives: RankCollectives, x: torch.Tensor, *op: object) -> None:
        asked.append(x)
        all_reduce(collectives, x, *op)

    def save(root: Path, *, keep: int | None, wait: bool) -> None:
        """Writes nothing."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankCollectives, "all_reduce", counted)
        saver = StepSaver(SaveRule(root, SaveInterval(None, 0)), group)
        saves = [saver.after_step(step, save, lambda _: None) for step in (1, 2)]
        if group.rank() == 1:
            signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Preempted) as raised:
            saver.after_step(3, save, lambda _: None)
    assert len(asked) == 3, "one collective a step"
    return saves, str(raised.value)


def test_ranks_agree_on_signals_and_on_the_clock_of_the_first_one_at_once(tmp_path: Path) -> None:
    for saves, ended in on_ranks(tmp_path, 2, lambda group: _saved(group, tmp_path)):
        assert saves == [True, True]
        assert "SIGUSR1 has asked the run to end, and it is saved; step 3" in ended
