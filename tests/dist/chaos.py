"""Random faults on an elastic run for some minutes; at the end its losses are those of an undisturbed run.

chaos.py MINUTES [SEED] [AGENTS]     `make chaos` runs 30 minutes; AGENTS: 1, or 2 that meet on 127.0.0.1

Four processes train and save each step. Every few seconds there is one fault: SIGKILL to a worker or a
launcher, SIGSTOP to a worker (the watchdog ends it), SIGTERM to a worker or a launcher (which saves the run).
A launcher that has ended is started again, as Slurm and Kubernetes do. At the end every loss that any attempt
has written is, digit for digit, that of the same step in one process, and no folder and no process is left.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from elastic_worker import train

HERE = Path(__file__).parent
OUTSIZE = "from outsize.cli import main; main()"
STEP_S, PAUSE_S = 0.2, (4.0, 20.0)
FAULTS = ("kill worker", "kill worker", "stop worker", "end worker", "kill launcher", "end launcher")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "end": signal.SIGTERM}


def command(folder: Path, agents: int, port: int) -> list[str]:
    each = "--nproc-per-node=2:4" if agents == 1 else "--nproc-per-node=1:2"
    meeting = [] if agents == 1 else ["--nnodes=1:2", f"--rdzv-endpoint=127.0.0.1:{port}"]
    options = [each, *meeting, "--max-restarts=1000", "--shutdown-timeout=20"]
    return [
        *(sys.executable, "-c", OUTSIZE, "run", *options),
        *(str(HERE / "elastic_worker.py"), str(folder), "1000000000", "", str(STEP_S)),
    ]


def workers_of(folder: Path) -> list[psutil.Process]:
    """The processes that have said in the folder that they train, and do."""
    found: list[psutil.Process] = []
    for path in folder.glob("pid-*"):
        try:
            process = psutil.Process(int(path.read_text() or "0"))
            if process.create_time() <= path.stat().st_mtime and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, ValueError):
            continue
    return found


def run_for(minutes: float, folder: Path, agents: int, chance: random.Random) -> Counter[str]:
    """Inflicts faults for so long, and returns how many of each kind."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "temporary")}
    counts: Counter[str] = Counter()
    log = (folder / "log").open("ab")

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command(folder, agents, port), stdout=log, stderr=log, env=env)

    launchers = [start() for _ in range(agents)]
    end_s, next_s = time.monotonic() + 60 * minutes, time.monotonic() + 20
    while time.monotonic() < end_s:
        time.sleep(0.2)
        for number, launcher in enumerate(launchers):
            if launcher.poll() is not None:
                counts[f"exit code {launcher.returncode}"] += 1
                launchers[number] = start()
        if time.monotonic() < next_s:
            continue
        next_s = time.monotonic() + chance.uniform(*PAUSE_S)
        fault = chance.choice(FAULTS)
        how, _, whom = fault.partition(" ")
        pids = [one.pid for one in (workers_of(folder) if whom == "worker" else launchers)]
        if pids:
            counts[fault] += 1
            os.kill(chance.choice(pids), SIGNALS[how])
    for launcher in launchers:
        launcher.send_signal(signal.SIGTERM)
    for launcher in launchers:
        launcher.wait(60)
    return counts


def check(folder: Path) -> tuple[int, int]:
    """Compares each loss with the undisturbed run's; returns steps and attempts at steps."""
    lines = [line.split() for line in (folder / "losses").read_text().splitlines()]
    last = max(int(step) for step, _, _ in lines)
    right = {step: loss for step, _, loss in (line.split() for line in train(None, last, {}))}
    wrong = [line for line in lines if line[2] != right[line[0]]]
    assert not wrong, f"{len(wrong)} of {len(lines)} losses differ, first {wrong[0]}: {right[wrong[0][0]]}"
    missing = set(right) - {step for step, _, _ in lines}
    assert not missing, f"steps without a loss: {sorted(missing, key=int)[:5]}"
    return last, len(lines)


def main(minutes: float, seed: int, agents: int) -> None:
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        (folder / "temporary").mkdir()
        counts = run_for(minutes, folder, agents, random.Random(seed))
        time.sleep(3)
        left = [p.pid for p in psutil.process_iter() if any(name in word for word in _words(p))]
        folders = [path.name for path in (folder / "temporary").glob("outsize-*")]
        try:
            steps, taken = check(folder)
            assert not left, f"processes are left: {left}"
            assert not folders, f"folders are left: {folders}"
        except BaseException:
            sys.stdout.write((folder / "log").read_text(errors="replace")[-20000:])
            raise
        ranks = Counter(line.split()[1] for line in (folder / "losses").read_text().splitlines())
    print(f"{minutes:g} minutes, seed {seed}, {agents} launchers: {dict(counts)}")
    print(f"{steps} steps, {taken - steps} of them taken again; steps by ranks: {dict(ranks)}")
    print("the losses are those of an undisturbed run; nothing is left")


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


if __name__ == "__main__":
    given = [*sys.argv[1:], "0", "1"]
    main(float(given[0]), int(given[1]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
