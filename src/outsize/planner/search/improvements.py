"""The best candidate of a search is known: by which finer choices does its step become shorter?

The search prices cuts between pieces, in which each stage keeps or recomputes all. What is finer costs more
to try, so it is tried for the winner alone, in the order of `IMPROVEMENTS`. Each is a record: its name, when
it may help, how it improves the winner, and how its result is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Final, final

from outsize.ir.answers.request import PlanRequest
from outsize.planner.evaluate.candidate import Candidate
from outsize.planner.evaluate.local_search import keeping_all, polish
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.evaluate.ranking import choose
from outsize.planner.search.branch_and_bound import SOON, BranchAndBound, SearchResult, polished
from outsize.planner.search.incumbents import Incumbents
from outsize.planner.strategies.activation_offload import may_offload, or_offloaded
from outsize.planner.strategies.recompute_and_cut import may_recompute_units, selective
from outsize.planner.strategies.streamed_blocks import may_stream, or_streamed
from outsize.policies.activations import searched_for

# Stages are cut between repeated blocks where that costs less than this.
BLOCKS: Final = 1.02
# Recompute makes a step at most this many times as long: a second forward, of three parts.
MOST_AGAIN: Final = 4 / 3


@final
@dataclass(frozen=True, eq=False)
class Winner:
    """Is the best candidate of a search, while it is improved.

    `pricing` has the pieces that its bounds count, `searched` those of the search.
    """

    request: PlanRequest
    result: SearchResult
    searched: Pricing
    pricing: Pricing
    best: Candidate


@final
@dataclass(frozen=True, kw_only=True)
class Improvement:
    """Is one way to make the winner's step shorter, or its stages easier to read.

    name     what is changed
    helps    whether it may, as far as that is known before it is tried
    better   the winner with the change, or the same winner where nothing is better
    reaches  the least step that this and what follows may come to, from that of a candidate
    bound    what the step is never below, in words: `Candidate.floor_s` afterwards
    """

    name: str
    helps: Callable[[Winner], bool]
    better: Callable[[Winner], Winner]
    reaches: Callable[[Candidate], float]
    bound: str


def improved(
    request: PlanRequest,
    result: SearchResult,
    pricing: Pricing,
    incumbents: Incumbents | None = None,
    loses_s: float = inf,
) -> Candidate:
    """Returns the best candidate of a search, improved in all ways that help while there is time, and while
    it may come below `loses_s`, above which nobody reads of it.
    """
    winner = Winner(request, result, pricing, pricing, choose(result.candidates))
    for improvement in IMPROVEMENTS:
        if not improvement.helps(winner):
            continue
        if incumbents is not None and incumbents.end_search():
            return _as_found(winner)
        if winner.best.step_s <= loses_s or improvement.reaches(winner.best) <= loses_s:
            winner = improvement.better(winner)
        else:
            winner = replace(winner, best=_as_found(winner))
    return winner.best


def _moved_or_kept_s(candidate: Candidate) -> float:
    """Returns what moves bring at most, and recomputing less, of which the least is nothing."""
    return min(SOON * candidate.step_s, SOON * keeping_all(candidate).step_s)


def _as_found(winner: Winner) -> Candidate:
    """Returns the winner as it is, with a floor that holds also for the choices of units that were not
    tried.
    """
    best = winner.best
    if not may_recompute_units(best, winner.pricing):
        return best
    least_s = winner.searched.bounds.floor_without_memory_s(best.layout)
    return replace(best, floor_s=min(best.floor_s, least_s))


def _moved(winner: Winner) -> Winner:
    """Moves units of the winner, and where it is one in pairs those of the best without pairs: what hides
    differs from cut to cut by more than what moves bring.
    """
    plain = [each for each in winner.result.candidates if not each.layout.pairs]
    rivals = [choose(plain)] if winner.best.layout.pairs and plain else []
    return replace(winner, best=choose([polished(each, winner.searched) for each in (winner.best, *rivals)]))


def _has_pieces(winner: Winner) -> bool:
    """Returns whether bounds may lie inside pieces; a single stage has none, and kinds of devices are cut
    unit by unit.
    """
    best, pricing = winner.best, winner.pricing
    return not (pricing.stages.exact(best.layout) or pricing.unequal) and best.layout.stages > 1


def _unit_by_unit(winner: Winner) -> Winner:
    """Searches the winner again with every cut near its bounds instead of pieces.

    Where stages share devices, the price of a cut knows one of them, so the winner's own cut is moved on.
    """
    best, request = winner.best, winner.request
    finer = winner.pricing.finer(best.layout, best.unit_bounds)
    if best.layout.chunks > 1:
        candidates = _in_pieces_of(best, winner.pricing, finer)
    else:
        searched = BranchAndBound(finer, searched_for(request.recompute), compares=False, most_s=best.step_s)
        candidates = searched.run([best.layout]).candidates
    better = polish(candidates[0]) if candidates else best
    return replace(winner, pricing=finer, best=better) if better.step_s < best.step_s else winner


def _in_pieces_of(best: Candidate, pricing: Pricing, finer: Pricing) -> tuple[Candidate, ...]:
    """Returns the same cut in the pieces of `finer`."""
    layout, old = best.layout, best.pipeline
    made = finer.pipeline(layout, [case.recompute for case in old.options[0]])
    if made is None:
        return ()
    demand = finer.demands(layout)[pricing.demands(layout).index(old.demand)]
    pipeline = replace(made, even=old.even, first_option=old.first_option, demand=demand)
    bounds = [pipeline.ends.index(bound) for bound in best.unit_bounds]
    return (Candidate.of(pipeline, bounds, best.choices, best.floor_s),)


def _some_recomputed(winner: Winner) -> Winner:
    return replace(winner, best=selective(winner.best, winner.pricing, winner.request.optimizer))


def _may_be_between_blocks(winner: Winner) -> bool:
    """Returns whether some bound is inside a repeated block, and there are blocks enough for the stages."""
    best, layout = winner.best, winner.best.layout
    if winner.pricing.unequal or layout.hosted:
        return False
    ends = winner.pricing.stages.between_blocks(layout)
    return len(ends) > layout.stages and not set(best.unit_bounds) <= set(ends)


def _between_blocks(winner: Winner) -> Winner:
    """Takes the best cut between repeated blocks, where its step is at most BLOCKS times as long; its floor
    is that of all cuts.
    """
    best, request = winner.best, winner.request
    blocks, most_s = winner.pricing.between_blocks(best.layout), BLOCKS * best.step_s
    searched = BranchAndBound(
        blocks, searched_for(request.recompute), compares=False, most_s=MOST_AGAIN * most_s
    )
    candidates = searched.run([best.layout]).candidates
    if not candidates or _moved_or_kept_s(candidates[0]) > most_s:
        return winner
    neat = selective(polish(candidates[0]), blocks, request.optimizer)
    if neat.step_s > most_s:
        return winner
    neat = replace(neat, floor_s=best.floor_s, fastest_step_s=best.step_s)
    return replace(winner, pricing=blocks, best=neat)


def _may_use_host(winner: Winner) -> bool:
    """Returns whether activations may wait on the host: no slice of a sequence leaves its device."""
    return winner.request.recompute is None and winner.best.layout.slices == 1


def _on_host(winner: Winner) -> Winner:
    # Copies that cost nothing save a second forward at most.
    most_s = MOST_AGAIN * winner.best.step_s
    slower = {each.layout for each in winner.result.candidates if each.step_s > most_s}
    layouts = [layout for layout in winner.result.layouts if layout not in slower]
    other = or_offloaded(winner.best, layouts, winner.searched)
    return winner if other is None else replace(winner, pricing=winner.searched, best=other)


def _streamed(winner: Winner) -> Winner:
    other = or_streamed(winner.best, winner.searched)
    return winner if other is None else replace(winner, pricing=winner.searched, best=other)


IMPROVEMENTS: Final[tuple[Improvement, ...]] = (
    Improvement(
        name="units move to a neighbouring stage",
        helps=lambda _: True,
        better=_moved,
        reaches=_moved_or_kept_s,
        bound="that of all cuts of the layout",
    ),
    Improvement(
        name="cuts are inside the pieces of a model of very many units",
        helps=_has_pieces,
        better=_unit_by_unit,
        reaches=_moved_or_kept_s,
        bound="that of the cuts near the bounds",
    ),
    Improvement(
        name="stages recompute some of their units",
        helps=lambda winner: may_recompute_units(winner.best, winner.pricing),
        better=_some_recomputed,
        reaches=_moved_or_kept_s,
        bound="that of all cuts with any choice of units",
    ),
    Improvement(
        name="cuts are between repeated blocks",
        helps=_may_be_between_blocks,
        better=_between_blocks,
        reaches=lambda candidate: candidate.step_s / BLOCKS,
        bound="that of all cuts, also inside blocks",
    ),
    Improvement(
        name="activations wait on the host instead of being recomputed",
        helps=lambda winner: _may_use_host(winner) and may_offload(winner.best, winner.searched),
        better=_on_host,
        reaches=_moved_or_kept_s,
        bound="none: other layouts were not cut with activations on the host",
    ),
    Improvement(
        name="what blocks keep waits on the host, and attention is computed once",
        helps=lambda winner: _may_use_host(winner) and may_stream(winner.best, winner.searched),
        better=_streamed,
        reaches=_moved_or_kept_s,
        bound="none: other layouts were not cut with blocks on the host",
    ),
)
