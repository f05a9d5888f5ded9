"""Makes temporary folders that only this user reads, and that are gone when their process is."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from outsize.errors import BadOption
from outsize.files.folder_guard import removed_at_death

_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@contextmanager
def private_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """Makes a temporary folder of mode 0700 in `parent` or TMPDIR, which is gone afterwards.

    Raises BadOption where there is no place for it, or its disk is full later on.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise _no_place(error) from error
    with folder as name, removed_at_death(Path(name)):
        try:
            yield Path(name)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise _no_place(error) from error


def _no_place(error: OSError) -> BadOption:
    return BadOption(
        "there is no place for the run's temporary files",
        numbers=error.strerror or str(error),
        next_step="TMPDIR=/a/folder/with/space before the command",
    )
