"""Asks the operating system what a process does that does not answer; only on the same machine.

Linux says it in /proc; of a system without that only whether the process is there is asked.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, final

import psutil

State = Literal["stopped", "traced", "gone", "busy", "disk", "asleep", "unknown"]
_STATES: Final[dict[str, State]] = {"T": "stopped", "t": "traced", "Z": "gone", "X": "gone", "D": "disk"}
_UTIME: Final = 11  # The fields of /proc/PID/stat behind the name begin with the state.


@final
@dataclass(frozen=True, slots=True)
class ProcessLook:
    """Holds a process's row of the process table at one moment: the state's letter, and ticks of CPU time."""

    letter: str
    ticks: int


UNKNOWN: Final = ProcessLook("?", 0)


def machine() -> str:
    """Returns what processes have in common that see each other's numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{socket.gethostname()} without /proc"


def look_at(pid: int) -> ProcessLook | None:
    """Returns a look at a process of this machine; None where it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return UNKNOWN if psutil.pid_exists(pid) else None
    fields = text.rpartition(")")[2].split()
    return ProcessLook(fields[0], int(fields[_UTIME]) + int(fields[_UTIME + 1]))


def state_between(first: ProcessLook | None, last: ProcessLook | None, passed_s: float) -> State:
    """Returns the state of a process by two looks; one that computes in between is busy."""
    if last is None or first is None:
        return "gone"
    if last == UNKNOWN:
        return "unknown"
    if last.letter in _STATES:
        return _STATES[last.letter]
    used_s = (last.ticks - first.ticks) / os.sysconf("SC_CLK_TCK")
    return "busy" if used_s > 0.1 * passed_s or last.letter == "R" else "asleep"
