"""Question: what does a (stage, microbatch) cost beyond its arithmetic and its bytes on the wire?

Tiny stages in two processes (outsize and torch.distributed.pipelining in one launch, A B A B) and in one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from harness import launched, saved

HERE = Path(__file__).parent
TARGET_US = {2: 200.0, 1: 60.0}


def measure(processes: int, microbatches: int, extra: list[str]) -> dict[str, list[float]]:
    """One launch; seconds of every lap by system."""
    return launched(HERE / "worker.py", processes, "--microbatches", str(microbatches), *extra)


def two_processes(microbatches: int, extra: list[str]) -> list[dict[str, Any]]:
    """A row per system: its overhead, and what was subtracted."""
    laps = measure(2, microbatches, extra)
    bare, wire = (statistics.median(laps.pop(name)) / microbatches for name in ("bare", "wire"))
    turns = microbatches + 1
    rows = [row(name, seconds, turns * (bare + wire), microbatches) for name, seconds in laps.items()]
    found = {"processes": 2, "bare_us": bare * 1e6, "wire_us": wire * 1e6}
    return [
        {**r, **found, "beyond_bare_us": (r["step_us"] - turns * bare * 1e6) / microbatches} for r in rows
    ]


def one_process(microbatches: int, extra: list[str]) -> list[dict[str, Any]]:
    """The same for stages that take turns in one process."""
    laps = measure(1, microbatches, extra)
    plain = statistics.median(laps.pop("plain"))
    rows = [row(name, s, plain, microbatches * int(name.split()[1])) for name, s in laps.items()]
    found = {"processes": 1, "bare_us": plain / microbatches * 1e6, "wire_us": 0.0}
    return [{**r, **found, "beyond_bare_us": r["overhead_us"]["median"]} for r in rows]


def row(name: str, laps: list[float], ideal_s: float, shares: int) -> dict[str, Any]:
    """Overhead per (stage, microbatch) at the quartiles of the step, in microseconds."""
    low, median, high = ((s - ideal_s) / shares * 1e6 for s in statistics.quantiles(laps, n=4))
    best = (min(laps) - ideal_s) / shares * 1e6
    step = statistics.median(laps)
    return {
        "system": name,
        "step_us": step * 1e6,
        "overhead_us": {"median": median, "q1": low, "q3": high, "best": best, "laps": len(laps)},
    }


def main() -> None:
    """All systems, as a table and as JSON under results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--tag", default="", help="suffix of the result's name")
    options, extra = parser.parse_known_args()
    rows = two_processes(options.microbatches, extra) + one_process(options.microbatches, extra)
    result = saved(
        Path(__file__),
        {
            "microbatches": options.microbatches,
            "real_time": os.sched_getscheduler(0) == os.SCHED_FIFO,
            "targets_us": TARGET_US,
            "rows": rows,
        },
        options.tag,
    )
    print(json.dumps(result) if options.json else table(result))


def table(result: dict[str, Any]) -> str:
    """The same for people."""
    lines = [
        "processes  system             step us  bare us  wire us  beyond bare us  overhead us  (quartiles)"
    ]
    for r in result["rows"]:
        over = r["overhead_us"]
        lines.append(
            f"{r['processes']:9d}  {r['system']:16s}  {r['step_us']:8.0f}"
            f" {r['bare_us']:8.0f} {r['wire_us']:8.0f}  {r['beyond_bare_us']:14.0f}  {over['median']:11.0f}"
            f"  ({over['q1']:.0f} to {over['q3']:.0f})"
        )
    return "\n".join([*lines, f"load {result['load']:.1f}"])


if __name__ == "__main__":
    main()
