"""One pinned rank: tune, then run every cut between blocks with every count of microbatches and schedule.

Rank 0 writes one JSON: the trials, the median of each point of the sweep, and the laps of the finalists: the
sweep's best three and the tuned plan, in turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch.distributed as dist
from cases import CASES, Case
from systems import engine_system, in_turns, joined, plan_of, timed

import outsize
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.train.world.world import leave

SCHEDULES = ("1f1b", "zero-bubble")  # under gpipe a step of two stages takes as long as under 1f1b
FINALISTS = 3


def cuts(graph: ModelGraph) -> list[int]:
    """The first units of blocks: where the name up to its first number changes."""
    blocks = [re.match(r"(.*?\d+(\.\d+)?|[^.]*)", unit.name) for unit in graph.units]
    names = [found[0] if found else "" for found in blocks]
    return [i for i in range(1, len(names)) if names[i] != names[i - 1]]


def sweep(case: Case, counts: list[int], laps: int, rank: int) -> list[tuple[float, Plan]]:
    """Median seconds of every point, after one lap that warms up."""
    graph = outsize.capture(case.model, case.args, case.kwargs, **case.example)
    points = list(product(cuts(graph), counts, SCHEDULES))
    found = []
    for number, (place, count, schedule) in enumerate(points):
        plan = plan_of(case, graph, place, schedule, count)
        system = engine_system(case, plan)
        timed(system)
        found.append((statistics.median(timed(system) for _ in range(laps)), plan))
        del system
        gc.collect()
        if rank == 0:
            print(f"{number + 1} of {len(points)}: {found[-1][0]:.3f} s", file=sys.stderr)
    return found


def shared(value: Any) -> Any:
    """What rank 0 has: ranks must agree on the finalists."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def main() -> None:
    """Tune, sweep, finals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    parser.add_argument("--microbatches", default="1,2,4,8")
    parser.add_argument("--laps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    world = joined()
    case = CASES[options.case]()
    tuned = outsize.tune(case.model, case.args, case.kwargs, **case.example)
    counts = [int(m) for m in options.microbatches.split(",")]
    points = shared(sorted(sweep(case, counts, options.laps, world.rank), key=lambda point: point[0]))
    plans = {"tuned": tuned.plan} | {f"sweep {n}": plan for n, (_, plan) in enumerate(points[:FINALISTS])}
    laps = in_turns({name: engine_system(case, plan) for name, plan in plans.items()}, options.rounds)
    if world.rank == 0:
        rows = [
            {"step_s": s, "cut": p.stages[1].units[0], "microbatches": p.microbatches, "schedule": p.schedule}
            for s, p in points
        ]
        options.out.write_text(json.dumps({"tuned": tuned.document(), "sweep": rows, "finals_s": laps}))
    leave(world)


if __name__ == "__main__":
    main()
