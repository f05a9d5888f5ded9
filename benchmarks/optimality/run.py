"""Question: how far from the optimum is the split that the planner finds for a model with branches?

    minimise  max over stages of (forward + backward of its nodes)

over all ways to give each node of the profile one of k stages so that no edge goes back: stages are convex
and their quotient is acyclic. Nothing is contracted and no order of the nodes is prescribed. With
`--bytes-per-s` a boundary counts as well, as in PipeDream: the slowest stage or the slowest boundary
(activations forward and their gradients backward over every boundary that the edge passes).

Per profile and k: the planner's optimum, the optimum by other code (oracle.py) and the gap between them;
beside them the best split of the nodes in the order of their numbers: all that a splitter of chains sees.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import oracle
from profiles import BadProfile, LayerGraph, read

from outsize.errors import OutsizeError
from outsize.planner.dag.dag import Dag, members
from outsize.planner.dag.partition import DagPartition, split_dag

HERE = Path(__file__).parent
PUBLISHED = {
    "torchgpipe, block partition": {"mean": 0.110, "max": 0.493},
    "DeepSpeed, uniform and by parameters": {"mean": 0.004, "max": 0.123},
    "note": "figures as published, over the optimum of a chain; not computed here",
}
MOST_DOWNSETS = 600_000


def compare(graph: LayerGraph, stages: int, options: argparse.Namespace) -> dict[str, Any]:
    """One profile and one k."""
    dag = Dag.of(graph.ticks, graph.edges)
    crossing = _crossing(graph, options.bytes_per_s)
    begin = time.perf_counter()
    split = split_dag(dag, stages, crossing)
    seconds = time.perf_counter() - begin
    _check(dag, split, crossing)
    best, source = independent(graph, stages, split, crossing, options)
    return {
        "profile": graph.name,
        "nodes": len(graph.nodes),
        "edges": len(graph.edges),
        "k": stages,
        "stages_used": sum(1 for s in split.stages if s),
        "optimum_ms": graph.ms(split.ticks),
        "independent_ms": None if best is None else graph.ms(best),
        "independent_by": source,
        "gap": split.gap if best is None else split.ticks / best - 1 if best else 0.0,
        "certified_gap": split.gap,
        "lower_bound_ms": graph.ms(oracle.least_mean(graph.ticks, stages)),
        "optimum_of_numbered_chain_ms": graph.ms(chain(graph, stages)),
        "downsets_listed": split.downsets,
        "seconds": round(seconds, 3),
        "split": [[graph.nodes[u] for u in members(s)] for s in split.stages] if options.splits else None,
    }


def independent(
    graph: LayerGraph,
    stages: int,
    split: DagPartition,
    crossing: tuple[int, ...],
    options: argparse.Namespace,
) -> tuple[int | None, str]:
    """The optimum by other code, and by which."""
    least = oracle.least_mean(graph.ticks, stages)
    if split.ticks == least:
        return least, "no split is better than the heaviest node or equal stages"
    if crossing:
        return None, "none with boundaries; tests/unit/planner tries all splits of small graphs"
    found = oracle.integer_program(graph.ticks, graph.edges, stages, options.milp_s)
    if found == split.ticks:
        return found, "HiGHS"
    # Not finished, or off by the solver's tolerance: whole numbers decide.
    found = oracle.assembly_line(graph.ticks, graph.edges, stages, options.downsets)
    return found, "none finished" if found is None else "Held-Karp-Shareshian over all downsets"


def chain(graph: LayerGraph, stages: int) -> int:
    """The best split of the nodes in a topological order by number: greedy runs under a bisected limit."""
    ticks = [graph.ticks[u] for u in _numbered(graph)]
    low, high = oracle.least_mean(ticks, stages), sum(ticks)
    while low < high:
        middle = (low + high) // 2
        runs, load = 1, 0
        for weight in ticks:
            runs, load = (runs, load + weight) if load + weight <= middle else (runs + 1, weight)
        low, high = (low, middle) if runs <= stages else (middle + 1, high)
    return low


def _numbered(graph: LayerGraph) -> list[int]:
    dag = Dag.of(graph.ticks, graph.edges)
    number = [int("".join(filter(str.isdigit, name)) or 0) for name in graph.nodes]
    order: list[int] = []
    ready = {u for u, before in enumerate(dag.before) if not before}
    done = 0
    while ready:
        unit = min(ready, key=lambda u: (number[u], u))
        ready.remove(unit)
        order.append(unit)
        done |= 1 << unit
        ready |= {f for f in members(dag.after[unit]) if not dag.before[f] & ~done}
    return order


def _crossing(graph: LayerGraph, bytes_per_s: float | None) -> tuple[int, ...]:
    """Ticks of a node's output forward and its gradient backward."""
    if not bytes_per_s:
        return ()
    return tuple(round(2 * size / bytes_per_s * 1000 * graph.ticks_per_ms) for size in graph.output_bytes)


def _check(dag: Dag, split: DagPartition, crossing: tuple[int, ...]) -> None:
    """The split is one, and as slow as it says: from its sets alone."""
    stage_of = {u: s for s, units in enumerate(split.stages) for u in members(units)}
    assert sum(units.bit_count() for units in split.stages) == len(stage_of) == len(dag.weights)
    load = [0] * len(split.stages)
    wire = [0] * len(split.stages)
    for unit, stage in stage_of.items():
        load[stage] += dag.weights[unit]
        users = [stage_of[v] for v in members(dag.after[unit])]
        assert all(stage <= user for user in users)
        for boundary in range(stage, max(users, default=stage)):
            wire[boundary] += crossing[unit] if crossing else 0
    assert max(*load, *wire) == split.ticks


def read_all(folder: Path) -> tuple[list[LayerGraph], dict[str, str]]:
    """The profiles of a folder, and why other files are none."""
    graphs, skipped = [], {}
    for path in sorted(folder.rglob("*.txt")):
        try:
            graph = read(path)
            Dag.of(graph.ticks, graph.edges)
            graphs.append(graph)
        except (BadProfile, OutsizeError, OSError) as error:
            skipped[path.name] = str(error)
    return graphs, skipped


def options_of(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="How far from the optimum is the planner's split?")
    parser.add_argument("--profiles", type=Path, help="folder of PipeDream profiles (*.txt)")
    parser.add_argument("--k", default="2,4,8", help="numbers of stages")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--splits", action="store_true", help="list the nodes of each stage")
    parser.add_argument("--bytes-per-s", type=float, help="count boundaries over a link of this speed")
    parser.add_argument("--downsets", type=int, default=MOST_DOWNSETS, help="most that the oracle may list")
    parser.add_argument("--milp-s", type=float, default=60.0, help="most seconds for HiGHS")
    parser.add_argument("--no-save", action="store_true", help="write nothing under results/")
    return parser.parse_args(arguments)


def result_of(options: argparse.Namespace) -> dict[str, Any]:
    """All rows and their summary."""
    graphs, skipped = read_all(options.profiles)
    counts = [int(k) for k in options.k.split(",")]
    rows = [compare(graph, k, options) for graph in graphs for k in counts]
    gaps = [row["gap"] for row in rows]
    return {
        "date": str(datetime.date.today()),
        "machine": f"{platform.machine()}-{platform.system().lower()}",
        "objective": "max over stages of forward + backward; stage(u) <= stage(v) along every edge"
        + (f"; and of boundaries at {options.bytes_per_s:g} bytes/s" if options.bytes_per_s else ""),
        "gap_mean": sum(gaps) / len(gaps) if gaps else None,
        "gap_max": max(gaps, default=None),
        "certified_gap_max": max((row["certified_gap"] for row in rows), default=None),
        "confirmed": sum(row["independent_ms"] is not None for row in rows),
        "rows": rows,
        "published": PUBLISHED,
        "skipped": skipped,
    }


def table(result: dict[str, Any]) -> str:
    """The same for people."""
    lines = ["profile             k   optimum ms  independent  gap      chain ms     s  confirmed by"]
    for row in result["rows"]:
        other = "-" if row["independent_ms"] is None else f"{row['independent_ms']:.3f}"
        lines.append(
            f"{row['profile'][:18]:18s} {row['k']:2d} {row['optimum_ms']:12.3f} {other:>12s} "
            f"{row['gap']:8.2g} {row['optimum_of_numbered_chain_ms']:10.3f} {row['seconds']:5.1f}  "
            f"{row['independent_by']}"
        )
    lines.append(f"gap: mean {result['gap_mean']}, max {result['gap_max']}")
    for name, gap in result["published"].items():
        if isinstance(gap, dict):
            lines.append(f"published: {name}: +{gap['mean']:.1%} mean, +{gap['max']:.1%} max")
    lines += [f"skipped {name}: {why}" for name, why in result["skipped"].items()]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print, keep, and fail when a gap is left."""
    options = options_of(arguments)
    if options.profiles is None or not options.profiles.is_dir():
        word = f"skipped: no folder of profiles at --profiles {options.profiles or ''}"
        print(json.dumps({"skipped": {str(options.profiles): "no such folder"}}) if options.json else word)
        return 0
    result = result_of(options)
    if not options.no_save and not options.bytes_per_s:
        path = HERE / "results" / f"{result['date']}_{result['machine']}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result) if options.json else table(result))
    return 0 if not result["gap_max"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
