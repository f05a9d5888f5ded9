"""Faults of real processes are named: the rank, what it does, and where.

Two cheap cases run always; `make parity` runs each fault on each rank, twenty times in all.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import in_forks
from forked_launcher import ForkedLauncher, Result, launch_in_fork
from patience import free_port, until

from outsize.ops.watchdog import watch
from outsize.ops.watchdog.options import WatchOptions
from outsize.run.progress import Progress
from outsize.train.world.join import join, take_rank

pytestmark = pytest.mark.dist
WORKER = Path(__file__).with_name("watchdog_worker.py")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[object]:
    launched: list[ForkedLauncher] = []

    def begin(fault: str, rank: int, ranks: int = 2, timeout_s: float = 1.0) -> Result:
        env = {"OUTSIZE_HANG_TIMEOUT": str(timeout_s), "OMP_NUM_THREADS": "1"}
        name = f"launcher{len(launched)}"
        launched.append(launch_in_fork(tmp_path, [str(WORKER), fault, str(rank)], ranks, env=env, name=name))
        return launched[-1].finish()

    yield begin
    for one in launched:
        one.clean_up()


# For each fault: what is said of the rank, and the exit code.
FAULTS = {
    "stop": ("RunHung [E404]: rank {} is stopped (SIGSTOP) in step 5; ", 4),
    "save": ("RunHung [E404]: rank {} is stopped (SIGSTOP) before step 5; ", 4),
    "inside": ("RunHung [E404]: rank {} waits in torch.distributed.all_reduce of watchdog_worker.py:", 4),
    "loop": ("RunHung [E404]: rank {} waits in torch.distributed.barrier of watchdog_worker.py:", 4),
    "leave": ("rank {} has left the run after step 4", 4),
    "disk": ("outsize: rank {} has not called step 5; it is in watchdog_worker.py:", 0),
}


def check(run: object, fault: str, rank: int, ranks: int) -> None:
    result = run(fault, rank, ranks)  # pyright: ignore[reportCallIssue]
    text, code = FAULTS[fault]
    assert text.format(rank) in result.err, result.err
    assert result.code == code, result.err
    others = [text.format(other) for other in range(ranks) if other != rank]
    assert not any(other in result.err for other in others), result.err


def test_a_stopped_rank_is_named(run: object) -> None:
    check(run, "stop", 1, 2)


def test_a_rank_that_leaves_its_loop_is_named_and_not_those_that_lose_it(run: object) -> None:
    result = run("leave", 1)  # pyright: ignore[reportCallIssue]
    assert "RankFailed [E401]: rank 1 of 2 has ended, while others still trained; " in result.err
    assert "failed first" not in result.err
    assert "outsize: rank 1 has left the run after step 4" in result.err


@pytest.mark.full
@pytest.mark.parametrize("again", range(2))
@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_on_each_rank(run: object, fault: str, rank: int, again: int) -> None:
    check(run, fault, rank, 3)


@pytest.mark.full
def test_a_rank_that_waits_within_torchs_backward_is_named(run: object) -> None:
    result = run("hidden", 0, 2)  # pyright: ignore[reportCallIssue]
    assert "and computes nothing; it is in torch's backward, where C++ waits for other ranks" in result.err
    assert result.code == 4


@pytest.mark.full
@pytest.mark.parametrize(("fault", "cause", "first"), [("slow", "(compute)", 2), ("input", "(input)", 4)])
def test_a_straggler_is_named_within_ten_steps(run: object, fault: str, cause: str, first: int) -> None:
    result = run(fault, 1, 2, 10.0)  # pyright: ignore[reportCallIssue]
    (line,) = [line for line in result.err.splitlines() if "holds up" in line]
    before, _, after = line.partition(" holds up the others in step ")
    assert before == "outsize: rank 1 (stage 1)"
    assert int(after.partition(":")[0]) < first + 10
    assert cause in line
    assert result.code == 0


@pytest.mark.full
def test_ranks_that_are_equally_fast_are_no_stragglers(run: object) -> None:
    result = run("same", 1, 2, 10.0)  # pyright: ignore[reportCallIssue]
    assert (result.code, "holds up" in result.err) == (0, False), result.err


@pytest.mark.full
def test_slow_ranks_alarm_nobody(run: object) -> None:
    """Noise: slow first steps, evaluations, gaps below the limit, and computing for longer than it."""
    result = run("noise", 1, 3)  # pyright: ignore[reportCallIssue]
    assert (result.code, result.err.count("outsize: ")) == (0, 0), result.err


def test_a_rank_whose_store_has_ended_goes_on_in_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 fails between two meetings; rank 1 goes on unwatched to what its own code says of it."""
    monkeypatch.setattr(watch, "_CONNECT_S", 1.0)
    port = free_port()

    def nobody_answers() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) != 0

    def rank(number: int) -> None:
        take_rank(number, 2, "127.0.0.1", port)
        world = join()
        if number == 0:
            os._exit(0)
        until(nobody_answers)
        watch._watch(Progress(range(2)), world, WatchOptions(60.0, "end"))
        os._exit(0)

    in_forks(tmp_path, 2, rank)
