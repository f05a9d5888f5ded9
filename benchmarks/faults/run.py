"""How many seconds does it take until a fault is named, and until the first good step after it?

python benchmarks/faults/run.py [TRIES [FAULT ...]]     prints a table; one try of all takes five minutes
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

OUTSIZE = (sys.executable, "-c", "from outsize.cli import main; main()", "run")
WORKER = Path(__file__).with_name("worker.py")
SMALL, LARGE = (64, 8), (3400, 10)  # the large one has 116 million parameters
PATIENCE_S = 240.0
Seconds = dict[str, float]


@dataclass
class Run:
    """Launchers of one training, and what its ranks have told in `folder`."""

    folder: Path
    size: tuple[int, int] = SMALL
    fault: str = "none"
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """Starts a launcher whose messages go to FOLDER/said."""
        temporary = self.folder / "temporary"
        temporary.mkdir(exist_ok=True)
        variables = ("env", f"TMPDIR={temporary}", "OMP_NUM_THREADS=1")
        worker = (str(WORKER), str(self.folder), *map(str, self.size), self.fault)
        with (self.folder / "said").open("ab") as said:
            command = [*variables, *OUTSIZE, *options, *worker]
            self.launchers.append(subprocess.Popen(command, stdout=said, stderr=said))
        return self.launchers[-1]

    def steps(self) -> list[tuple[float, int, int]]:
        """Returns time, process and number of ranks of each step of each rank, the earliest first."""
        lines = [line for file in self.folder.glob("steps-*") for line in file.read_text().splitlines()]
        rows = [line.split() for line in lines if len(line.split()) == 4]
        return sorted((float(row[0]), int(row[1]), int(row[2])) for row in rows)

    def trains(self, count: int = 3, ranks: int = 1) -> None:
        """Waits until `ranks` or more ranks have ended so many steps together."""
        wait_for(lambda: sum(of >= ranks for _, _, of in self.steps()) >= count * ranks, self)

    def pid(self, rank: int) -> int:
        """Returns the process that has told rank's latest step."""
        return int((self.folder / f"steps-{rank}").read_text().splitlines()[-1].split()[1])

    def says(self, text: str) -> float:
        """Waits until a launcher or rank has said the text; returns when."""
        return wait_for(lambda: text in (self.folder / "said").read_text(errors="replace"), self)

    def ended(self) -> float:
        """Waits until the first launcher has ended; returns when."""
        return wait_for(lambda: self.launchers[0].poll() is not None, self)

    def stepped_anew(self, before: set[int], ranks: int = 1) -> float:
        """Waits for the first step of a process that is none of those `before`; returns when it ended."""
        new: list[float] = []

        def is_there() -> bool:
            new[:] = [at for at, pid, of in self.steps() if pid not in before and of >= ranks]
            return bool(new)

        wait_for(is_there, self)
        return new[0]

    def pids(self) -> set[int]:
        """Returns all processes that have told of a step."""
        return {pid for _, pid, _ in self.steps()}

    def close(self) -> None:
        """Ends what runs still."""
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()


def wait_for(is_there: Callable[[], bool], run: Run) -> float:
    """Returns when something was there. Raises TimeoutError."""
    end_s = time.monotonic() + PATIENCE_S
    while not is_there():
        if time.monotonic() > end_s:
            raise TimeoutError((run.folder / "said").read_text(errors="replace")[-2000:])
        time.sleep(0.01)
    return time.time()


def killed(pid: int, how: signal.Signals = signal.SIGKILL) -> float:
    """Sends a signal and returns when."""
    os.kill(pid, how)
    return time.time()


def raises(run: Run, fault: str = "raise", text: str = "failed first") -> Seconds:
    """A rank raises an error."""
    run.fault = fault
    run.start("--nproc-per-node=2")
    named = run.says(text)
    at = float((run.folder / "fault").read_text())
    return {"named": named - at, "ended": run.ended() - at}


def leaves(run: Run) -> Seconds:
    """A rank leaves its loop before the other."""
    return raises(run, "leave", "has ended, while others still trained")


def dies(run: Run) -> Seconds:
    """A rank is killed."""
    run.start("--nproc-per-node=2")
    run.trains()
    return _since(run, "failed first", killed(run.pid(1)))


def stops(run: Run) -> Seconds:
    """A rank is stopped."""
    run.start("--nproc-per-node=2")
    run.trains()
    return _since(run, "is stopped (SIGSTOP)", killed(run.pid(1), signal.SIGSTOP))


def _since(run: Run, text: str, at: float) -> Seconds:
    named = run.says(text)
    return {"named": named - at, "ended": run.ended() - at}


def restarts(run: Run, *options: str) -> Seconds:
    """One of four workers of 116 million parameters is killed, and the run goes on."""
    run.size = LARGE
    run.start("--nproc-per-node=2:4", "--max-restarts=3", *options)
    run.trains(3, 4)
    before, at = run.pids(), killed(run.pid(1))
    return {"first good step": run.stepped_anew(before) - at}


def restarts_from_memory(run: Run) -> Seconds:
    """The same with copies in memory."""
    return restarts(run, "--ranks=peer_copies=1")


def launcher_dies(run: Run) -> Seconds:
    """One of two launchers is killed, where machines come and go."""
    point = _meeting_point()
    run.start(*point)
    other = run.start(*point)
    run.trains(3, 2)
    before, at = run.pids(), killed(other.pid)
    return {"first good step": run.stepped_anew(before) - at}


def launcher_joins(run: Run) -> Seconds:
    """A second launcher joins."""
    point = _meeting_point()
    run.start(*point)
    run.trains()
    before, at = run.pids(), time.time()
    run.start(*point)
    return {"first good step": run.stepped_anew(before, 2) - at}


def _meeting_point() -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return ["--nproc-per-node=1", "--nnodes=1:2", f"--rdzv-endpoint=127.0.0.1:{port}", "--max-restarts=3"]


def is_asked_to_end(run: Run) -> Seconds:
    """SIGTERM to the launcher: the step ends, and the run is saved."""
    launcher = run.start("--nproc-per-node=2")
    run.trains()
    at = killed(launcher.pid, signal.SIGTERM)
    seconds = run.ended() - at
    assert launcher.returncode == 75, launcher.returncode
    return {"ended": seconds}


def launcher_is_killed(run: Run) -> Seconds:
    """The launcher is killed: until its workers and its folders are gone."""
    launcher = run.start("--nproc-per-node=2")
    run.trains()
    folder, at = run.folder / "temporary", killed(launcher.pid)
    ours = "outsize*"  # torch leaves a cache of its own there
    return {"all gone": wait_for(lambda: not list(folder.glob(ours)), run) - at}


def port_is_in_use(run: Run) -> Seconds:
    """The meeting port is in use."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = time.time()
        run.start("--nproc-per-node=2", f"--master-port={taken.getsockname()[1]}")
        return {"ended, with the start": run.ended() - at}


FAULTS: tuple[Callable[[Run], Seconds], ...] = (
    raises,
    dies,
    leaves,
    stops,
    restarts,
    restarts_from_memory,
    launcher_dies,
    launcher_joins,
    is_asked_to_end,
    launcher_is_killed,
    port_is_in_use,
)


def main(tries: int, names: list[str]) -> None:
    """Inflicts each fault so often, and prints the seconds."""
    for fault in FAULTS:
        if names and fault.__name__ not in names:
            continue
        seconds: dict[str, list[float]] = {}
        for _ in range(tries):
            with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as name:
                run = Run(Path(name))
                try:
                    for what, found in fault(run).items():
                        seconds.setdefault(what, []).append(found)
                finally:
                    run.close()
        shown = ", ".join(f"{what} {_range(found)}" for what, found in seconds.items())
        print(f"{fault.__name__:22} {shown}    load {os.getloadavg()[0]:.0f}", flush=True)


def _range(found: list[float]) -> str:
    middle = statistics.median(found)
    return f"{middle:.1f} s" + (f" ({min(found):.1f} to {max(found):.1f})" if len(found) > 1 else "")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1, sys.argv[2:])
