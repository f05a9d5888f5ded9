"""Random faults on an elastic run for some minutes; at the end its losses are those of an undisturbed run.

chaos.py MINUTES [SEED] [AGENTS] [EVERY]  `make chaos` runs 30 minutes; AGENTS: 1, or 2 that meet on 127.0.0.1

With EVERY the one launcher copies the run into memory after each step (`--ranks peer_copies=1`) and saves it
after EVERY steps; most faults are workers' then. One takes at most a step; a launcher's, with the copies,
EVERY.

Four processes train and save each step. Every few seconds there is one fault: SIGKILL to a worker or a
launcher, SIGSTOP to a worker (the watchdog ends it), SIGTERM to a worker or a launcher (which saves the run).
A launcher that has ended is started again, as Slurm and Kubernetes do. At the end every loss that any attempt
has written is, digit for digit, that of the same step in one process, and no folder and no process is left.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
from elastic_worker import train
from patience import free_port

from outsize.train.world.variables import COPIES

HERE = Path(__file__).parent
OUTSIZE = "from outsize.cli import main; main()"
STEP_S, PAUSE_S = 0.2, (4.0, 20.0)
FAULTS = ("kill worker", "kill worker", "stop worker", "end worker", "kill launcher", "end launcher")
OF_COPIES = (*(fault for fault in FAULTS if fault.endswith("worker")), "kill worker", "kill launcher")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "end": signal.SIGTERM}


@dataclass(frozen=True)
class Chaos:
    """How the run is started; `every` is 0 without copies in memory."""

    folder: Path
    agents: int
    every: int


def command(chaos: Chaos, port: int) -> list[str]:
    folder, agents = chaos.folder, chaos.agents
    each = "--nproc-per-node=2:4" if agents == 1 else "--nproc-per-node=1:2"
    meeting = [] if agents == 1 else ["--nnodes=1:2", f"--rdzv-endpoint=127.0.0.1:{port}"]
    copies = ["--ranks=peer_copies=1"] if chaos.every else []
    options = [each, *meeting, *copies, "--max-restarts=1000", "--shutdown-timeout=20"]
    return [
        *(sys.executable, "-c", OUTSIZE, "run", *options),
        *(str(HERE / "elastic_worker.py"), str(folder), "1000000000", "", str(STEP_S)),
        str(chaos.every or 1),
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


def copies_of(worker: psutil.Process) -> str:
    """The folder of the copies in memory that a worker makes; "" where it makes none."""
    try:
        return worker.environ().get(COPIES, "").partition(":")[2]
    except psutil.Error:
        return ""


def run_for(minutes: float, chaos: Chaos, chance: random.Random) -> tuple[Counter[str], set[str]]:
    """Inflicts faults for so long; returns how many of each kind, and where copies in memory were."""
    folder, agents = chaos.folder, chaos.agents
    port = free_port()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "temporary")}
    counts, copies = Counter[str](), set[str]()
    log = (folder / "log").open("ab")

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command(chaos, port), stdout=log, stderr=log, env=env)

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
        fault = chance.choice(OF_COPIES if chaos.every else FAULTS)
        how, _, whom = fault.partition(" ")
        workers = workers_of(folder)
        copies.update(filter(None, map(copies_of, workers)))
        pids = [one.pid for one in (workers if whom == "worker" else launchers)]
        if pids:
            counts[fault] += 1
            os.kill(chance.choice(pids), SIGNALS[how])
    for launcher in launchers:
        launcher.send_signal(signal.SIGTERM)
    for launcher in launchers:
        launcher.wait(60)
    return counts, copies


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


def most_taken_again(counts: Counter[str], every: int) -> int:
    """How many steps the faults may have cost, where the run copies itself into memory."""
    of_launchers = sum(number for fault, number in counts.items() if fault.endswith("launcher"))
    of_workers = sum(number for fault, number in counts.items() if fault.endswith("worker"))
    return of_workers + of_launchers * every


def main(minutes: float, seed: int, agents: int, every: int) -> None:
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        (folder / "temporary").mkdir()
        counts, copies = run_for(minutes, Chaos(folder, agents, every), random.Random(seed))
        time.sleep(3)
        left = [p.pid for p in psutil.process_iter() if any(name in word for word in _words(p))]
        folders = [path.name for path in (folder / "temporary").glob("outsize-*")]
        folders += filter(os.path.exists, copies)
        try:
            steps, taken = check(folder)
            assert not left, f"processes are left: {left}"
            assert not folders, f"folders are left: {folders}"
            assert bool(copies) == bool(every), copies
            most = most_taken_again(counts, every)
            assert not every or taken - steps <= most, f"{taken - steps} steps taken again, at most {most}"
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
    defaults = ["0", "1", "0"]
    given = sys.argv[2:] + defaults[len(sys.argv) - 2 :]
    main(float(sys.argv[1]), *map(int, given))
