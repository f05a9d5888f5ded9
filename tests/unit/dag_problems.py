"""Random splits of DAGs, all answers by brute force, and a checker that knows nothing of the planner.

`benchmarks/optimality/brute_force.py` runs the same on 10,000 graphs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Edge = tuple[int, int]
Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Manner:
    """One way to run units: figures for each unit."""

    steady: Numbers
    once: Numbers
    held: Numbers


@dataclass(frozen=True)
class Problem:
    """Split `units` into exactly `stages`; in flight: the stages from s on, at most `microbatches`."""

    units: int
    edges: tuple[Edge, ...]
    stages: int
    microbatches: int
    fixed: Numbers
    boundary: Numbers
    manners: tuple[Manner, ...]
    rooms: Numbers

    def in_flight(self, stage: int) -> int:
        return min(self.microbatches, self.stages - stage)

    @property
    def seconds(self) -> Numbers:
        return self.manners[0].steady


@st.composite
def dags(draw: st.DrawFn, most: int) -> tuple[int, tuple[Edge, ...]]:
    """Edges from earlier to later numbers, relabelled."""
    n = draw(st.integers(1, most))
    density = draw(st.sampled_from([0.1, 0.25, 0.5, 0.8]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    name = generator.permutation(n).tolist()
    return n, tuple(
        (name[a], name[b]) for a in range(n) for b in range(a + 1, n) if generator.random() < density
    )


@st.composite
def problems(draw: st.DrawFn, most: int = 9) -> Problem:
    """Half of them with transfers, most with little memory, one to three ways to run."""
    n, edges = draw(dags(most))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def numbers(high: int) -> Numbers:
        return tuple(generator.integers(0, high + 1, n).tolist())

    stages = draw(st.integers(1, min(4, n)))
    manners = [Manner(numbers(9), numbers(9), numbers(9))]
    for _ in range(draw(st.integers(0, 2))):
        steady = tuple(a + b for a, b in zip(manners[0].steady, numbers(4), strict=True))
        manners.append(Manner(steady, numbers(9), numbers(3)))
    scale = draw(st.sampled_from([10, 30, 60, 1000]))
    return Problem(
        n,
        edges,
        stages,
        draw(st.sampled_from([1, 2, 4, 32])),
        numbers(6),
        numbers(draw(st.sampled_from([0, 5]))),
        tuple(manners),
        tuple((scale + generator.integers(0, scale, stages)).tolist()),
    )


def all_chains(problem: Problem) -> NDArray[np.int64]:
    """Every way to be split: rows of downsets from 0 to everything, each larger than the one before."""
    masks = np.arange(1 << problem.units)
    fine = np.ones(len(masks), np.bool_)
    for a, b in problem.edges:
        fine &= ((masks >> b & 1) == 0) | ((masks >> a & 1) == 1)
    downsets = masks[fine]
    chains = np.zeros((1, 1), np.int64)
    for _ in range(problem.stages - 1):
        rows, columns = np.nonzero(
            ((chains[:, -1:] & ~downsets) == 0) & (chains[:, -1:] != downsets) & (downsets != masks[-1])
        )
        chains = np.column_stack([chains[rows], downsets[columns]])
    return np.column_stack([chains, np.full(len(chains), masks[-1])])


def sums(problem: Problem, numbers: Numbers) -> NDArray[np.int64]:
    """For every set of units the sum over it."""
    masks = np.arange(1 << problem.units)
    return sum(((masks >> u & 1) * x for u, x in enumerate(numbers)), np.zeros(len(masks), np.int64))


def leaving(problem: Problem, numbers: Numbers) -> NDArray[np.int64]:
    """For every set the sum over the members that somebody outside uses."""
    masks = np.arange(1 << problem.units)
    total = np.zeros(len(masks), np.int64)
    for u, number in enumerate(numbers):
        users = sum(1 << b for a, b in set(problem.edges) if a == u)
        total += ((masks >> u & 1) == 1) * ((users & ~masks) != 0) * number
    return total


def brute_force_step(problem: Problem) -> float:
    """The fastest step over all splits and ways; infinite when nothing fits."""
    chains = all_chains(problem)
    fixed, wire = sums(problem, problem.fixed), leaving(problem, problem.boundary)
    tables = [
        (sums(problem, m.steady), sums(problem, m.once), sums(problem, m.held)) for m in problem.manners
    ]
    best = np.inf
    for picks in product(range(len(tables)), repeat=problem.stages):
        slowest, total = np.zeros(len(chains)), np.zeros(len(chains))
        fits = np.ones(len(chains), np.bool_)
        for s, pick in enumerate(picks):
            low, high = chains[:, s], chains[:, s + 1]
            units, moved = high ^ low, wire[low] + wire[high]
            steady, once, held = tables[pick]
            slowest = np.maximum(slowest, steady[units] + moved)
            total += once[units] + moved
            fits &= fixed[units] + problem.in_flight(s) * held[units] <= problem.rooms[s]
        step = np.where(fits, total + (problem.microbatches - 1) * slowest, np.inf)
        best = min(best, float(step.min(initial=np.inf)))
    return best


def brute_force_bottleneck(problem: Problem, crossing: Numbers) -> int:
    """The least max of stages and boundaries over at most as many stages, memory left out."""
    best = None
    for stages in range(1, problem.stages + 1):
        fewer = Problem(**{**vars(problem), "stages": stages})
        chains = all_chains(fewer)
        load, wire = sums(problem, problem.seconds), leaving(problem, crossing)
        columns = [load[chains[:, s + 1] ^ chains[:, s]] for s in range(stages)]
        columns += [wire[chains[:, s]] for s in range(1, stages)]
        here = int(np.max(columns, axis=0).min())
        best = here if best is None else min(best, here)
    assert best is not None
    return best


def checked_step(problem: Problem, stages: tuple[int, ...], ways: tuple[int, ...]) -> float:
    """Seconds of a step of this plan, unit by unit; fails when it is no plan or does not fit."""
    stage_of = {u: s for s, units in enumerate(stages) for u in range(problem.units) if units >> u & 1}
    assert sorted(stage_of) == list(range(problem.units))
    assert len(set(stage_of.values())) == problem.stages
    assert sum(bin(units).count("1") for units in stages) == problem.units
    assert all(stage_of[a] <= stage_of[b] for a, b in problem.edges)
    moved = [0] * problem.stages
    for unit, stage in stage_of.items():
        last = max((stage_of[b] for a, b in problem.edges if a == unit), default=stage)
        for boundary in range(stage, last):
            moved[boundary] += problem.boundary[unit]
            moved[boundary + 1] += problem.boundary[unit]
    paces, total = [], 0
    for s in range(problem.stages):
        mine, manner = [u for u in stage_of if stage_of[u] == s], problem.manners[ways[s]]
        peak = sum(problem.fixed[u] for u in mine)
        peak += problem.in_flight(s) * sum(manner.held[u] for u in mine)
        assert peak <= problem.rooms[s]
        paces.append(sum(manner.steady[u] for u in mine) + moved[s])
        total += sum(manner.once[u] for u in mine) + moved[s]
    return total + (problem.microbatches - 1) * max(paces)
