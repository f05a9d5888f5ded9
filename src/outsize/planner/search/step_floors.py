"""Problem: what is the step of a layout never below, whatever its cut, so that most need not be priced?

    least_s      sums of all work                    of each layout, before anything is sorted
    bound        sharpened step by step              of those that come first in the queue
    likely_s     the balanced cut                    of interleaved layouts, whose cuts are balanced
    any_cut_s    the memory of each rank     of an interleaved layout that was chosen, for its gap
    below_s      over orders of unequal devices      of layouts of such devices, up to a limit

Each is of the pipeline (evaluate/layout_bounds.py), whose seconds the collectives of replicas overlap with
and the optimizer's follow: `together_s` is the one place that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import final

from outsize.planner.bounds.step_time import StepBound
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.policies.activations import Recompute, by_units, whole_stage


@final
class StepFloors:
    """Bounds the steps of layouts from below, where stages may recompute in these ways."""

    def __init__(self, pricing: Pricing, recompute: Sequence[Recompute]) -> None:
        self._pricing, self._recompute = pricing, tuple(recompute)

    def refuted(self, layout: Layout) -> bool:
        """Returns whether it is seen at once that nothing fits, block by block recompute included."""
        pricing = self._pricing
        return pricing.bounds.refuted(layout, self.unselective) and (
            not self.by_blocks(layout) or pricing.bounds.refuted(layout, self._recompute)
        )

    def by_blocks(self, layout: Layout) -> bool:
        """Returns whether stages may recompute some of their blocks only."""
        return by_units(self._recompute) and self._pricing.by_blocks(layout)

    @property
    def unselective(self) -> tuple[Recompute, ...]:
        """Returns the ways to recompute that treat all blocks of a stage alike."""
        return whole_stage(self._recompute)

    def least_s(self, layout: Layout) -> float:
        """Returns a lower bound that needs only sums; infinite where nothing can fit."""
        if not self._pricing.bounds.may_fit(layout, self._recompute):
            return inf
        return self.together_s(layout, self._pricing.bounds.least_s(layout))

    def bound(self, layout: Layout) -> StepBound:
        """Returns a lower bound of the pipeline's seconds that can be sharpened."""
        return self._pricing.bounds.bound(layout, self._recompute)

    def any_cut_s(self, layout: Layout) -> float:
        """Returns a lower bound of any cut of an interleaved layout; the search prices a balanced one."""
        bounds = self._pricing.bounds
        pipeline_s = max(bounds.least_s(layout), bounds.interleaved_s(layout, self._recompute))
        return self.together_s(layout, pipeline_s)

    def likely_s(self, layout: Layout) -> float:
        """Returns the step of a balanced cut with its collectives; infinite where nothing can fit."""
        if not self._pricing.bounds.may_fit(layout, self._recompute):
            return inf
        return self.together_s(layout, self._pricing.bounds.balanced_s(layout))

    def together_s(self, layout: Layout, pipeline_s: float) -> float:
        """Adds the optimizer's seconds to the bound of the pipeline or of the replicas' collectives."""
        together_s = max(pipeline_s, self._pricing.bounds.collectives_s(layout))
        return together_s + self._pricing.bounds.update_s(layout)

    def below_s(self, layout: Layout, most_s: float) -> float:
        """Returns the bound of a layout of unequal devices, which is not sought above `most_s`."""
        if layout.chunks > 1:
            return self._pricing.bounds.balanced_s(layout)
        return self.together_s(layout, self._pricing.bounds.floor_s(layout, self._recompute, most_s))

    def is_sharp(self, layout: Layout) -> bool:
        """Returns whether its tables give a bound that no cut of it beats."""
        return layout.chunks == 1 and self._pricing.stages.exact(layout) and not self._pricing.unequal
