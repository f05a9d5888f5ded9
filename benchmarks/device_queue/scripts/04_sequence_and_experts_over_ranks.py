"""Context and expert parallelism, alone and with others, over ranks of one device.

Dense models are in float64, experts in float32; the loss is float32 in both.
"""

from __future__ import annotations

from typing import Any, Final

from ranks import run_ranks
from script import Result, run

LIMIT_S: Final = 280
CASES: Final[list[tuple[str, int, str, dict[str, Any]]]] = [
    ("tp 2", 2, "dense", {"axes": {"tp": 2}, "microbatches": 2}),
    ("cp 2", 2, "dense", {"axes": {"cp": 2}, "microbatches": 2}),
    ("ep 2", 2, "experts", {"axes": {"ep": 2}, "microbatches": 2}),
    ("pp 2 x cp 2", 4, "dense", {"stages": 2, "axes": {"cp": 2}, "microbatches": 2}),
    ("tp 2 x cp 2", 4, "dense", {"axes": {"tp": 2, "cp": 2}, "microbatches": 2}),
    ("pp 2 x ep 2", 4, "experts", {"stages": 2, "axes": {"ep": 2}, "microbatches": 2}),
]


def main(result: Result) -> None:
    kind = (
        "cpu" if result.device_type == "sim" else result.device_type
    )  # the simulated device lacks their kernels
    for name, ranks, model, axes in CASES[:3] if result.rehearses else CASES:
        found = result.attempt(
            name,
            lambda axes=axes, ranks=ranks, model=model: max(
                far
                for rank in run_ranks(
                    "transformer_distances", ranks, kind, per_device=ranks, limit_s=60, kind=model, axes=axes
                )
                for far in rank.values()
            ),
        )
        result.look_at(f"{name}: {found} of the largest element")


if __name__ == "__main__":
    run(main)
