"""Few runs against all of them."""

from __future__ import annotations

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


def test_runs_that_begin_with_some_units_are_side_by_side() -> None:
    runs = Runs.within(np.arange(5.0), 2.0)
    window = runs.beginning(1, 2)
    pairs = zip(runs.first[window].tolist(), runs.end[window].tolist(), strict=True)
    assert list(pairs) == [(1, 2), (1, 3), (2, 3), (2, 4)]
