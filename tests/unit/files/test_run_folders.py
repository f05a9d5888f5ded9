"""Each run has a folder that only its user can see, and that is gone when the run is, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import until

from outsize.files.run_folders import STATE, live_runs, make_run_folder, remove_run_folder, run_folder

KILLED = """
import sys, time
from pathlib import Path
from outsize.files.run_folders import make_run_folder, run_folder
if sys.argv[2] == "guarded":
    with run_folder(Path(sys.argv[1])):
        print("there", flush=True)
        time.sleep(3600)
make_run_folder(Path(sys.argv[1]))
print("there", flush=True)
time.sleep(3600)
"""


def started(root: Path, how: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(root), how], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"there\n"
    return process


def test_a_run_is_seen_as_long_as_it_lasts(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    assert live_runs(root) == []
    with run_folder(root) as folder:
        folder.put(STATE, "first")
        folder.put(STATE, "second")
        assert live_runs(root) == [folder]
        assert folder.pid == os.getpid()
        assert [path.name for path in folder.path.iterdir()] == [STATE]
        assert (folder.path / STATE).read_text() == "second"
        assert [path.stat().st_mode & 0o777 for path in (root, folder.path)] == [0o700, 0o700]
    assert list(tmp_path.iterdir()) == []


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    process = started(root, "guarded")
    assert [run.pid for run in live_runs(root)] == [process.pid]
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not root.exists())


def test_a_reader_removes_what_a_killed_process_has_left(tmp_path: Path) -> None:
    """Nobody guards the folder here; a number that another process has by now does not keep it."""
    root = tmp_path / "runs"
    process = started(root, "alone")
    (run,) = live_runs(root)
    reused = root / f"{os.getpid()}-1000.00"
    reused.mkdir()
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert live_runs(root) == []  # dead, though nobody has reaped it
    process.wait()
    assert not run.path.exists()
    assert not root.exists()


def test_a_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    for use in (live_runs, make_run_folder):
        with pytest.raises(PermissionError, match="no folder of this user's own"):
            use(root)
    root.rmdir()
    root.symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        make_run_folder(root)


def test_the_last_run_takes_the_root_with_it(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    other = started(root, "alone")
    folder = make_run_folder(root)
    remove_run_folder(folder)
    assert [run.pid for run in live_runs(root)] == [other.pid]
    other.kill()
    other.wait()
    assert live_runs(root) == []
    assert not root.exists()
