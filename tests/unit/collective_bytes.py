"""The bytes that a collective sends at least: an oracle of its seconds, and of what ranks have sent."""

from __future__ import annotations

from outsize.ir.hardware.collectives import Collective


def collective_bytes(kind: Collective, size_bytes: int, n: int) -> int:
    """Returns the bytes that a rank of n sends at least, rounded up."""
    if n < 2:
        return 0
    times = 2 if kind == "all_reduce" else 1
    return -(-times * (n - 1) * size_bytes // n)
