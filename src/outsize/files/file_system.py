"""Holds the operations on files that must not lose data: each is one method, so that a test can let any fail.

A file is safe when its bytes are synced; its name is safe when its folder is synced. Neither implies the
other (Pillai et al., All File Systems Are Not Created Equal, OSDI 2014,
https://www.usenix.org/system/files/conference/osdi14/osdi14-paper-pillai.pdf).
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from typing import Final, final

Buffer = bytes | bytearray | memoryview
_BINARY: Final = getattr(os, "O_BINARY", 0)  # Windows translates line ends without it
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}
_BLOCK_BYTES: Final = 1 << 20


def reserve(file: int, size_bytes: int) -> None:
    """Takes the space on the disk for a file of so many bytes, whose beginning stays as it is.

    It is asked of the system; where that cannot be asked (macOS, Windows), zeros take it. Raises OSError.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size_bytes)
        return
    zeros = bytes(min(size_bytes, _BLOCK_BYTES))
    end = os.lseek(file, 0, os.SEEK_END)
    while end < size_bytes:
        end += os.write(file, zeros[: size_bytes - end])


class FileSystem(ABC):
    """Writes, renames and removes; every method raises OSError."""

    @abstractmethod
    def make_folder(self, path: Path) -> None:
        """Makes a folder that is not there yet; its parent is."""

    @abstractmethod
    def create(self, path: Path) -> int:
        """Opens an empty file for writing and returns its descriptor; what was in it is gone."""

    @abstractmethod
    def write(self, file: int, data: Buffer) -> None:
        """Appends all of the data."""

    @abstractmethod
    def sync(self, file: int) -> None:
        """Returns when the file's bytes survive a power cut."""

    @abstractmethod
    def close(self, file: int) -> None:
        """Closes the descriptor."""

    @abstractmethod
    def map(self, path: Path, size_bytes: int) -> mmap:
        """Opens or makes a file of so many bytes, with room for all of them, and returns its bytes.

        What is written to them is in the file at once, for every process.
        """

    @abstractmethod
    def fill(self, part: memoryview, write: Callable[[memoryview], object]) -> None:
        """Lets `write` set all bytes of a part of what `map` has returned."""

    @abstractmethod
    def rename(self, old: Path, new: Path) -> None:
        """Gives a file another name; a file of that name is replaced in the same moment."""

    @abstractmethod
    def unlink(self, path: Path) -> None:
        """Removes a file's name, if it is there."""

    @abstractmethod
    def remove_folder(self, path: Path) -> None:
        """Removes an empty folder."""

    @abstractmethod
    def sync_folder(self, path: Path) -> None:
        """Returns when the names in the folder survive a power cut."""


@final
class Disk(FileSystem):
    """Is the operating system's file system."""

    def make_folder(self, path: Path) -> None:
        """See FileSystem."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """See FileSystem."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _BINARY, 0o666)

    def write(self, file: int, data: Buffer) -> None:
        """See FileSystem."""
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[os.write(file, rest) :]

    def sync(self, file: int) -> None:
        """See FileSystem."""
        os.fsync(file)

    def close(self, file: int) -> None:
        """See FileSystem."""
        os.close(file)

    def map(self, path: Path, size_bytes: int) -> mmap:
        """See FileSystem. Without room reserved, a full disk would end the process that writes (SIGBUS)."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | _BINARY, 0o666)
        try:
            reserve(file, size_bytes)
            return mmap(file, size_bytes)
        finally:
            os.close(file)

    def fill(self, part: memoryview, write: Callable[[memoryview], object]) -> None:
        """See FileSystem."""
        write(part)

    def rename(self, old: Path, new: Path) -> None:
        """See FileSystem."""
        os.replace(old, new)

    def unlink(self, path: Path) -> None:
        """See FileSystem."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """See FileSystem."""
        path.rmdir()

    def sync_folder(self, path: Path) -> None:
        """Syncs the folder; a file system that cannot do that for folders has its own order of writes."""
        if not hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
            return
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        finally:
            os.close(folder)


DISK = Disk()
