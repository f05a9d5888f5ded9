"""Verdict: did the split run compute what one process computes?"""

from __future__ import annotations

from typing import Final, final

from outsize.ir.base import Record

# Of a tensor's largest element: what adding in another order may change in single and in double precision.
WITHIN: Final = 1e-6
WITHIN_DOUBLE: Final = 1e-10


@final
class Verdict(Record):
    """Largest absolute differences between the split run and the plain loop; all zero when bit-equal.

    `first_divergence` names the first unit whose numbers differ, with `forward` or `backward`. `stages`
    are the unit patterns of each stage; `processes` is 0 when all stages ran in one process.
    `relative_diff`: of loss and gradients, to each tensor's largest element, where ranks add them up in
    another order; None where bits are compared. At most `within` is right.
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
    relative_diff: float | None = None
    within: float = WITHIN

    @property
    def holds(self) -> bool:
        """Are the numbers those of one process, as nearly as they can be?"""
        return self.bit_equal or (self.relative_diff is not None and self.relative_diff <= self.within)
