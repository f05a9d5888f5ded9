"""A file system that fails where it is told to, and forgets what was not synced when the power goes."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import final

from outsize.files.file_system import Buffer, Disk, FileSystem

Names = dict[Path, "Inode | None"]  # None is a folder


@final
class Killed(BaseException):
    """The process ends here: nothing catches it, and no clean-up may be relied on."""


@final
@dataclass(eq=False)
class Inode:
    """The bytes of a file, as programs see them and as they survive."""

    live: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@final
@dataclass
class Change:
    """A change of names in a folder that was not synced yet."""

    folder: Path
    path: Path
    inode: Inode | None
    is_there: bool
    source: Path | None = None

    def apply(self, names: Names) -> None:
        if self.source is not None:
            names.pop(self.source, None)
        if self.is_there:
            names[self.path] = self.inode
        else:
            names.pop(self.path, None)


@final
class FaultyFiles(FileSystem):
    """The real files under `root`, up to operation `at`; then `fault`.

    kill    the process ends before the operation, or within a write
    full    the disk is full from here on (ENOSPC): what needs room fails
    die     SIGKILL to this process
    """

    def __init__(self, root: Path, at: int, fault: str, draw: random.Random) -> None:
        self._at, self._fault, self._draw = at, fault, draw
        self._disk, self.operations, self._open = Disk(), 0, dict[int, Inode]()
        self._live: Names = {}
        for path in [root, *sorted(root.rglob("*"))]:
            bytes_ = None if path.is_dir() else path.read_bytes()
            self._live[path] = None if bytes_ is None else Inode(bytearray(bytes_), bytes_)
        self._durable: Names = dict(self._live)
        self._pending: list[Change] = []

    def make_folder(self, path: Path) -> None:
        self._reach(needs_room=True)
        self._disk.make_folder(path)
        self._change(Change(path.parent, path, None, True))

    def create(self, path: Path) -> int:
        self._reach(needs_room=True)
        file = self._disk.create(path)
        inode = self._live.get(path)
        if inode is None:
            inode = Inode()
            self._change(Change(path.parent, path, inode, True))
        inode.live.clear()
        self._open[file] = inode
        return file

    def write(self, file: int, data: Buffer) -> None:
        def some() -> None:
            part = bytes(data)[: self._draw.randint(0, len(data))]
            self._disk.write(file, part)
            self._open[file].live += part

        self._reach(needs_room=True, before=some)
        self._disk.write(file, data)
        self._open[file].live += bytes(data)

    def sync(self, file: int) -> None:
        self._reach(needs_room=True)
        self._open[file].synced = bytes(self._open[file].live)

    def close(self, file: int) -> None:
        self._disk.close(file)

    def map(self, path: Path, size_bytes: int) -> mmap:
        self._reach(needs_room=True)
        return self._disk.map(path, size_bytes)

    def fill(self, part: memoryview, write: Callable[[memoryview], object]) -> None:
        def some() -> None:
            all_of_it = memoryview(bytearray(len(part)))
            write(all_of_it)
            end = self._draw.randint(0, len(part))
            part[:end] = all_of_it[:end]

        self._reach(before=some)
        self._disk.fill(part, write)

    def rename(self, old: Path, new: Path) -> None:
        self._reach(needs_room=True)
        self._disk.rename(old, new)
        self._change(Change(new.parent, new, self._live.get(old), True, old))

    def unlink(self, path: Path) -> None:
        self._reach()
        self._disk.unlink(path)
        self._change(Change(path.parent, path, None, False))

    def remove_folder(self, path: Path) -> None:
        self._reach()
        self._disk.remove_folder(path)
        self._change(Change(path.parent, path, None, False))

    def sync_folder(self, path: Path) -> None:
        self._reach()
        for change in self._pending:
            if change.folder == path:
                change.apply(self._durable)
        self._pending = [change for change in self._pending if change.folder != path]

    def after_power_cut(self, root: Path, fresh: Path) -> Path:
        """Writes what survives into a fresh folder: any part of what was not synced."""
        names = dict(self._durable)
        for change in self._pending:
            if self._draw.random() < 0.5:
                change.apply(names)
        fresh.mkdir()
        for path, inode in sorted(names.items()):
            place = fresh / path.relative_to(root)
            if not place.parent.is_dir() or path == root:
                continue
            if inode is None:
                place.mkdir()
            else:
                place.write_bytes(self._survivors(inode))
        return fresh

    def _survivors(self, inode: Inode) -> bytes:
        live = bytes(inode.live)
        if live == inode.synced:
            return live
        cut = live[: self._draw.randint(0, len(live))]
        return self._draw.choice([inode.synced, live, cut, bytes(len(live)), b""])

    def _change(self, change: Change) -> None:
        change.apply(self._live)
        self._pending.append(change)

    def _reach(self, needs_room: bool = False, before: Callable[[], None] | None = None) -> None:
        self.operations += 1
        if self.operations < self._at:
            return
        if self._fault == "full":
            if needs_room:
                raise OSError(errno.ENOSPC, "No space left on device")
        elif self.operations == self._at:
            if before is not None:
                before()
            if self._fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise Killed
        else:
            raise Killed  # what still runs after the end (a finally) changes nothing
