"""Records whether the split run computed what one process computes."""

from __future__ import annotations

from typing import Final, final

from outsize.ir.base import Record

# The bounds are relative to a tensor's largest element: the effect of adding in another order, in fp32 and
# fp64.
WITHIN: Final = 1e-6
WITHIN_DOUBLE: Final = 1e-10


@final
class Verdict(Record):
    """Holds the largest absolute differences between the split run and the plain loop; all 0 when bit-equal.

    `first_divergence` names the first unit whose numbers differ, with `forward` or `backward`. `stages` are
    the unit patterns of each stage; `processes` is 0 when all stages ran in one process. Where ranks add up
    in another order, `relative_diff` is that of loss and gradients relative to each tensor's largest element,
    which may be at most `within`; it is None where bits are compared.
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
        """Returns whether the numbers are those of one process, as nearly as they can be."""
        return self.bit_equal or (self.relative_diff is not None and self.relative_diff <= self.within)
