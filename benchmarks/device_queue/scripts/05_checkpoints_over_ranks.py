"""A run that is saved by one layout and goes on by another, over ranks of one device: its losses are those of
a run that nobody interrupts.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Any, Final

from ranks import run_ranks
from script import Result, run

LIMIT_S: Final = 240
LAYOUTS: Final[dict[str, tuple[int, dict[str, Any]]]] = {
    "pp 2": (2, {"stages": 2, "microbatches": 2}),
    "dp_shard 2": (2, {"axes": {"dp_shard": 2}, "microbatches": 1}),
    "tp 2": (2, {"axes": {"tp": 2}, "microbatches": 2}),
}


def main(result: Result) -> None:
    kind = "cpu" if result.device_type == "sim" else result.device_type
    whole = result.attempt("pp 2, not interrupted", lambda: losses(kind, "pp 2", "pp 2", 5, 0))
    pairs = [("pp 2", "pp 2"), ("pp 2", "dp_shard 2"), ("dp_shard 2", "tp 2"), ("tp 2", "pp 2")]
    for before, after in pairs[:2] if result.rehearses else pairs:
        found = result.attempt(f"{before}, then {after}", lambda b=before, a=after: losses(kind, b, a, 3, 2))
        if found is not None and whole is not None:
            far = max(abs(a - b) / abs(b) for a, b in zip(found, whole, strict=True))
            result.look_at(f"{before}, then {after}: losses within {far:.1e} of one run's")


def losses(kind: str, before: str, after: str, first: int, then: int) -> list[float]:
    """Returns the losses of so many steps by one layout, and so many by another one from what was saved."""
    with TemporaryDirectory() as folder:
        ranks, axes = LAYOUTS[before]
        found = run_ranks(
            "saved", ranks, kind, per_device=ranks, limit_s=60, folder=folder, axes=axes, steps=first
        )[0]
        if then:
            ranks, axes = LAYOUTS[after]
            found += run_ranks(
                "resumed", ranks, kind, per_device=ranks, limit_s=60, folder=folder, axes=axes, steps=then
            )[0]
    return found


if __name__ == "__main__":
    run(main)
