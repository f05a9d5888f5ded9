"""Question: how much faster are zero-bubble schedules on four processes, and what do they hold?

Four processes whose layers wait as long as the blocks of a measured network; see README.md.
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
TARGETS = {"1f1b": 1.25, "interleaved": 1.10}


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Medians with quartiles, and how much faster each schedule is than the two of the targets."""
    for row in found["schedules"]:
        row["step_s"] = spread(row.pop("laps_s"))
    by_name = {row["schedule"]: row for row in found["schedules"]}
    for row in found["schedules"]:
        row["faster_than"] = {
            name: by_name[name]["step_s"]["median"] / row["step_s"]["median"] for name in TARGETS
        }
        row["predicted_faster_than"] = {
            name: by_name[name]["predicted_s"] / row["predicted_s"] for name in TARGETS
        }
    return found


def table(result: dict[str, Any]) -> str:
    """For people."""
    head = f"  {'schedule':22s}step ms (quartiles)  predicted   vs 1f1b    vs interleaved   MB (account)"
    lines: list[str] = []
    for name, found in result["networks"].items():
        lines += [name, head]
        for row in found["schedules"]:
            step, faster, foreseen = row["step_s"], row["faster_than"], row["predicted_faster_than"]
            lines.append(
                f"  {row['schedule']:21s} {step['median'] * 1e3:5.0f} "
                f"({step['q1'] * 1e3:.0f}-{step['q3'] * 1e3:.0f})".ljust(43)
                + f"{row['predicted_s'] * 1e3:8.0f} {faster['1f1b']:9.2f} ({foreseen['1f1b']:.2f})"
                + f" {faster['interleaved']:8.2f} ({foreseen['interleaved']:.2f})"
                + f" {max(row['held_bytes']) / 1e6:8.2f} ({max(row['account_bytes']) / 1e6:.2f})"
            )
    return "\n".join([*lines, f"load {result['load']:.1f}; targets {TARGETS}"])


def main() -> None:
    """As a table and as JSON under results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tag", default="", help="suffix of the result's name")
    options, extra = parser.parse_known_args()
    networks = {name: judged(found) for name, found in launched(HERE / "worker.py", 4, *extra).items()}
    result = saved(Path(__file__), {"targets": TARGETS, "networks": networks}, options.tag)
    print(json.dumps(result) if options.json else table(result))


if __name__ == "__main__":
    main()
