"""Copies of a run's state in the memory of its machine, which outlive a worker that is killed.

    outsize run --max-restarts 3 --ranks peer_copies=1 train.py

    launcher    makes a folder of mode 0700 in the machine's shared memory, and removes it at its end
    worker      after a step: weights, optimizer, ... as a checkpoint there, each rank its own part
    next start  goes on from the newest of the copies and of the checkpoints on disk

A copy is a checkpoint like any other, so any layout goes on from it; only its folder is in memory, and the
last two stay, and are written over by turns (run/checkpoint/overwrite.py). It is written before the next step
begins, so a kill loses the step in flight at most.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import final

from outsize.train.checkpoint.interval import SaveInterval
from outsize.train.world.join import peer_copies


@final
@dataclass(frozen=True, slots=True)
class CopyRule:
    """Where the copies of the run that saves itself in one folder are, and how often they are made."""

    folder: Path
    every: SaveInterval


def copy_rule(root: str | Path) -> CopyRule | None:
    """Returns where the launcher lets this run copy itself; None where it was not asked for copies."""
    asked = peer_copies()
    if asked is None:
        return None
    name = hashlib.sha256(str(Path(root).resolve()).encode()).hexdigest()[:16]
    return CopyRule(asked.folder / name, SaveInterval.parse(asked.every))
