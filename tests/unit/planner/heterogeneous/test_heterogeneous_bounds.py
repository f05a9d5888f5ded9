"""Oracle: every order of groups, every cut, each stage kept or recomputed, and any groups left idle."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from planner_graphs import chain

from outsize.ir.plan import ScheduleName
from outsize.planner.bounds.step_time import PrefixTimes, made_for, prefix
from outsize.planner.costs.unit_times import UnitSeconds, fastest
from outsize.planner.heterogeneous.bounds import Fleet, GroupBytes, Groups
from outsize.planner.simulation.critical_path import Network
from outsize.schedules.builders import build

SPEEDS = ((1.0, 1.0), (1.0, 2.5), (3.0, 1.0))
Stage = tuple[int, int, int, bool]
"""Kind, first unit, end, whether it recomputes."""


class Small:
    """A chain on a few groups of several kinds; bytes add up."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.seconds = draw(st.lists(st.integers(1, 9), min_size=2, max_size=5))
        self.n = len(self.seconds)
        self.counts = draw(st.sampled_from([(2,), (1, 1), (2, 1), (2, 2), (1, 1, 1)]))
        self.m = draw(st.sampled_from([1, 2, 5]))
        self.schedule: ScheduleName = draw(st.sampled_from(["1f1b", "gpipe", "naive", "zero-bubble"]))
        sizes = st.lists(st.integers(1, 9), min_size=self.n, max_size=self.n)
        self.fixed, self.saved = draw(sizes), draw(sizes)
        self.rooms = [draw(st.integers(8, 60)) for _ in self.counts]
        generator = np.random.default_rng(draw(st.integers(0, 99)))
        self.graph, profile = chain([float(s) for s in self.seconds])
        alone = UnitSeconds.of(profile)
        rates = [generator.uniform(0.5, 3.0, self.n) for _ in self.counts]
        self.kinds = [alone.times(rate, rate, rate) for rate in rates]

    def fleet(self, counts: tuple[int, ...] = (), order: tuple[int, ...] = ()) -> Fleet:
        order = order or tuple(range(len(self.counts)))
        counts = counts or self.counts
        kinds = [Groups.of(counts[t], self.kinds[t], self.rooms[t]) for t in order]
        fixed, nothing = prefix(np.array(self.fixed, float)), np.zeros(self.n + 1)
        held = GroupBytes(
            fixed, fixed, prefix(np.array(self.saved, float)), fixed, nothing, nothing, nothing, 0.0
        )
        work = PrefixTimes.along(made_for(self.graph), fastest(self.kinds))
        return Fleet(kinds, held, work, (self.schedule, self.m))

    def plans(self) -> Iterator[list[Stage]]:
        devices = [kind for kind, count in enumerate(self.counts) for _ in range(count)]
        for stages in range(1, min(len(devices), self.n) + 1):
            for kinds, inner in product(
                sorted(set(permutations(devices, stages))), combinations(range(1, self.n), stages - 1)
            ):
                runs = tuple(pairwise((0, *inner, self.n)))
                for again in product((False, True), repeat=stages):
                    yield [(k, *run, a) for k, run, a in zip(kinds, runs, again, strict=True)]

    def fits(self, plan: list[Stage]) -> bool:
        return all(
            sum(self.fixed[a:b]) + (1 if again else self.flying(len(plan) - s)) * sum(self.saved[a:b])
            <= self.rooms[kind]
            for s, (kind, a, b, again) in enumerate(plan)
        )

    def flying(self, ahead: int) -> int:
        return {"naive": 1, "gpipe": self.m}.get(self.schedule, min(ahead, self.m))

    def step_s(self, plan: list[Stage]) -> float:
        """Simulated, on links that cost nothing."""
        forward, backward = set(pairwise(range(len(plan)))), set(pairwise(reversed(range(len(plan)))))
        network = Network.of(build(self.schedule, len(plan), self.m, len(plan)), forward, backward)
        seconds = dict.fromkeys(network.costs, 0.0)
        for cost in network.costs:
            name, stage, to = cost
            kind, a, b, again = plan[stage]
            of = self.kinds[kind].recomputed() if again else self.kinds[kind]
            if to < 0:
                seconds[cost] = {
                    "F": of.forward, "B": of.backward, "I": of.backward_input, "W": of.backward_weight,
                }[name.value][a:b].sum()  # fmt: skip
        return network.step_s(seconds)

    def best_s(self) -> float:
        return min((self.step_s(p) for p in self.plans() if self.fits(p)), default=float("inf"))


smalls = st.composite(lambda draw: Small(draw))()
some = settings(max_examples=40, derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate])


@some
@given(smalls)
def test_no_order_and_no_cut_is_faster_than_the_floor(small: Small) -> None:
    best_s, floor_s = small.best_s(), small.fleet().floor_s()
    assert floor_s <= best_s * (1 + 1e-9)
    assert small.fleet().least_s <= best_s * (1 + 1e-9)
    assert (floor_s == float("inf")) == (best_s == float("inf")), "bytes add up, so memory is exact"


@some
@given(smalls, st.floats(0.5, 2.0))
def test_a_floor_that_is_not_looked_for_beyond_a_limit_is_still_one(small: Small, share: float) -> None:
    best_s, floor_s = small.best_s(), small.fleet().floor_s()
    if floor_s < float("inf"):
        most_s = share * floor_s
        found = small.fleet().floor_s(most_s)
        assert found <= best_s * (1 + 1e-9)
        assert found >= min(most_s, floor_s) * 0.95, "paths are known less well far above the floor"


@some
@given(smalls)
def test_what_is_arranged_fits_and_is_near_the_best_that_could_be(small: Small) -> None:
    found, best_s = small.fleet().arranged(small.fleet().least_s), small.best_s()
    assert (found is None) == (best_s == float("inf"))
    if found is None:
        return
    kinds, bounds = found
    stages = list(zip(kinds, *zip(*pairwise(bounds), strict=True), strict=True))
    ways = product((False, True), repeat=len(kinds))
    plans = [[(*stage, again) for stage, again in zip(stages, way, strict=True)] for way in ways]
    assert all(kinds.count(kind) <= count for kind, count in enumerate(small.counts))
    assert any(map(small.fits, plans))


@some
@given(smalls)
def test_one_more_group_or_more_memory_never_raises_the_floor(small: Small) -> None:
    plain = small.fleet().floor_s()
    for kind in range(len(small.counts)):
        more = tuple(count + (t == kind) for t, count in enumerate(small.counts))
        small.rooms[kind] += 5
        assert small.fleet(more).floor_s() <= plain * 1.02 or plain == float("inf")


@some
@given(smalls)
def test_the_order_of_kinds_changes_nothing(small: Small) -> None:
    turned = small.fleet(order=tuple(reversed(range(len(small.counts)))))
    assert turned.floor_s() == pytest.approx(small.fleet().floor_s(), rel=2e-3)


def test_equal_kinds_share_equal_work_to_the_last_percent() -> None:
    """Thirty groups of two kinds, one twice as fast: the floor is the fill and the balanced pace."""
    graph, profile = chain([1.0] * 900)
    fast = UnitSeconds.of(profile)
    slow, nothing, m = fast.times(2, 2, 2), np.zeros(901), 200
    kinds = [Groups.of(20, fast, 1.0), Groups.of(10, slow, 1.0)]
    held = GroupBytes(nothing, nothing, nothing, nothing, nothing, nothing, nothing, 0.0)
    fleet = Fleet(kinds, held, PrefixTimes.along(made_for(graph), fast), ("1f1b", m), (False,))
    pace_s = 3 * 900 / 25
    floor_s = fleet.floor_s()
    assert pace_s * (m + 26) <= floor_s <= pace_s * (m + 29) * 1.01
    found = fleet.arranged(floor_s)
    assert found is not None
    assert (found[0].count(0), found[0].count(1)) == (20, 10)
