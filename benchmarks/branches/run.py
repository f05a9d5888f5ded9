"""Question: how much faster is a late fusion when its branches run at the same time, on two processes?

The naive split (tower a, then tower b and the classifier), the runs of the model's order under 1f1b, and the
default plan; and whether the classifier is faster where the simulator says.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from harness import launched, saved, spread

HERE = Path(__file__).parent
TARGET = 0.6


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Medians with quartiles, ratios to the naive split, and where the classifier was faster."""
    for way in found["ways"]:
        way["step_s"] = spread(way.pop("laps_s"))
    naive = found["ways"][0]
    for way in found["ways"]:
        way["of_naive"] = way["step_s"]["median"] / naive["step_s"]["median"]
        way["predicted_of_naive"] = way["predicted_s"] / naive["predicted_s"]
    heads = [way for way in found["ways"] if way["way"].startswith("classifier")]
    best = {
        key: min(heads, key=get)["way"] for key, get in (("predicted", _predicted), ("measured", _measured))
    }
    return {**found, "classifier": best}


def _predicted(way: dict[str, Any]) -> float:
    return way["predicted_s"]


def _measured(way: dict[str, Any]) -> float:
    return way["step_s"]["median"]


def table(result: dict[str, Any]) -> str:
    """For people."""
    lines: list[str] = []
    for name, found in result["models"].items():
        lines += [
            name,
            "  way                                      m  step ms (quartiles)   of naive  predicted",
        ]
        for way in found["ways"]:
            step = way["step_s"]
            lines.append(
                f"  {way['way']:38s} {way['microbatches']:3d}  {step['median'] * 1e3:7.0f} "
                f"({step['q1'] * 1e3:.0f}-{step['q3'] * 1e3:.0f})".ljust(68)
                + f"{way['of_naive']:7.2f} {way['predicted_of_naive']:10.2f}"
            )
        lines.append(f"  faster: {found['classifier']}")
    return "\n".join([*lines, f"load {result['load']:.1f}, target {TARGET} of naive with one microbatch"])


def main() -> None:
    """As a table and as JSON under results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tag", default="", help="suffix of the result's name")
    options, extra = parser.parse_known_args()
    models = {name: judged(found) for name, found in launched(HERE / "worker.py", 2, *extra).items()}
    result = saved(Path(__file__), {"target": TARGET, "models": models}, options.tag)
    print(json.dumps(result) if options.json else table(result))


if __name__ == "__main__":
    main()
