"""Replaces one file: whoever reads it, at any moment and after any kill, finds the old bytes or the new
ones.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from outsize.files.file_system import DISK, Buffer, FileSystem


def replace_text(path: str | Path, text: str, files: FileSystem = DISK) -> None:
    """Writes a text file in UTF-8. The old file stays whole until the new one is. Raises OSError.

    A link's target is replaced, not the link. What is no regular file (/dev/stdout, a pipe) is written to.
    """
    replace_bytes(path, text.encode(), files)


def replace_bytes(path: str | Path, data: bytes, files: FileSystem = DISK) -> None:
    """Does what `replace_text` does, for bytes."""
    target = Path(os.path.realpath(path))
    mode = target.stat().st_mode if target.exists() else None
    if mode is not None and not stat.S_ISREG(mode):
        target.write_bytes(data)
        return
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError(13, "Permission denied", str(target))  # a rename would not ask
    # Two threads may replace one file at the same time: each has a draft of its own.
    draft = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    try:
        write_synced(draft, [data], files)
        if mode is not None:
            draft.chmod(stat.S_IMODE(mode))
        files.rename(draft, target)
    except OSError:
        with suppress(OSError):
            files.unlink(draft)
        raise
    files.sync_folder(target.parent)


def replace_unsynced(path: Path, data: bytes) -> None:
    """Does what `replace_bytes` does for a file that can be made again, and that the user alone may read.

    It waits for no disk: after a power cut the file may be empty, or gone. Raises OSError.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    try:
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o600)
        with open(file, "wb") as opened:
            opened.write(data)
        draft.replace(path)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


def write_synced(path: Path, data: Iterable[Buffer], files: FileSystem = DISK) -> None:
    """Writes a file piece by piece and syncs its bytes; its name is safe after `sync_folder`."""
    file = files.create(path)
    try:
        for piece in data:
            files.write(file, piece)
            del piece  # Otherwise what it is a part of would live while the next one is made.
        files.sync(file)
    finally:
        files.close(file)
