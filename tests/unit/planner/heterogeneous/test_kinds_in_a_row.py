"""Oracle: all orders of kinds in a row, numbers of groups that are used, and cuts, each stage kept or not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, groupby, pairwise, permutations, product
from math import inf

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_graphs import chain

from outsize.ir.hardware.links import Link
from outsize.planner.bounds.step_time import PrefixTimes, made_for, prefix
from outsize.planner.costs.unit_times import UnitSeconds, fastest
from outsize.planner.heterogeneous.bounds import Fleet, GroupBytes, Groups
from outsize.planner.heterogeneous.kinds_in_a_row import PRECISE, KindsInARow

NEAR, FAR = (Link(name=name, latency_s=s, bytes_per_s=b) for name, s, b in (("a", 0.0, 4.0), ("b", 0.5, 1.0)))


class Small:
    """A chain on a few groups, of which those of a kind are near each other."""

    def __init__(self, draw: st.DrawFn, most_crossing: int = 0) -> None:
        seconds = draw(st.lists(st.integers(1, 9), min_size=4, max_size=6))
        self.n = len(seconds)
        self.counts = draw(st.sampled_from([(2, 1), (1, 1, 1), (2, 2)]))
        rates = [draw(st.sampled_from([1.0, 2.0, 3.0])) for _ in self.counts]
        self.saved = np.array(draw(st.lists(st.integers(1, 5), min_size=self.n, max_size=self.n)), float)
        self.ample = 8 * self.saved.sum()
        rooms = st.integers(10, 60) | st.just(int(self.ample))
        self.rooms = [draw(rooms) for _ in self.counts]
        most = draw(st.sampled_from([0, 4]))
        messages = draw(st.lists(st.integers(0, most), min_size=self.n - 1, max_size=self.n - 1))
        self.messages = np.array([draw(st.integers(0, most)), *messages, 0], float)
        graph, profile = chain([float(s) for s in seconds])
        kinds = [UnitSeconds.of(profile).times(rate, rate, rate) for rate in rates]
        nothing = np.zeros(self.n + 1)
        self.crossing = np.zeros(self.n + 1)
        if most_crossing:
            inner = draw(st.lists(st.integers(0, most_crossing), min_size=self.n - 1, max_size=self.n - 1))
            self.crossing[1:-1] = inner
        saved = prefix(self.saved)
        held = GroupBytes(nothing, nothing, saved, nothing, nothing, nothing, self.crossing, 0.0)
        groups = [Groups.of(*of) for of in zip(self.counts, kinds, self.rooms, strict=True)]
        work = PrefixTimes.along(made_for(graph), fastest(kinds))
        self.fleet = Fleet(groups, held, work, ("1f1b", 8))
        self.row = KindsInARow(self.fleet, self.links, self.messages)

    @staticmethod
    def links(kinds: Sequence[int]) -> list[Link]:
        return [NEAR if one == other else FAR for one, other in pairwise((kinds[-1], *kinds))]

    def best_s(self) -> float:
        """The shortest period of all orders of kinds, groups that are used, and cuts."""
        best_s = inf
        orders = permutations(range(len(self.counts)))
        for order, used in product(orders, product(*(range(count + 1) for count in self.counts))):
            kinds = tuple(kind for kind in order for _ in range(used[kind]))
            for inner in combinations(range(1, self.n), len(kinds) - 1) if kinds else ():
                best_s = min(best_s, self.row.period_s(kinds, (0, *inner, self.n)))
        return best_s


smalls = st.composite(lambda draw: Small(draw))()
crossed = st.composite(lambda draw: Small(draw, most_crossing=20))()
some = settings(max_examples=60, derandomize=True, deadline=None)


@settings(some, max_examples=400)
@given(smalls)
def test_it_is_what_it_says_and_no_cut_is_faster_where_messages_and_memory_do_not_count(small: Small) -> None:
    best_s = small.best_s()
    found = small.row.best(1.0 if best_s == inf else best_s / 2)
    if found is None:
        return
    assert all(found.kinds.count(kind) <= count for kind, count in enumerate(small.counts))
    assert len({kind for kind, _ in groupby(found.kinds)}) == len(list(groupby(found.kinds)))
    period_s = small.row.period_s(found.kinds, found.bounds)
    assert period_s <= found.period_s * (1 + 1e-9)
    assert period_s >= best_s * (1 - 1e-9)
    # Where memory is short, the greedy way may leave a group the units that it has no room for.
    if not small.messages.any() and min(small.rooms) >= small.ample:
        assert found.period_s <= best_s * (1 + 2 * PRECISE)


@settings(some, max_examples=400)
@given(crossed)
def test_each_stage_has_room_for_the_bytes_that_cross_its_own_cuts(small: Small) -> None:
    if (found := small.row.best(6.0)) is None:
        return
    for after, (kind, (first, end)) in enumerate(
        reversed(list(zip(found.kinds, pairwise(found.bounds), strict=True)))
    ):
        in_flight, saved = min(after + 1, 8), small.saved[first:end].sum()
        least_bytes = saved + in_flight * (small.crossing[first] + small.crossing[end])
        assert least_bytes <= small.rooms[kind]
