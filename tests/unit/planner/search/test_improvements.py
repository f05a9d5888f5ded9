"""What is finer than the search is tried for its winner, where it may help, and never makes a step longer but
for cuts between blocks.
"""

from __future__ import annotations

from planner_graphs import chain

from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster, make_cluster
from outsize.ir.plan import Axes
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.planner.search.branch_and_bound import BranchAndBound, SearchResult
from outsize.planner.search.improvements import BLOCKS, IMPROVEMENTS, Winner, improved

COSTS = [1.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
REQUEST = PlanRequest(batch_size=4)


def searched(ends: dict[int, tuple[int, ...]], memory_bytes: int = 2**40) -> tuple[Pricing, SearchResult]:
    pricing = Pricing({4: chain(COSTS, saved_bytes=1000)}, _cluster(memory_bytes), "sgd", ends=ends)
    layout = Layout(Axes(pp=2), 2, "1f1b", 4, 4)
    return pricing, BranchAndBound(pricing, ("none", "full", "selective")).run([layout])


def _cluster(memory_bytes: int) -> Cluster:
    return make_cluster("2xcpu", "cpu", 1, 2, memory_bytes)


def helping(winner: Winner) -> list[int]:
    return [place for place, improvement in enumerate(IMPROVEMENTS) if improvement.helps(winner)]


def test_cuts_inside_pieces_are_found_for_the_winner() -> None:
    pricing, result = searched({4: (0, 6, 8)})
    start = result.candidates[0]
    winner = Winner(REQUEST, result, pricing, pricing, start)
    assert 1 in helping(winner)
    best = improved(REQUEST, result, pricing)
    assert best.step_s < start.step_s
    assert best.unit_bounds[1] != start.unit_bounds[1]


def test_where_every_cut_was_tried_no_piece_is_cut_again() -> None:
    pricing, result = searched({})
    winner = Winner(REQUEST, result, pricing, pricing, result.candidates[0])
    assert 1 not in helping(winner)
    assert 4 not in helping(winner), "a CPU copies within its own memory"
    best = improved(REQUEST, result, pricing)
    assert best.step_s <= BLOCKS * result.candidates[0].step_s
