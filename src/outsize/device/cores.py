"""Tells which CPU cores this process may use, where the system says so (Linux), and else which there are."""

from __future__ import annotations

import os


def usable_cores() -> frozenset[int]:
    """Returns the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
