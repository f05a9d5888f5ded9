"""Runs that lose ranks go on with those that are left, and their losses are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_worker import train
from patience import PATIENCE_S, free_port, until

from outsize.errors import RankFailed
from outsize.run.transport.run_secret import SECRET

pytestmark = pytest.mark.dist

HERE = Path(__file__).parent
STEPS = 6
OUTSIZE = "from outsize.cli import main; main()"


def losses_in(folder: Path) -> dict[str, set[str]]:
    """Step -> the losses that attempts have had in it."""
    found: dict[str, set[str]] = {}
    for line in (folder / "losses").read_text().splitlines():
        step, _, loss = line.split()
        found.setdefault(step, set()).add(loss)
    return found


def undisturbed(steps: int) -> dict[str, set[str]]:
    return {step: {loss} for step, _, loss in (line.split() for line in train(None, steps, {}))}


def run_elastic(
    folder: Path, steps: int, kills: str, *options: str, every: int = 1
) -> subprocess.CompletedProcess[str]:
    (folder / "temporary").mkdir()
    command = [sys.executable, "-c", OUTSIZE, "run", *options, str(HERE / "elastic_worker.py"), str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "temporary")}
    return subprocess.run(
        [*command, str(steps), kills, "0", str(every)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=env,
        check=False,
    )


def test_a_killed_rank_is_left_out_and_the_digits_stay(tmp_path: Path) -> None:
    """kill -9 of one of three; the two that are left take up its stage."""
    done = run_elastic(tmp_path, STEPS, "3:1", "--nproc-per-node=2:3", "--max-restarts=2")
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 3 failed first; killed by SIGKILL" in done.stderr
    assert "outsize: restart 1 of 2, 2 of 3 processes here" in done.stderr
    assert "it was saved with pp 3" in done.stderr
    ranks = [int(line.split()[1]) for line in (tmp_path / "losses").read_text().splitlines()]
    assert ranks == sorted(ranks, reverse=True)
    assert set(ranks) == {3, 2}
    assert losses_in(tmp_path) == undisturbed(STEPS)
    assert {path.name.partition("-")[0] for path in (tmp_path / "run" / "plans").iterdir()} == {"2", "3"}
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.full
def test_restarts_with_as_many_ranks_and_down_to_the_least(tmp_path: Path) -> None:
    done = run_elastic(tmp_path, 12, "3:1,5:2,8:0,10:0", "--nproc-per-node=2:4", "--max-restarts=4")
    assert done.returncode == 0, done.stderr
    assert [text in done.stderr for text in ("3 of 4 processes", "2 of 4 processes")] == [True, True]
    assert "restart 4 of 4" in done.stderr
    assert losses_in(tmp_path) == undisturbed(12)


def test_copies_in_memory_lose_no_more_than_the_step_in_flight(tmp_path: Path) -> None:
    """Nothing is saved on disk; kill -9 of each rank in turn, at the end of a step that is not yet copied."""
    options = ("--nproc-per-node=1:2", "--max-restarts=2", "--ranks=peer_copies=1")
    done = run_elastic(tmp_path, STEPS, "3:1,5:0", *options, every=1000)
    assert done.returncode == 0, done.stderr
    steps = [int(line.split()[0]) for line in (tmp_path / "losses").read_text().splitlines()]
    assert steps == [1, 2, 3, 3, 4, 5, 5, 6]
    assert losses_in(tmp_path) == undisturbed(STEPS)
    assert not list((tmp_path / "run").glob("step-*"))
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_launcher_joins_a_run_and_the_digits_stay(tmp_path: Path) -> None:
    """Two launchers of one machine, whose messages are sealed; a third one with another secret is refused."""
    (tmp_path / "temporary").mkdir()
    port = free_port()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "temporary"), SECRET: "s" * 32}
    options = ("--nnodes=1:2", f"--rdzv-endpoint=127.0.0.1:{port}", "--nproc-per-node=1", "--max-restarts=2")
    command = [sys.executable, "-c", OUTSIZE, "run", *options, str(HERE / "elastic_worker.py"), str(tmp_path)]

    def start(name: str, secret: str = env[SECRET]) -> subprocess.Popen[bytes]:
        with (tmp_path / name).open("wb") as file:
            how = {**env, SECRET: secret}
            return subprocess.Popen([*command, "1000000", "", "0.1"], env=how, stdout=file, stderr=file)

    def until_steps_of(ranks: int) -> None:
        until(
            lambda: ranks in {int(line.split()[1]) for line in _lines(tmp_path / "losses")},
            lambda: _said(tmp_path),
        )

    launchers = [start("first")]
    try:
        until_steps_of(1)
        stranger = start("stranger", "t" * 32)
        launchers += [stranger, start("second")]
        until_steps_of(2)
        assert stranger.wait(PATIENCE_S) == RankFailed.exit_code
        launchers[0].send_signal(signal.SIGTERM)
        launchers[2].send_signal(signal.SIGTERM)
        assert launchers[0].wait(PATIENCE_S) in (75, 128 + signal.SIGTERM)
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    said = (tmp_path / "stranger").read_text()
    assert "is not sealed by the run's secret; key 'rendezvous'" in said
    assert "frame #0" not in said
    assert "without a secret" not in said
    losses = losses_in(tmp_path)
    assert losses == undisturbed(max(map(int, losses)))


def _said(folder: Path) -> str:
    """What each launcher has written."""
    logs = (path for path in (folder / name for name in ("first", "second", "stranger")) if path.exists())
    return "\n".join(f"== {path.name}\n{path.read_text()}" for path in logs)


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.count(" ") == 2] if path.exists() else []
