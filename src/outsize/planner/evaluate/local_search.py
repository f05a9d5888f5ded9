"""Problem: the cut with the least maximum price is not always the shortest step, because a price knows
one stage at a time.

From that cut, the bounds are moved by one unit and stages change their option, one at a time, as long as the
simulated step gets shorter and everything fits: steepest descent over neighbouring cuts (Kernighan and Lin,
BSTJ 49(2), 1970, along a chain). It is deterministic; at most MOST cuts are simulated. The plan's gap shows
what the optimum may be below. Complexity: MOST simulations. Oracle: tests/unit/planner/search/test_joint.py
knows the best of all plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from outsize.ir.schedule import COMPUTE
from outsize.planner.evaluate.estimate import Estimate, estimate_cut

MOST: Final = 48
# Steps of more stages take too long to simulate for many of them to be tried.
MOST_STAGES: Final = 64
# A smaller share of a step is no reason to leave the better balanced cut.
WORTH: Final = 1e-3


def polish(start: Estimate) -> Estimate:
    """Returns the start, or a cut reached over neighbours with a shorter step."""
    if len(start.choices) > MOST_STAGES:
        return start
    best, remaining = with_first_options(start), MOST
    while remaining > 0:
        places, most_s = list(islice(_neighbours(best), remaining)), best.step_s * (1 - WORTH)
        remaining -= len(places)
        tried = (_at(best, *place) for place in places if best.pipeline.busy_s(*place) < most_s)
        shorter = [e for e in tried if e.may_be_chosen and e.least_s < most_s and e.step_s < most_s]
        if not shorter:
            break
        best = min(shorter, key=lambda e: e.step_s)
    return with_first_options(best)


def with_first_options(best: Estimate) -> Estimate:
    """Moves each stage to its first option, or to a later one that holds less, where that fits and takes no
    longer.
    """
    for stage in (stage for stage, choice in enumerate(best.choices) if choice):
        simpler = _at(best, best.bounds, (*best.choices[:stage], 0, *best.choices[stage + 1 :]))
        if simpler.may_be_chosen and (_costs_less(simpler, best, stage) or simpler.step_s <= best.step_s):
            best = simpler
        else:
            best = min(
                (best, *_holding_less(best, stage)),
                key=lambda candidate: candidate.memories[stage].peak_bytes,
            )
    return best


def _costs_less(simpler: Estimate, other: Estimate, stage: int) -> bool:
    """Returns whether nothing of a stage takes longer, so that the step is no longer and need not be
    played.
    """
    costs = zip(*([e.costs[stage].seconds(kind) for kind in COMPUTE] for e in (simpler, other)), strict=True)
    copies = simpler.cases[stage].copies
    return all(a <= b for a, b in costs) and (copies is None or copies is other.cases[stage].copies)


def _holding_less(best: Estimate, stage: int) -> Iterator[Estimate]:
    """Yields the stage in its later options, where the step is no longer."""
    for choice in range(best.choices[stage] + 1, len(best.pipeline.options[stage])):
        other = _at(best, best.bounds, (*best.choices[:stage], choice, *best.choices[stage + 1 :]))
        if other.may_be_chosen and other.step_s <= best.step_s:
            yield other


Place = tuple[tuple[int, ...], tuple[int, ...]]


def _at(here: Estimate, bounds: tuple[int, ...], choices: tuple[int, ...]) -> Estimate:
    return estimate_cut(here.pipeline, bounds, choices, here.floor_s)


def _neighbours(here: Estimate) -> Iterator[Place]:
    """Yields bounds and options that differ in one place."""
    bounds, choices = here.bounds, here.choices
    for place in range(1, len(bounds) - 1):
        for moved in (bounds[place] - 1, bounds[place] + 1):
            if bounds[place - 1] < moved < bounds[place + 1]:
                yield (*bounds[:place], moved, *bounds[place + 1 :]), choices
    for stage, options in enumerate(here.pipeline.options):
        for choice in range(len(options)):
            if choice != choices[stage]:
                yield bounds, (*choices[:stage], choice, *choices[stage + 1 :])
