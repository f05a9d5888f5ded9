"""Verdict: did the split run compute what one process computes?"""

from __future__ import annotations

from typing import final

from outsize.ir.base import Record


@final
class Verdict(Record):
    """Largest absolute differences between the split run and the plain loop; all zero when bit-equal.

    `first_divergence` names the first unit whose numbers differ, with `forward` or `backward`. `stages`
    are the unit patterns of each stage; `processes` is 0 when all stages ran in one process.
    """

    model: str
    bit_equal: bool
    loss_diff: float
    grad_diff: float
    buffer_diff: float
    parameter_diff: float
    first_divergence: str | None
    stages: tuple[tuple[str, ...], ...]
    schedule: str
    microbatches: int
    processes: int
    capture_s: float
    run_s: float
    notes: tuple[str, ...] = ()
