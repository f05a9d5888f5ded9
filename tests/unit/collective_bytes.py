"""The bytes that a collective sends at least: an oracle of its seconds, and of what ranks have sent."""

from __future__ import annotations

from outsize.planner.costs.collectives import Collective


def collective_bytes(kind: Collective, size_bytes: int, n: int) -> int:
    """Returns the bytes that a rank of n sends at least, rounded up; for a broadcast, what the root sends."""
    if n < 2:
        return 0
    if kind == "broadcast":
        return size_bytes
    times = 2 if kind == "all_reduce" else 1
    return -(-times * (n - 1) * size_bytes // n)
