"""What the search says of layouts that it cannot price."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from planner_graphs import chain

from outsize.ir.cluster import make_cluster
from outsize.ir.plan import Axes, ScheduleName
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.evaluate.ranking import choose
from outsize.planner.layout.layout import Layout
from outsize.planner.search.branch_and_bound import BranchAndBound


def test_more_stages_than_pieces_are_bounded_and_not_rejected() -> None:
    """Eight units in two pieces, on four devices with room for all: a bound, and no word of memory."""
    cluster = make_cluster("4xcpu", "cpu", 1, 4, 2**40)
    tables = Pricing({4: chain([1.0] * 8)}, cluster, "adamw", ends={4: (0, 4, 8)})
    layouts = [Layout(Axes(pp=stages), stages, "1f1b", 4, 4) for stages in (2, 4)]
    result = BranchAndBound(tables, ("none", "full")).run(layouts)
    assert [estimate.layout.stages for estimate in result.candidates] == [2]
    assert result.rejected == ()
    assert 0 < result.floor_s < inf


def tables_of(stages: int) -> tuple[Pricing, list[Layout]]:
    """Sixteen equal units on four devices with room for all, in pipelines of every count of microbatches."""
    cluster = make_cluster("4xcpu", "cpu", 1, 4, 2**40)
    counts = (1, 2, 4, 8, 16)
    tables = Pricing({count: chain([16.0 / count] * 16) for count in counts}, cluster, "adamw")
    names: tuple[ScheduleName, ...] = ("1f1b", "gpipe", "naive")
    axes = Axes(pp=stages)
    return tables, [Layout(axes, stages, name, count, count) for name in names for count in counts]


def test_what_is_not_compared_with_others_is_found_by_fewer_tries() -> None:
    tables, layouts = tables_of(4)
    all_of = BranchAndBound(tables, ("none", "full")).run(layouts)
    found = BranchAndBound(tables, ("none", "full"), compares=False).run(layouts)
    assert choose(found.candidates).layout == choose(all_of.candidates).layout
    assert choose(found.candidates).step_s == choose(all_of.candidates).step_s
    assert found.floor_s == all_of.floor_s
    assert len(found.candidates) < len(all_of.candidates) == len(layouts)
    assert set(found.layouts) == set(layouts)


def test_a_few_stages_on_each_device_end_the_search_of_the_others() -> None:
    """Two stages on each device have a shorter step than any single one, so few of those are priced."""
    tables, layouts = tables_of(4)
    many = [replace(layout, sequence=sequence) for layout in layouts for sequence in (False, True)]
    chunked = [
        replace(layout, stages=8, schedule="interleaved") for layout in layouts if layout.schedule == "1f1b"
    ]
    alone = BranchAndBound(tables, ("none",)).run(many)
    both = BranchAndBound(tables, ("none",)).run([*many, *chunked])
    best = choose(both.candidates)
    assert best.layout.schedule == "interleaved"
    assert best.step_s < choose(alone.candidates).step_s
    assert len(both.candidates) < len(alone.candidates)
