"""Records whether the split run computed what one process computes."""

from __future__ import annotations

from typing import Final, Literal, final

from outsize.ir.base import Record

# The bounds are relative to a tensor's largest element: the effect of adding in another order, in fp32 and
# fp64.
WITHIN: Final = 1e-6
WITHIN_DOUBLE: Final = 1e-10


@final
class TermCounts(Record):
    """Says what one term of the loss divides by in each microbatch: targets that are not ignored, their class
    weights, samples, or values that the loss takes of the batch (the sum of a mask).
    """

    divided_by: Literal["targets", "class weights", "samples", "values"]
    counts: tuple[float, ...]


@final
class MeanOfMeans(Record):
    """Says what a loop that divides the mean of each microbatch by their number, `steps`, makes of the batch,
    beside `batch_loss`, that of the batch in one piece. `gradients` is the largest difference from its
    gradients, relative to each tensor's largest element. None where a number is not finite.
    """

    batch_loss: float
    loss: float | None
    gradients: float | None
    steps: int


@final
class LossCounts(Record):
    """Says what the terms of the loss divide by in each microbatch, where some count more than others.
    `plain` is None where the model draws random numbers, or computes in low precision.
    """

    terms: tuple[TermCounts, ...]
    plain: MeanOfMeans | None = None


@final
class Verdict(Record):
    """Holds the largest absolute differences between the split run and the plain loop; all 0 when bit-equal.

    `first_divergence` names the first unit whose numbers differ, with `forward` or `backward`. `stages` are
    the unit patterns of each stage; `processes` is 0 when all stages ran in one process. Where ranks add up
    in another order, `relative_diff` is that of loss and gradients relative to each tensor's largest element,
    which may be at most `within`; it is None where bits are compared. `counts` is there where microbatches
    count unequally, and the split run weighs them.
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
    counts: LossCounts | None = None

    @property
    def holds(self) -> bool:
        """Returns whether the numbers are those of one process, as nearly as they can be."""
        return self.bit_equal or (self.relative_diff is not None and self.relative_diff <= self.within)
