"""Question: how close is a pipelined step to its bound, and is it ever slower than torch's pipelining?

Two processes, one thread and one core each, a GPT-2 of 8 layers cut in the middle; both systems in one run,
A B A B. The bound is the simulated step of the same schedule with zero-cost links, from the medians of the
compute spans that the run itself measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from outsize.planner.simulation.simulate import StageCost, bound_s
from outsize.schedules.builders import build
from outsize.schedules.lower import lower

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from harness import launched, saved, spread

HERE = Path(__file__).parent


def measure(microbatches: int, schedule: str, extra: list[str]) -> dict[str, Any]:
    """One launch of two processes."""
    asked = ("--microbatches", str(microbatches), "--schedule", schedule, *extra)
    found = launched(HERE / "worker.py", 2, *asked)
    return summary(found, microbatches, schedule)


def summary(found: dict[str, Any], microbatches: int, schedule: str) -> dict[str, Any]:
    """Medians with spread, the bound, and the two ratios of the question."""
    compute = found["compute_s"]
    costs = [StageCost(forward_s=compute[f"{s}F"], backward_s=compute[f"{s}B"]) for s in range(2)]
    edges = frozenset({(0, 1)}), frozenset({(1, 0)})
    bound = bound_s(lower(build(schedule, 2, microbatches), *edges), costs)
    ours, theirs = found["steps_s"]["outsize"], found["steps_s"]["torch"]
    return {
        "schedule": schedule,
        "microbatches": microbatches,
        "outsize_s": spread(ours),
        "torch_s": spread(theirs),
        "bound_s": bound,
        "outsize_over_bound": statistics.median(ours) / bound,
        "torch_over_outsize": statistics.median(theirs) / statistics.median(ours),
        "compute_s": compute,
    }


def main() -> None:
    """All cases, as a table and as JSON under results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cases", default="1f1b:4,1f1b:8,gpipe:4,gpipe:8")
    options, extra = parser.parse_known_args()
    cases = [case.split(":") for case in options.cases.split(",")]
    rows = [measure(int(m), schedule, extra) for schedule, m in cases]
    result = saved(Path(__file__), {"rows": rows})
    print(json.dumps(result) if options.json else table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """The same for people."""
    lines = ["schedule  m   outsize ms  torch ms  bound ms  outsize/bound  torch/outsize"]
    for row in rows:
        ours, theirs = row["outsize_s"]["median"] * 1e3, row["torch_s"]["median"] * 1e3
        lines.append(
            f"{row['schedule']:8s} {row['microbatches']:2d}  {ours:10.1f} {theirs:9.1f}"
            f" {row['bound_s'] * 1e3:9.1f}"
            f"  {row['outsize_over_bound']:13.3f}  {row['torch_over_outsize']:13.3f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
