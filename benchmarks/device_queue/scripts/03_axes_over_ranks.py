"""Stages, replicas, shards and tensor parallelism, alone and together, over ranks of one device.

Clipping, autocast and a scaler with them. Stages have the plain loop's bits; the others its numbers, within
the rounding of sums in another order.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from ranks import run_ranks
from script import Result, run

LIMIT_S: Final = 290
MIXED: Final = {"scaler": True, "autocast": True, "clip_norm": 0.05}
CASES: Final[list[tuple[str, int, dict[str, Any], dict[str, Any]]]] = [
    ("pp 2", 2, {"stages": 2, "microbatches": 4}, {"clip_norm": 0.05}),
    ("pp 2, autocast, scaler", 2, {"stages": 2, "microbatches": 4}, MIXED),
    ("dp_replicate 2", 2, {"stages": 1, "axes": {"dp_replicate": 2}, "microbatches": 2}, {}),
    ("dp_shard 2", 2, {"stages": 1, "axes": {"dp_shard": 2}, "microbatches": 2}, {}),
    ("pp 2 x dp_replicate 2", 4, {"stages": 2, "axes": {"dp_replicate": 2}, "microbatches": 2}, {}),
    ("pp 2 x dp_shard 2", 4, {"stages": 2, "axes": {"dp_shard": 2}, "microbatches": 2}, {"clip_norm": 0.05}),
]
DIVIDED: Final = [("tp 2", 2, {"stages": 1, "axes": {"tp": 2}, "microbatches": 2})]
DIVIDED_4: Final = [*DIVIDED, ("pp 2 x tp 2", 4, {"stages": 2, "axes": {"tp": 2}, "microbatches": 2})]


def main(result: Result) -> None:
    kind = result.device_type
    for name, ranks, axes, how in CASES[:4] if result.rehearses else CASES:
        found = result.attempt(name, lambda axes=axes, how=how, ranks=ranks: distance(kind, ranks, axes, how))
        result.look_at(f"{name}: {found}")
    for name, ranks, axes in DIVIDED if result.rehearses else DIVIDED_4:
        found = result.attempt(
            name,
            lambda axes=axes, ranks=ranks: max(
                far
                for rank in run_ranks(
                    "divided", ranks, kind, per_device=ranks, limit_s=60, axes=axes, double=False
                )
                for far in rank.values()
            ),
        )
        result.look_at(f"{name}: {found} of the largest element")


def distance(kind: str, ranks: int, axes: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    """Returns whether losses and weights have the plain loop's bits, and how far they are from it at most."""
    count = 4
    whole = run_ranks("plain", 1, kind, limit_s=60, microbatches=count, **how)[0]
    ours = run_ranks("trained", ranks, kind, per_device=ranks, limit_s=60, axes=axes, **how)[0]
    pairs = [(ours["state"][name], tensor) for name, tensor in whole["state"].items()]
    pairs += zip(ours["losses"], whole["losses"], strict=True)
    far = max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)
    return {"bit-equal": all(torch.equal(a, b) for a, b in pairs), "relative": far}


if __name__ == "__main__":
    run(main)
