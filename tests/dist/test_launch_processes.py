"""Launching with real processes: small scripts that fail, block, get killed, or end well.

Every test starts a launcher of its own; `Launcher.finish` reads it to the end under a deadline. That all
processes are gone is no word of the launcher's: each worker writes its pid, and the pid must not be alive.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

import pytest
from forked_launcher import ForkedLauncher, Result, launch_in_fork
from patience import PATIENCE_S, until

pytestmark = pytest.mark.dist

PREAMBLE = """
import os, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
draft = Path(f"pid{rank}.draft"); draft.write_text(str(os.getpid())); draft.replace(f"pid{rank}")
"""
JOINED = (
    PREAMBLE
    + """
import torch, torch.distributed as dist
from outsize.train.world.join import join
from outsize.train.world.world import leave
world = join()
ones = torch.ones(2)
dist.all_reduce(ones)
"""
)


@final
@dataclass(frozen=True)
class Launcher:
    """A launcher in `folder`, running `train.py`, and the processes that have told their ids there."""

    folder: Path
    process: ForkedLauncher | Torchrun

    def wait_for(self, *names: str) -> None:
        def are_there() -> bool:
            return all((self.folder / name).exists() for name in names)

        until(lambda: are_there() or self.process.poll() is not None, lambda: f"no {names}")
        assert are_there(), self.process.finish()

    def finish(self) -> Result:
        return self.process.finish()

    def pids(self) -> list[int]:
        return [int(path.read_text()) for path in self.folder.glob("pid?")]

    def assert_all_gone(self) -> None:
        """They would sleep, or wait for each other, for longer than this waits."""
        until(lambda: not any(map(_alive, self.pids())), lambda: f"some are alive: {self.pids()}")

    def clean_up(self) -> None:
        """End what a failing test has left behind; a launcher that has ended left nothing."""
        if self.process.poll() is None:
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.clean_up()


@final
class Torchrun:
    """torchrun itself, with two processes."""

    def __init__(self, folder: Path, script: str) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script]
        env = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "RANK")}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)

    def poll(self) -> int | None:
        return self._process.poll()

    def finish(self) -> Result:
        out, err = self._process.communicate(timeout=PATIENCE_S)
        return Result(self._process.returncode, out, err)

    def clean_up(self) -> None:
        self._process.kill()
        self._process.communicate()


class Start(Protocol):
    def __call__(
        self, script: str, *arguments: str, nproc: int = 2, options: Sequence[str] = ()
    ) -> Launcher: ...


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    launchers: list[Launcher] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("RANK", raising=False)

    def begin(script: str, *arguments: str, nproc: int = 2, options: Sequence[str] = ()) -> Launcher:
        (tmp_path / "train.py").write_text(script)
        launched = launch_in_fork(tmp_path, ["train.py", *arguments], nproc, *options)
        launchers.append(Launcher(tmp_path, launched))
        return launchers[-1]

    yield begin
    for launcher in launchers:
        launcher.clean_up()


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Callable[[str], Launcher]]:
    launchers: list[Launcher] = []

    def begin(script: str) -> Launcher:
        (tmp_path / "train.py").write_text(script)
        launchers.append(Launcher(tmp_path, Torchrun(tmp_path, "train.py")))
        return launchers[-1]

    yield begin
    for launcher in launchers:
        launcher.clean_up()


def test_one_traceback_of_the_rank_that_failed_first(start: Start) -> None:
    launcher = start(JOINED + "if rank == 1:\n    raise ValueError('boom')\ndist.all_reduce(ones)\n")
    result = launcher.finish()
    assert result.code == 4
    assert result.err.count("Traceback") == 1
    assert 'File "train.py"' in result.err
    assert "worker.py" not in result.err
    assert "Connection closed" not in result.err
    last = result.err.strip().splitlines()[-1]
    assert last.startswith("RankFailed [E401]: rank 1 of 2 failed first; exit code 1, ValueError: boom, pid ")
    assert "Next: outsize run --nproc-per-node 1 train.py" in last
    launcher.assert_all_gone()


def test_a_rank_that_never_notices_is_ended(start: Start) -> None:
    """Rank 0 blocks for an hour and ignores SIGTERM: it is killed after the grace time."""
    stubborn = """
import signal
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path("ready").touch()
    time.sleep(3600)
while not Path("ready").exists():
    time.sleep(0.02)
raise ValueError("boom")
"""
    launcher = start(PREAMBLE + stubborn)
    launcher.wait_for("ready")
    result = launcher.finish()
    assert result.code == 4
    assert result.err.count("Traceback") == 1
    launcher.assert_all_gone()


@pytest.mark.interpreters
def test_collectives_in_flight_do_not_hold_a_failing_rank(torchrun: Callable[[str], Launcher]) -> None:
    """An ordinary exit of rank 1 would wait in gloo's destructor for rank 0, which does something else."""
    body = """
if rank == 1:
    dist.recv(ones, 0)
    pending = dist.all_reduce(ones, async_op=True)
    Path("failing").touch()
    raise ValueError("boom")
dist.send(ones, 1)
time.sleep(3600)
"""
    launcher = torchrun(JOINED + body)
    launcher.wait_for("failing")
    result = launcher.finish()  # outsize run would end rank 0 first; torchrun waits for rank 1
    assert result.code != 0
    launcher.assert_all_gone()


def test_a_killed_rank_is_named_with_its_signal(start: Start) -> None:
    body = "import signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.all_reduce(ones)\n"
    launcher = start(JOINED + body)
    result = launcher.finish()
    assert result.code == 4
    assert "RankFailed [E401]: rank 1 of 2 failed first; killed by SIGKILL" in result.err
    assert "Next: dmesg" in result.err
    assert "Traceback" not in result.err, "rank 0's lost connection is a consequence"
    launcher.assert_all_gone()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_without_a_traceback(start: Start, signum: int, code: int) -> None:
    body = "Path(f'ready{rank}').touch()\nwhile rank == 0:\n    time.sleep(0.1)\ndist.recv(ones, 0)\n"
    launcher = start(JOINED + body)
    launcher.wait_for("ready0", "ready1")
    assert isinstance(launcher.process, ForkedLauncher)
    launcher.process.send_signal(signum)
    result = launcher.finish()
    assert result.code == code
    assert "Traceback" not in result.err
    assert result.err.strip().endswith(f"stopped by {signal.Signals(signum).name}, 2 processes ended")
    launcher.assert_all_gone()


def test_workers_do_not_outlive_a_killed_launcher(start: Start) -> None:
    launcher = start(PREAMBLE + "Path(f'ready{rank}').touch()\ntime.sleep(3600)\n")
    launcher.wait_for("ready0", "ready1")
    assert isinstance(launcher.process, ForkedLauncher)
    launcher.process.send_signal(signal.SIGKILL)
    launcher.finish()
    launcher.assert_all_gone()


def test_lines_pass_whole_and_in_order(start: Start) -> None:
    body = "for i in range(200):\n    print('line', i)\n"
    body += "print('last', file=sys.stderr)\nprint('end' * rank, end='')\n"
    result = start(PREAMBLE + body).finish()
    assert result.code == 0
    expected = [f"line {i}" for i in range(200)]
    other = [line[4:] for line in result.out.splitlines() if line.startswith("[1] line")]
    assert other == expected
    assert result.out.count("line") == 400
    assert "[1] last\n" in result.err
    assert "outsize: 2 processes, OMP_NUM_THREADS=" in result.err
    assert "[1] end\n" in result.out, "a last line without an end gets one"


def test_a_script_sees_what_plain_python_shows_it(start: Start, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("")
    body = """
import helper
assert __name__ == "__main__" and sys.argv == ["train.py", "--steps", "3"], sys.argv
log = open(f"log{rank}", "w"); log.write("left open")
import atexit; atexit.register(lambda: print("handler", rank))
from threading import Thread
Thread(target=lambda: (time.sleep(0.2), print("thread", rank))).start()
sys.exit()
"""
    result = start(PREAMBLE + body, "--steps", "3", nproc=1).finish()
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == ["thread 0", "handler 0"]
    assert (tmp_path / "log0").read_text() == "left open"


def test_our_own_errors_are_one_line_with_their_place(start: Start) -> None:
    body = "from outsize.errors import BadPlan\nraise BadPlan('no stage 2', next_step='edit plan.json')\n"
    result = start(PREAMBLE + body, nproc=1).finish()
    assert result.code == 3
    assert result.err == "train.py:7: BadPlan [E205]: no stage 2. Next: edit plan.json\n"


def test_sys_exit_is_a_failure_without_a_traceback(start: Start) -> None:
    result = start(PREAMBLE + "sys.exit('no data here')\n", nproc=1).finish()
    assert result.code == 4
    assert result.err.splitlines()[0] == "no data here"
    assert "Traceback" not in result.err


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads the kernel's socket table")
def test_nothing_listens_beyond_loopback(start: Start) -> None:
    body = """
links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
inodes = {os.readlink(link) for link in links if os.path.lexists(link)}
rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
mine = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
assert mine, "gloo listens"
assert os.path.getsize(os.environ["OUTSIZE_STORE"]), "the ranks have met in a file"
assert all(address.startswith(("0100007F:", "0" * 24 + "01000000:")) for address in mine), mine
dist.barrier()
leave(world)
"""
    result = start(JOINED + body).finish()
    assert (result.code, result.out) == (0, ""), result.err


def test_a_rank_that_leaves_its_loop_early_is_named_and_not_the_one_that_waits(start: Start) -> None:
    body = """
if rank == 0:
    dist.all_reduce(ones)
leave(world)
"""
    result = start(JOINED + body).finish()
    assert result.code == 4
    said = "RankFailed [E401]: rank 1 of 2 has ended, while others still trained"
    assert said in result.err, result.err
    assert "failed first" not in result.err


def test_an_allocator_error_says_what_to_ask(start: Start) -> None:
    body = "if rank == 0: time.sleep(3600)\nraise torch.OutOfMemoryError('CUDA out of memory.')"
    result = start(JOINED + body).finish()
    assert "rank 1 of 2 failed first; exit code 1, OutOfMemoryError: CUDA out of memory." in result.err
    assert "Next: outsize fit" in result.err


def test_a_killed_launcher_leaves_no_folder(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    launcher = start(JOINED + "Path(f'in{rank}').touch()\ntime.sleep(3600)")
    launcher.wait_for("in0", "in1")
    (folder,) = (tmp_path / "temporary").glob("outsize-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "store").stat().st_size
    assert isinstance(launcher.process, ForkedLauncher)
    launcher.process.send_signal(signal.SIGKILL)
    launcher.finish()
    launcher.assert_all_gone()
    assert list((tmp_path / "temporary").glob("outsize-*")) == []


@pytest.mark.interpreters
def test_a_good_end_right_after_a_collective_does_not_abort(start: Start) -> None:
    """torch alone aborts about every second time when someone still holds the group (ending.py)."""
    raw = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\nones = torch.ones(2)\n"
    body = "group = dist.group.WORLD\ndist.all_reduce(ones)\ndist.all_reduce(ones)\n"
    for _ in range(2):
        result = start(PREAMBLE + raw + body).finish()
        assert result.code == 0, result.err


@pytest.mark.full
@pytest.mark.interpreters
def test_the_same_script_under_torchrun(torchrun: Callable[[str], Launcher]) -> None:
    """With forks: test_parity_processes.py and the training script of the examples."""
    good = torchrun(JOINED + "dist.all_reduce(ones)\nprint(f'{world.rank} {ones[0]}\\n', end='')\n").finish()
    assert good.code == 0, good.err
    assert sorted(good.out.split()) == ["0", "1", "4.0", "4.0"]


@pytest.mark.interpreters
def test_torchrun_names_the_root_cause(torchrun: Callable[[str], Launcher]) -> None:
    body = "if rank == 1:\n    raise ValueError('boom')\ndist.all_reduce(ones)\n"
    result = torchrun(JOINED + body).finish()
    assert result.code != 0
    root = result.err.split("Root Cause")[1]
    assert "ValueError: boom" in root
    assert "rank      : 1" in root


def test_a_failed_attempt_is_shown_and_the_next_one_may_succeed(start: Start) -> None:
    """Elastic's restarts; rank 1 joins the second time, over the same agent."""
    body = "attempt = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
    body += "if rank == 1 and attempt == '0':\n    raise ValueError('boom')\n"
    join = JOINED.removeprefix(PREAMBLE) + "print('attempt', attempt, ones[0].item())\n"
    result = start(PREAMBLE + body + join, options=["--max-restarts=2"]).finish()
    assert result.code == 0, result.err
    assert result.err.count("ValueError: boom") == 2, "a traceback and the RankFailed line"
    assert result.err.strip().endswith("outsize: restart 1 of 2")
    assert sorted(result.out.splitlines()) == ["[1] attempt 1 2.0", "attempt 1 2.0"]


def test_a_rank_that_ends_without_joining_is_named_at_once(start: Start) -> None:
    """Rank 0 would wait for half an hour."""
    result = start(PREAMBLE + "if rank == 1:\n    sys.exit()\n" + JOINED.removeprefix(PREAMBLE)).finish()
    assert result.code == 4
    assert "RankFailed [E401]: rank 1 of 2 ended without joining the others" in result.err
    assert "Traceback" not in result.err


def test_streams_go_to_files_as_torchrun_says(start: Start, tmp_path: Path) -> None:
    result = start(PREAMBLE + "print('line', rank)\n", options=["--log-dir=logs", "--redirects=1"]).finish()
    assert (result.code, result.out) == (0, "")
    assert sorted(path.read_text() for path in tmp_path.glob("logs/*/*/*/stdout.log")) == [
        "line 0\n",
        "line 1\n",
    ]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return False
