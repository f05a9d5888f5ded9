"""Holds one small folder for each run of this user on this machine, in which it publishes how it goes.

    TMPDIR/outsize-runs-UID/            mode 0700; made by the first run, gone with the last one
        4711-1763990000.25/             of the process 4711, which started at that time (Unix seconds)
            launch.json                 what was started (ir/answers/run_state.py)
            state.json                  the latest figures, replaced about once a second
            watched                     is there where somebody wants the next file, too
            timeline.json               the latest step that was told, span by span

The name tells a live run from the leftover of one that was killed: another process may have its number by
now, but has not started at its time. Who reads the folders removes leftovers. A launcher also has a guard
process (folder_guard.py) that removes its folder at once.

Whoever else may write to TMPDIR cannot pass off a folder as ours: owner and mode are looked at before use.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, final

import psutil

from outsize.files.folder_guard import removed_at_death

LAUNCH: Final = "launch.json"
STATE: Final = "state.json"
TIMELINE: Final = "timeline.json"
WATCHED: Final = "watched"
_CLOCK_S: Final = 2.0  # The start of a process is told in ticks since a boot whose time may be corrected.
_TRIES: Final = 20


@final
@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run; `pid` is the process that has made it, its launcher or its rank 0."""

    path: Path
    pid: int
    started_unix_s: float

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """Returns the folder that a path names; None for another name."""
        pid, _, started = path.name.partition("-")
        try:
            return cls(path, int(pid), float(started))
        except ValueError:
            return None

    @property
    def is_live(self) -> bool:
        """Tells whether its process still runs."""
        started_unix_s = _started_unix_s(self.pid)
        return started_unix_s is not None and abs(started_unix_s - self.started_unix_s) < _CLOCK_S

    def put(self, name: str, text: str) -> None:
        """Replaces one of its files; a reader sees the old text or the new one. Raises OSError.

        Nothing is synced to the disk, since the file says nothing once the process is gone.
        """
        draft = self.path / f".{name}.{os.getpid()}"
        draft.write_text(text, encoding="utf-8")
        draft.replace(self.path / name)


def runs_root() -> Path:
    """Returns the folder of this user's runs on this machine, which need not be there."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"outsize-runs-{user}"


def live_runs(root: Path | None = None) -> list[RunFolder]:
    """Returns the runs that go on, the oldest first; removes what runs that were killed have left.

    Raises PermissionError where the folder is not this user's own.
    """
    root = root or runs_root()
    if not os.path.lexists(root):
        return []
    _insist_on_own(root)
    live: list[RunFolder] = []
    for path in root.iterdir():
        folder = RunFolder.of(path)
        if folder is not None and folder.is_live:
            live.append(folder)
        else:
            shutil.rmtree(path, ignore_errors=True)
    if not live:
        with contextlib.suppress(OSError):
            root.rmdir()
    return sorted(live, key=lambda one: (one.started_unix_s, one.pid))


@contextlib.contextmanager
def run_folder(root: Path | None = None) -> Iterator[RunFolder]:
    """Makes the folder of this process, which is gone after the block, and where the process is killed.

    It forks, so it is for a process without threads. Raises OSError.
    """
    root = root or runs_root()
    folder = make_run_folder(root)
    with removed_at_death(folder.path, root):
        try:
            yield folder
        finally:
            remove_run_folder(folder)


def make_run_folder(root: Path | None = None) -> RunFolder:
    """Makes the folder of this process. Raises OSError."""
    root, pid = root or runs_root(), os.getpid()
    started_unix_s = _started_unix_s(pid) or 0.0
    path = root / f"{pid}-{started_unix_s:.2f}"
    for attempt in range(_TRIES):
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        _insist_on_own(root)
        try:
            path.mkdir(mode=0o700, exist_ok=True)
            break
        except FileNotFoundError:  # The last of the other runs has just removed the root.
            if attempt == _TRIES - 1:
                raise
    return RunFolder(path, pid, started_unix_s)


def remove_run_folder(folder: RunFolder) -> None:
    """Removes the folder of a run, and that of all runs where it was the last one."""
    shutil.rmtree(folder.path, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.path.parent.rmdir()


def _insist_on_own(root: Path) -> None:
    """Raises PermissionError for a folder that another user has made, or may write to."""
    found = root.lstat()
    is_ours = not hasattr(os, "getuid") or (
        found.st_uid == os.getuid() and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    )
    if not stat.S_ISDIR(found.st_mode) or not is_ours:
        raise PermissionError(13, "it is no folder of this user's own with mode 0700", str(root))


def _started_unix_s(pid: int) -> float | None:
    """Returns when a process started; None where there is none, or only what is left of one."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None
