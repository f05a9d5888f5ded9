"""Ranks of one GPU that verify each other's work: bits, the cost of a verified step, faults that are found.

A fault is a flipped bit in each product of one rank, in forwards and in backwards. Ranks of one device share
its cores, so what is idle in one rank's row is taken by another: the cost is the most that it can be.
"""

from __future__ import annotations

from typing import Any, Final

from ranks import run_ranks
from script import Result, run

LIMIT_S: Final = 280
CASES: Final[list[tuple[str, int, dict[str, Any]]]] = [
    ("three stages", 3, {"stages": 3, "microbatches": 8}),
    ("two stages", 2, {"stages": 2, "microbatches": 8}),
    ("two replicas", 2, {"axes": {"dp_replicate": 2}, "microbatches": 4}),
    ("two by two", 4, {"stages": 2, "axes": {"dp_replicate": 2}, "microbatches": 4}),
]


def main(result: Result) -> None:
    sizes = {"width": 4096, "rows": 512, "timed": 20}
    if result.rehearses:
        sizes = {"width": 64, "rows": 8, "timed": 4}
    for name, ranks, axes in CASES[:3] if result.rehearses else CASES:
        found = result.attempt(
            name,
            lambda axes=axes, ranks=ranks: run_ranks(
                "verified", ranks, result.device_type, per_device=ranks, limit_s=65, axes=axes, **sizes
            ),
        )
        if found:
            figures = {key: value for key, value in found[0].items() if key != "heard"}
            result.look_at(f"{name}: {figures}")


if __name__ == "__main__":
    run(main)
