"""Says how far a save is that a thread writes beside the steps.

    on a terminal   outsize: saving step 500: 40 % of 1.2 GB     one line, written again each second
    elsewhere       INFO of the logger `outsize.checkpoint`, at the beginning and at the end
    in a program    engine.state.saving, or engine.state.on_saving = a function of the progress

Only rank 0 says it, of what it writes itself; all ranks write about as much.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TextIO, final

LOGGER: Final = logging.getLogger("outsize.checkpoint")
_SHOWN_EVERY_S: Final = 1.0


@final
@dataclass(slots=True)
class SaveProgress:
    """How far a save is: the bytes of this rank that are written, of all that it has to write.

    `tell` is called when it begins, once a second at most, and when it has ended (`is_done`) or failed
    (`failed`).
    """

    folder: Path
    step: int
    total_bytes: int
    tell: Callable[[SaveProgress], None] = field(repr=False)
    written_bytes: int = 0
    is_done: bool = False
    failed: bool = False
    began_s: float = field(default_factory=time.monotonic)
    _told_s: float = 0.0

    @property
    def share(self) -> float:
        """Returns the share that is written, from 0 to 1."""
        return self.written_bytes / self.total_bytes if self.total_bytes else float(self.is_done)

    @property
    def seconds(self) -> float:
        """Returns the seconds since it has begun."""
        return time.monotonic() - self.began_s

    def add(self, written_bytes: int) -> None:
        """Counts bytes that are written."""
        self.written_bytes += written_bytes
        if time.monotonic() - self._told_s >= _SHOWN_EVERY_S:
            self._told_s = time.monotonic()
            self.tell(self)

    def end(self, *, failed: bool = False) -> None:
        """Says that nothing more is written."""
        self.is_done, self.failed = not failed, failed
        self.tell(self)


def shown(progress: SaveProgress, screen: TextIO | None = None) -> None:
    """Writes the progress to the terminal (stderr), or to the log where it is none."""
    screen = screen or sys.stderr
    what = f"step {progress.step}"
    size = f"{progress.total_bytes / 1e9:.2f} GB"
    if screen is not None and screen.isatty():  # pyright: ignore[reportUnnecessaryComparison]
        line = f"outsize: saving {what}: {100 * progress.share:.0f} % of {size}"
        screen.write(f"\r\x1b[K{'' if progress.is_done or progress.failed else line}")
        screen.flush()
    elif progress.is_done:
        LOGGER.info("saved %s in %.1f s: %s, %s", what, progress.seconds, size, progress.folder)
    elif progress.failed:
        LOGGER.warning("%s is not saved: %s", what, progress.folder)
    elif not progress.written_bytes:
        LOGGER.info("saving %s: %s, %s", what, size, progress.folder)
