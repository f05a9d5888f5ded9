"""A run grows and shrinks when its user says so, and its losses are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE_S, free_port, until
from test_elastic_runs import losses_in, undisturbed

from outsize.errors import Preempted
from outsize.run.transport.run_secret import SECRET

pytestmark = pytest.mark.dist

OUTSIZE = [sys.executable, "-c", "from outsize.cli import main; main()"]
WORKER = Path(__file__).parent / "elastic_worker.py"


def test_a_run_shrinks_and_grows_as_it_is_told_and_the_digits_stay(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    options = ["--devices", "1:3", "--shutdown-timeout", "300"]
    command = [*OUTSIZE, "run", *options, str(WORKER), str(tmp_path), "1000000", "", "0.1"]
    with (tmp_path / "said").open("wb") as said:
        launcher = subprocess.Popen(command, env=env, stdout=said, stderr=said)

    def until_steps_of(ranks: int, count: int) -> None:
        """Waits until the latest steps, at least `count` of them, have so many ranks."""
        expected = [str(ranks)] * count
        until(
            lambda: [line.split()[1] for line in _lines(tmp_path / "losses")][-count:] == expected,
            (tmp_path / "said").read_text,
        )

    def scaled(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*OUTSIZE, "scale", *words], env=env, capture_output=True, text=True)

    pid = str(launcher.pid)
    try:
        until_steps_of(3, 3)
        refused = scaled(pid, "4")
        assert (refused.returncode, "--devices 1:3. Next: outsize scale" in refused.stderr) == (2, True)
        assert json.loads(scaled(pid, "1", "--json").stdout) == {"run": launcher.pid, "wanted": 1}
        until_steps_of(1, 3)
        assert scaled(pid, "2").returncode == 0
        until_steps_of(2, 3)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(PATIENCE_S) == Preempted.exit_code
    finally:
        launcher.kill()
        launcher.wait()
    said = (tmp_path / "said").read_text()
    assert (
        "1 process is wanted: the run goes on so once its script has called engine.state.checkpoint" in said
    )
    assert "the run is saved, and goes on with 2 processes here" in said
    assert "restart" not in said
    steps: list[Any] = [int(line.split()[0]) for line in _lines(tmp_path / "losses")]
    assert steps == list(range(1, len(steps) + 1))  # none is lost, and none is taken twice
    assert losses_in(tmp_path) == undisturbed(max(steps))
    assert list(temporary.iterdir()) == []


def test_each_of_two_machines_is_resized_alone_and_the_digits_stay(tmp_path: Path) -> None:
    """Two launchers on one machine, whose number is fixed, of one or two processes each."""
    (tmp_path / "temporary").mkdir()
    place = ("--master-addr=127.0.0.1", f"--master-port={free_port()}")
    env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "temporary"), SECRET: "s" * 32}

    def start(node: int) -> subprocess.Popen[bytes]:
        options = ("--nnodes=2", f"--node-rank={node}", *place, "--devices=1:2", "--shutdown-timeout=300")
        command = [*OUTSIZE, "run", *options, str(WORKER), str(tmp_path), "1000000", "", "0.1"]
        with (tmp_path / f"said {node}").open("wb") as said:
            return subprocess.Popen(command, env=env, stdout=said, stderr=said)

    def until_steps_of(ranks: int) -> None:
        """Waits until the latest two steps have so many ranks: each has then called `checkpoint`, from whose
        first call on a signal saves the run instead of ending it.
        """

        def said() -> str:
            return "".join(path.read_text() for path in tmp_path.glob("said *"))

        def are_there() -> bool:
            assert [one.poll() for one in launchers] == [None, None], said()
            return [line.split()[1] for line in _lines(tmp_path / "losses")][-2:] == [str(ranks)] * 2

        until(are_there, said)

    launchers = [start(0), start(1)]
    try:
        until_steps_of(4)
        for node, processes, ranks in ((1, 1, 3), (0, 1, 2), (1, 2, 3)):
            pid = str(launchers[node].pid)
            done = subprocess.run([*OUTSIZE, "scale", pid, str(processes)], env=env, capture_output=True)
            assert done.returncode == 0, done.stderr
            until_steps_of(ranks)
        for launcher in launchers:
            launcher.send_signal(signal.SIGTERM)
        assert [launcher.wait(PATIENCE_S) for launcher in launchers] == [Preempted.exit_code] * 2
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    told = [(tmp_path / f"said {node}").read_text() for node in (0, 1)]
    for text in told:
        assert text.count("outsize: the run is saved, and goes on with") == 3
        assert "Preempted [E405]" not in text
    assert "restart" not in "".join(told)
    steps = [int(line.split()[0]) for line in _lines(tmp_path / "losses")]
    assert steps == list(range(1, len(steps) + 1))  # none is lost, and none is taken twice
    assert losses_in(tmp_path) == undisturbed(max(steps))


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.count(" ") == 2] if path.exists() else []
