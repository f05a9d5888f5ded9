"""Problem: the cut with the least maximum price is not always the shortest step, because a price knows
one stage at a time.

From that cut, the bounds are moved by one unit and stages change their option, one at a time, as long as the
simulated step gets shorter and everything fits: steepest descent over neighbouring cuts (Kernighan and Lin,
BSTJ 49(2), 1970, along a chain). It is deterministic; at most MOST cuts are looked at, and those are played
for which the longest path of the best step so far would be shorter. The plan's gap shows
what the optimum may be below. Complexity: MOST simulations. Oracle: tests/unit/planner/search/test_joint.py
knows the best of all plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from outsize.ir.schedule import COMPUTE
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.partition.stage_prices import ChainCut

MOST: Final = 48
# Steps of more stages take too long to simulate for many of them to be tried.
MOST_STAGES: Final = 64
# Compute paces a step where this share of it is left without collectives of weights.
PACED: Final = 0.95
# A smaller share of a step is no reason to leave the better balanced cut.
WORTH: Final = 1e-3


def polish(start: Candidate) -> Candidate:
    """Returns the start, or a cut reached over neighbours with a shorter step."""
    if len(start.choices) > MOST_STAGES:
        return start
    best, remaining = with_first_options(start), MOST
    while remaining > 0:
        places, most_s = list(islice(_neighbours(best), remaining)), best.step_s * (1 - WORTH)
        remaining -= len(places)
        tried = (_at(best, place) for place in places if best.pipeline.busy_s(place) < most_s)
        # Where compute paces a step, a cut that is longer without its collectives is longer with them.
        paced = best.least_s >= PACED * best.step_s
        least_s = min(most_s, best.least_s * (1 + WORTH)) if paced else most_s
        near = (e for e in tried if e.least_beside(best) < most_s and e.least_s <= least_s)
        shorter = [e for e in near if e.may_be_chosen and e.step_s < most_s]
        if not shorter:
            break
        best = min(shorter, key=lambda e: e.step_s)
    return with_first_options(best)


def keeping_all(here: Candidate) -> Candidate:
    """Returns the same cut where stages recompute nothing, if that is open: whether it fits or not, no choice
    of units that are recomputed makes its step shorter.
    """
    kept = [
        next((at for at, case in enumerate(options) if case.activation_policy.keeps_all), choice)
        for options, choice in zip(here.pipeline.options, here.choices, strict=True)
    ]
    return _at(here, ChainCut(here.bounds, tuple(kept)))


def with_first_options(best: Candidate) -> Candidate:
    """Moves each stage to its first option, or to a later one that holds less, where that fits and takes no
    longer.
    """
    for stage in (stage for stage, choice in enumerate(best.choices) if choice):
        simpler = _at(best, _with_choice(best, stage, 0))
        if simpler.may_be_chosen and (_costs_less(simpler, best, stage) or simpler.step_s <= best.step_s):
            best = simpler
        else:
            best = min(
                (best, *_holding_less(best, stage)),
                key=lambda candidate: candidate.memories[stage].peak_bytes,
            )
    return best


def _costs_less(simpler: Candidate, other: Candidate, stage: int) -> bool:
    """Returns whether nothing of a stage takes longer, so that the step is no longer and need not be
    played.
    """
    costs = zip(*([e.costs[stage].seconds(kind) for kind in COMPUTE] for e in (simpler, other)), strict=True)
    copies = simpler.cases[stage].copies
    return all(a <= b for a, b in costs) and (copies is None or copies is other.cases[stage].copies)


def _holding_less(best: Candidate, stage: int) -> Iterator[Candidate]:
    """Yields the stage in its later options, where the step is no longer."""
    for choice in range(best.choices[stage] + 1, len(best.pipeline.options[stage])):
        other = _at(best, _with_choice(best, stage, choice))
        if other.may_be_chosen and other.step_s <= best.step_s:
            yield other


def _at(here: Candidate, cut: ChainCut) -> Candidate:
    return Candidate.of(here.pipeline, cut.bounds, cut.choices, here.floor_s)


def _with_choice(here: Candidate, stage: int, choice: int) -> ChainCut:
    """Returns the cut with another option of one stage."""
    return ChainCut(here.bounds, (*here.choices[:stage], choice, *here.choices[stage + 1 :]))


def _neighbours(here: Candidate) -> Iterator[ChainCut]:
    """Yields cuts that differ in one bound or in one option."""
    bounds, choices = here.bounds, here.choices
    for at in range(1, len(bounds) - 1):
        for moved in (bounds[at] - 1, bounds[at] + 1):
            if bounds[at - 1] < moved < bounds[at + 1]:
                yield ChainCut((*bounds[:at], moved, *bounds[at + 1 :]), choices)
    for stage, options in enumerate(here.pipeline.options):
        for choice in range(len(options)):
            if choice != choices[stage]:
                yield ChainCut(bounds, (*choices[:stage], choice, *choices[stage + 1 :]))
