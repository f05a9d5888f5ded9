"""Names the variables by which the launcher tells its ranks what they cannot know, and reads their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

PREFIX: Final = "OUTSIZE_"
SIZES: Final = "OUTSIZE_WORLD_SIZES"
"""Holds the numbers of ranks that a run may have, "2,3,4", where there are several."""
COPIES: Final = "OUTSIZE_PEER_COPIES"
"""Says how often a run copies itself into memory, and where: 1:/dev/shm/outsize-..."""
PUBLISHED: Final = "OUTSIZE_RUN_FOLDER"
"""Names the folder in which a run is published (files/run_folders.py); "" where none could be made."""
PER_DEVICE: Final = "OUTSIZE_RANKS_PER_DEVICE"
"""Says how many ranks compute on each device, where there are several."""
SHARE: Final = "OUTSIZE_MEMORY_SHARE"
"""Says how much of each device's memory the run may have: 0.5 is a half."""
ON_OOM: Final = "OUTSIZE_ON_OOM"
"""Says what follows where a device runs out of memory: "raise" or "replan"."""


def devices_needed(processes: int, env: Mapping[str, str]) -> int:
    """Returns how many devices so many processes of a machine compute on, by the launcher's variable."""
    return -(-processes // int(env.get(PER_DEVICE, "1")))


@final
@dataclass(frozen=True, slots=True)
class PeerCopies:
    """How often a run copies itself into memory, as it was asked for, and its launcher's folder there."""

    every: str
    folder: Path

    @classmethod
    def of_variable(cls, text: str) -> PeerCopies:
        """Returns what `variable` has passed on."""
        every, _, folder = text.partition(":")
        return cls(every, Path(folder))

    @property
    def variable(self) -> str:
        """Returns the value of OUTSIZE_PEER_COPIES."""
        return f"{self.every}:{self.folder}"
