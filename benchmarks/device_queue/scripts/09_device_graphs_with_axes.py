"""Stages recorded as graphs of their device along other axes: bits, what was recorded, seconds of a step.

A stage whose collectives cannot be recorded runs as it is, and the figure says so.
"""

from __future__ import annotations

from typing import Any, Final

from ranks import run_ranks
from script import Result, run

LIMIT_S: Final = 240
CASES: Final[list[tuple[str, int, dict[str, Any]]]] = [
    ("pp 2", 2, {"stages": 2, "microbatches": 2}),
    ("tp 2", 2, {"axes": {"tp": 2}, "microbatches": 2}),
    ("dp_shard 2", 2, {"axes": {"dp_shard": 2}, "microbatches": 1}),
    ("dp_replicate 2", 2, {"axes": {"dp_replicate": 2}, "microbatches": 1}),
    ("cp 2", 2, {"axes": {"cp": 2}, "microbatches": 2}),
    ("pp 2 x tp 2", 4, {"stages": 2, "axes": {"tp": 2}, "microbatches": 2}),
]


def main(result: Result) -> None:
    # The simulated device lacks kernels of these models; on a CPU stages run as they are, and the bits too.
    kind = "cpu" if result.rehearses else result.device_type
    for name, ranks, axes in CASES[:3] if result.rehearses else CASES:
        found = result.attempt(
            name,
            lambda axes=axes, ranks=ranks: run_ranks(
                "graphs", ranks, kind, per_device=ranks, limit_s=60, axes=axes, steps=5, timed=10
            ),
        )
        for rank, figures in enumerate(found or ()):
            result.look_at(f"{name}, rank {rank}: {figures}")


if __name__ == "__main__":
    run(main)
