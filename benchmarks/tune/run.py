"""Question: is the tuned plan within 3 % of the best of a sweep over all points, after at most five steps?"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from harness import launched, saved

HERE = Path(__file__).parent
TARGETS = {"over_best": 1.03, "real_steps": 5}


def measure(case: str, extra: list[str]) -> dict[str, Any]:
    """One launch of two processes."""
    found = launched(HERE.parent / "tutorial" / "sweep.py", 2, "--case", case, *extra)
    finals = {name: statistics.median(laps) for name, laps in found["finals_s"].items()}
    best = min((name for name in finals if name != "tuned"), key=lambda name: finals[name])
    return {
        "case": case,
        "over_best": finals["tuned"] / finals[best],
        "real_steps": len(found["tuned"]["trials"]),
        "points": len(found["sweep"]),
        "finals_median_s": finals,
        **found,
    }


def main() -> None:
    """The cases, as a table and as JSON under results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cases", default="resnet18-32x64x64,gpt2-4-layers")
    parser.add_argument("--tag", default="", help="suffix of the result's name")
    options, extra = parser.parse_known_args()
    rows = [measure(case, extra) for case in options.cases.split(",")]
    result = saved(
        Path(__file__),
        {
            "targets": TARGETS,
            "rows": rows,
        },
        options.tag,
    )
    print(json.dumps(result) if options.json else table(result))


def table(result: dict[str, Any]) -> str:
    """The same for people."""
    lines = ["case                 points  real steps  tuned ms  best ms  tuned/best"]
    for row in result["rows"]:
        finals = row["finals_median_s"]
        tuned, best = finals["tuned"] * 1e3, min(s for n, s in finals.items() if n != "tuned") * 1e3
        lines.append(
            f"{row['case']:20s} {row['points']:6d}  {row['real_steps']:10d}  {tuned:8.0f}  {best:7.0f}"
            f"  {row['over_best']:10.3f}"
        )
    return "\n".join([*lines, f"load {result['load']:.1f}"])


if __name__ == "__main__":
    main()
