"""Question: how close is a step to the bound of its schedule, at every number of microbatches?

Two processes by the clock, four processes on two cores by CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from outsize.planner.simulation.simulate import StageCost, bound_s
from outsize.schedules.builders import build
from outsize.schedules.lower import lower

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from harness import launched, saved, spread

HERE = Path(__file__).parent
TARGET = {2: 0.97, 4: 0.95}
TWO = ",".join(f"{schedule}:{m}" for schedule in ("gpipe", "1f1b") for m in (2, 4, 8, 16, 32))
FOUR = "1f1b:8,1f1b:16"


def measure(processes: int, cases: str, extra: list[str]) -> dict[str, Any]:
    """One launch."""
    return launched(HERE / "worker.py", processes, "--cases", cases, *extra)


def bound_of(schedule: Any, microbatches: int, costs: list[StageCost]) -> float:
    """Seconds of a step in which messages cost nothing."""
    pairs = [(s, s + 1) for s in range(len(costs) - 1)]
    lowered = lower(
        build(schedule, len(costs), microbatches), frozenset(pairs), frozenset((b, a) for a, b in pairs)
    )
    return bound_s(lowered, costs)


def by_the_clock(extra: list[str]) -> list[dict[str, Any]]:
    """Two processes: bound over step."""
    found = measure(2, TWO, extra)
    bare = [StageCost(forward_s=f, backward_s=b) for f, b, _ in found["stages"]]
    rows = []
    for case in found["rows"]:
        schedule, m, spans = case["schedule"], case["microbatches"], case["spans_s"]
        costs = [StageCost(forward_s=spans[f"{s}F"], backward_s=spans[f"{s}B"]) for s in range(2)]
        step, bound, strict = (
            spread(case["wall_s"]),
            bound_of(schedule, m, costs),
            bound_of(schedule, m, bare),
        )
        rows.append(
            {
                "processes": 2,
                "width": 256,
                "schedule": schedule,
                "microbatches": m,
                "step_s": step,
                "bound_s": bound,
                "bound_of_bare_stages_s": strict,
                "efficiency": bound / step["median"],
                "efficiency_of_bare_stages": strict / step["median"],
                "spans_s": spans,
                "bare_s": found["stages"],
            }
        )
    return rows


def by_cpu_seconds(tokens: int, width: int, extra: list[str]) -> list[dict[str, Any]]:
    """Four processes: CPU seconds of the bare stages over those of the step."""
    found = measure(4, FOUR, ["--tokens", str(tokens), "--width", str(width), *extra])
    each = sum(cpu for _, _, cpu in found["stages"])
    rows = []
    for case in found["rows"]:
        step, bound = spread(case["cpu_s"]), case["microbatches"] * each
        rows.append(
            {
                "processes": 4,
                "width": width,
                "schedule": case["schedule"],
                "microbatches": case["microbatches"],
                "step_s": step,
                "bound_s": bound,
                "efficiency": bound / step["median"],
                "bare_s": found["stages"],
            }
        )
    return rows


def main() -> None:
    """All cases, as a table and as JSON under results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tag", default="", help="suffix of the result's name")
    options, extra = parser.parse_known_args()
    rows = by_the_clock(extra) + by_cpu_seconds(256, 256, extra) + by_cpu_seconds(128, 512, extra)
    result = saved(
        Path(__file__),
        {
            "real_time": os.sched_getscheduler(0) == os.SCHED_FIFO,
            "targets": TARGET,
            "rows": rows,
        },
        options.tag,
    )
    print(json.dumps(result) if options.json else table(result))


def table(result: dict[str, Any]) -> str:
    """The same for people."""
    lines = ["processes  width  schedule   m   step ms  bound ms  bound/step  best step  of bare stages"]
    for r in result["rows"]:
        strict, step, bound = r.get("efficiency_of_bare_stages"), r["step_s"]["median"], r["bound_s"]
        lines.append(
            f"{r['processes']:9d}  {r['width']:5d}  {r['schedule']:8s}  {r['microbatches']:2d}"
            f"  {step * 1e3:8.1f}  {bound * 1e3:8.1f}  {r['efficiency']:10.3f}"
            f"  {bound / r['step_s']['best']:9.3f}  {'' if strict is None else f'{strict:.3f}'}"
        )
    return "\n".join([*lines, f"load {result['load']:.1f}"])


if __name__ == "__main__":
    main()
