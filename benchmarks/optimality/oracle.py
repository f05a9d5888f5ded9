"""The optimum once more, by code that shares nothing with the planner: no reductions, other algorithms.

`assembly_line`: the split of a DAG into k stages is the assembly line balancing problem (SALBP-2). Held, Karp
and Shareshian (Operations Research 11(3), 1963): the least (stages, load of the last) for every downset, unit
after unit; under one limit a unit opens a new stage when it does not fit.
`integer_program`: HiGHS on y[u, s] = "u is on stage s or before"; monotone in s, and y[u, s] >= y[v, s] along
u -> v. Both return ticks, or None where they did not finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Edges = Sequence[tuple[int, int]]
Steps = list[list[tuple[int, int]]]


def least_mean(ticks: Sequence[int], stages: int) -> int:
    """No split is better than the heaviest unit or than equal stages."""
    return max(max(ticks), (sum(ticks) + stages - 1) // stages)


def assembly_line(ticks: Sequence[int], edges: Edges, stages: int, most: int) -> int | None:
    """Exact; None when there are more than `most` downsets."""
    steps = _downset_steps(ticks, edges, most)
    if steps is None:
        return None
    low, high = least_mean(ticks, stages), sum(ticks)
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(steps, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _downset_steps(ticks: Sequence[int], edges: Edges, most: int) -> Steps | None:
    """For each downset, small ones first, the (larger downset, weight of the unit added)."""
    sources: list[set[int]] = [set() for _ in ticks]
    for a, b in edges:
        sources[b].add(a)
    need = [sum(1 << a for a in s) for s in sources]
    number = {0: 0}
    queue, steps = [0], []
    for downset in queue:
        row: list[tuple[int, int]] = []
        for unit, before in enumerate(need):
            if not downset >> unit & 1 and before & downset == before:
                larger = downset | 1 << unit
                if larger not in number:
                    number[larger] = len(queue)
                    queue.append(larger)
                row.append((number[larger], ticks[unit]))
        steps.append(row)
        if len(queue) > most:
            return None
    return steps


def _stages_needed(steps: Steps, limit: int) -> int:
    best = [(len(steps), 0)] * len(steps)
    best[0] = (1, 0)
    for here, row in enumerate(steps):
        stage, load = best[here]
        for there, weight in row:
            reached = (stage, load + weight) if load + weight <= limit else (stage + 1, weight)
            if reached < best[there]:
                best[there] = reached
    return best[-1][0]


def integer_program(ticks: Sequence[int], edges: Edges, stages: int, seconds: float) -> int | None:
    """The optimum by HiGHS; None without `highspy`, or when `seconds` do not suffice to prove it."""
    try:
        import highspy
    except ImportError:
        return None
    solver = highspy.Highs()
    solver.silent()
    for option, value in {
        "time_limit": seconds,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": 0.5,
        "threads": 1,
    }.items():
        solver.setOptionValue(option, value)
    # Weights relative to the mean stage: HiGHS' tolerances are absolute.
    mean = sum(ticks) / stages
    slowest = solver.addVariable(lb=least_mean(ticks, stages) / mean, obj=1.0)
    until = [[solver.addBinary() for _ in range(stages - 1)] for _ in ticks]
    for row in until:
        for earlier, later in pairwise(row):
            solver.addConstr(earlier <= later)
    for a, b in edges:
        for s in range(stages - 1):
            solver.addConstr(until[b][s] <= until[a][s])
    for s in range(stages):
        load = sum(
            (w / mean) * ((row[s] if s < stages - 1 else 1) - (row[s - 1] if s else 0))
            for w, row in zip(ticks, until, strict=True)
        )
        solver.addConstr(load <= slowest)
    solver.setOptionValue("mip_abs_gap", 0.5 / mean)
    solver.minimize(slowest)
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    values = solver.allVariableValues()
    return _ticks_of(ticks, stages, [[round(values[y.index]) for y in row] for row in until])


def _ticks_of(ticks: Sequence[int], stages: int, until: list[list[int]]) -> int:
    """The slowest stage in whole ticks, from the binaries: a solver's objective is rounded."""
    load = [0] * stages
    for weight, row in zip(ticks, until, strict=True):
        load[row.index(1) if 1 in row else stages - 1] += weight
    return max(load)
