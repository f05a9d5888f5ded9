"""Few runs against all of them."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outsize.planner.costs.unit_times import Seconds
from outsize.planner.partition.chain_dp import SAME, bottleneck, partition
from outsize.planner.partition.sparse_chain_dp import Runs

Problem = tuple[Seconds, NDArray[np.float64], NDArray[np.int64]]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Seconds summed over units, prices (stage, first, end) that are no less, some infinite; traffic."""
    units, stages = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    total = np.concatenate(([0.0], np.cumsum(generator.integers(0, 4, units)))).astype(np.float64)
    shape = (stages, units + 1, units + 1)
    prices = (total - total[:, None]) + generator.integers(0, draw(st.sampled_from([1, 9])), shape)
    prices[generator.random(shape) < draw(st.sampled_from([0.0, 0.3]))] = np.inf
    return total, prices, generator.integers(0, 4, shape[1:], dtype=np.int64)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(problems(), st.integers(0, 12))
def test_few_runs_say_what_all_do(problem: Problem, limit_s: int) -> None:
    total, prices, traffic = problem
    stages, units = len(prices), len(total) - 1
    runs = Runs.within(total, float(limit_s))
    lengths = total[runs.end] - total[runs.first]
    assert (lengths <= limit_s).all()
    assert len(lengths) == sum(total[b] - total[a] <= limit_s for b in range(units + 1) for a in range(b))
    best = bottleneck(stages, prices.__getitem__, units)
    found = runs.bottleneck(stages, lambda s: prices[s][runs.first, runs.end])
    assert found >= best
    if best <= limit_s:
        assert found == best
        here = traffic[runs.first, runs.end]
        cut = runs.cut(stages, lambda s: prices[s][runs.first, runs.end], best * SAME, here)
        assert cut == partition(stages, prices.__getitem__, traffic)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(problems(), st.integers(0, 12))
def test_runs_that_no_stage_can_be_do_not_matter(problem: Problem, limit_s: int) -> None:
    """All cuts within the limit, by brute force, are made of the runs that are left."""
    total, prices, _ = problem
    stages, units = len(prices), len(total) - 1
    windows = [reach(total, stages, stage, limit_s) for stage in range(stages)]
    runs = Runs.within(total, float(limit_s)).between(windows)
    left = {*zip(runs.first.tolist(), runs.end.tolist(), strict=True)}
    for stage, (least, most) in enumerate(windows):
        begins = set(runs.first[runs.window(stage)].tolist())
        assert begins == {a for a, _ in left if least <= a <= most}
    cuts = [(0, *inner, units) for inner in combinations(range(1, units), stages - 1)]
    used = {
        run
        for cut in cuts
        if all(total[b] - total[a] <= limit_s for a, b in pairwise(cut))
        for run in pairwise(cut)
    }
    assert used <= left
    assert all(any(a in range(*_closed(windows[s])) for s in range(stages)) for a, _ in left)


def reach(total: Seconds, stages: int, stage: int, limit_s: float) -> tuple[int, int]:
    """The first and last unit with which a stage can begin, one unit after the other."""
    before = [u for u in range(len(total)) if total[u] <= stage * limit_s]
    after = [u for u in range(len(total)) if total[-1] - total[u] <= (stages - stage) * limit_s]
    return min(after), max(before)


def _closed(window: tuple[int, int]) -> tuple[int, int]:
    return window[0], window[1] + 1


def test_of_one_stage_one_run_is_left() -> None:
    runs = Runs.within(np.arange(9.0), 8.0).between([(0, 0)])
    assert (runs.first.tolist(), runs.end.tolist()) == ([0], [8])


def test_runs_of_a_window_are_side_by_side() -> None:
    runs = Runs.within(np.arange(5.0), 2.0).between([(0, 0), (1, 2), (2, 4)])
    pairs = zip(runs.first[runs.window(1)].tolist(), runs.end[runs.window(1)].tolist(), strict=True)
    assert list(pairs) == [(1, 2), (1, 3), (2, 3), (2, 4)]
