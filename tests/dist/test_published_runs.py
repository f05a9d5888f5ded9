"""A run over processes is seen by `outsize top` while it goes on, and leaves nothing when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import until

pytestmark = pytest.mark.dist

OUTSIZE = [sys.executable, "-c", "from outsize.cli import main; main()"]
WORKER = Path(__file__).parent / "elastic_worker.py"


def runs(env: dict[str, str]) -> list[dict[str, Any]]:
    done = subprocess.run([*OUTSIZE, "top", "--json"], env=env, capture_output=True, check=True)
    return json.loads(done.stdout)["runs"]


# A run that takes less memory than its share, and more; it says which tenths of all memory it could have.
GREEDY = """
import sys
import psutil
import torch
import outsize

x = torch.ones(8, 4)
engine = outsize.parallelize(
    torch.nn.Linear(4, 3), (x,), target=torch.arange(8) % 3, loss_fn=torch.nn.functional.cross_entropy
)
total_bytes = psutil.virtual_memory().total
for tenths in (3, 5):  # torch's allocator may keep what is free again, so that a third size would add up
    try:
        torch.empty(total_bytes * tenths // 10, dtype=torch.uint8)  # no page of it is touched
        print(tenths)
    except RuntimeError as error:
        assert "allocate memory" in str(error)
"""


def test_two_runs_hold_their_shares_at_the_same_time(tmp_path: Path) -> None:
    """One takes more than its share and gets an error of memory; the other one goes on."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    (tmp_path / "greedy.py").write_text(GREEDY)
    run = (*OUTSIZE, "run", "--nproc-per-node=1", "--ranks=memory_share=0.4")
    losses = tmp_path / "losses"

    def until_steps(more: int) -> None:
        before = count()
        until(lambda: count() >= before + more or launcher.poll() is not None, (tmp_path / "said").read_text)
        assert launcher.poll() is None, (tmp_path / "said").read_text()

    def count() -> int:
        return losses.read_text().count("\n") if losses.exists() else 0

    with (tmp_path / "said").open("wb") as said:
        command = [*run, str(WORKER), str(tmp_path), "1000000", "", "0.05"]
        launcher = subprocess.Popen(command, env=env, stdout=said, stderr=said)
    try:
        until_steps(1)
        greedy = subprocess.run(
            [*run, str(tmp_path / "greedy.py")], env=env, capture_output=True, text=True, check=False
        )
        assert (greedy.returncode, greedy.stdout) == (0, "3\n"), greedy.stderr  # 0.3 it has, and not 0.5
        until_steps(2)
        limits = Path(f"/proc/{(tmp_path / 'pid-0').read_text()}/limits").read_text().splitlines()
        (held,) = (line.split()[3] for line in limits if line.startswith("Max data size"))
        assert int(held) == pytest.approx(0.4 * psutil.virtual_memory().total, abs=2)
    finally:
        launcher.kill()
        launcher.wait()


def test_a_run_is_seen_and_a_killed_one_leaves_nothing(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    command = [
        *OUTSIZE,
        "run",
        "--nproc-per-node=2",
        "--ranks=memory_share=0.5",
        str(WORKER),
        str(tmp_path),
        "1000000",
        "",
        "0.05",
    ]
    with (tmp_path / "said").open("wb") as said:
        launcher = subprocess.Popen(command, env=env, stdout=said, stderr=said)
    try:
        seen: list[dict[str, Any]] = []

        def has_saved() -> bool:
            seen[:] = runs(env)
            return bool(seen and seen[0]["state"] and seen[0]["state"]["checkpoint"])

        until(has_saved, (tmp_path / "said").read_text)
        assert len(seen) == 1, seen
        run = seen[0]
        assert run["launch"]["pid"] == launcher.pid
        assert str(WORKER) in run["launch"]["command"]
        assert [device["rank"] for device in run["state"]["devices"]] == [0, 1]
        assert all(device["memory_bytes"] > 0 for device in run["state"]["devices"])
        assert run["state"]["checkpoint"]["folder"].startswith(str(tmp_path))
        assert run["samples_per_s"] > 0
        half = psutil.virtual_memory().total // 2
        assert sum(device["reserved_bytes"] for device in run["state"]["devices"]) == pytest.approx(half)
        pid = int((tmp_path / "pid-1").read_text())  # the kernel holds each rank to a quarter
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        (held,) = (line.split()[3] for line in limits if line.startswith("Max data size"))
        assert int(held) == pytest.approx(half / 2, abs=2)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    until(lambda: not list(temporary.iterdir()), lambda: list(temporary.iterdir()))
    assert runs(env) == []
