"""Question: what does a step without padding gain on sequences of several lengths, in the same pipeline?

python benchmarks/varlen/run.py                  two pinned processes, about two minutes
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from harness import launched

HERE = Path(__file__).parent
TARGET = 1.7


def measured(rounds: int) -> dict[str, Any]:
    """One launch of two processes."""
    return launched(HERE / "worker.py", 2, "--rounds", str(rounds))


def rates(found: dict[str, Any]) -> dict[str, list[float]]:
    """Real tokens per second: of each round over the set, by arm."""
    tokens, steps = sum(found["tokens"]), len(found["tokens"])
    return {
        arm: [tokens / sum(times[n : n + steps]) for n in range(0, len(times), steps)]
        for arm, times in found["times_s"].items()
    }


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Rates, the gain over each way to pad round by round, and how far the losses are apart."""
    by_arm = rates(found)
    ours = by_arm["as it is"]
    others = {arm: rate for arm, rate in by_arm.items() if arm != "as it is"}
    gains = {arm: [a / b for a, b in zip(ours, rate, strict=True)] for arm, rate in others.items()}
    pairs = [zip(found["losses"]["as it is"], found["losses"][arm], strict=True) for arm in others]
    return {
        "tokens_per_s": {arm: _spread(rate) for arm, rate in by_arm.items()},
        "gain": {arm: _spread(gain) for arm, gain in gains.items()},
        "most_that_padding_wastes": 1 / found["mean_over_max"],
        "loss_difference": max(abs(a - b) for pair in pairs for a, b in pair),
        "target": TARGET,
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dry", action="store_true", help="write no file")
    asked = parser.parse_args()
    found = measured(asked.rounds)
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        **summary(found),
        "measured": found,
    }
    for arm, rate in result["tokens_per_s"].items():
        print(f"{arm:<30} {rate['median']:8.0f} tokens/s ({rate['least']:.0f} to {rate['most']:.0f})")
    for arm, gain in result["gain"].items():
        print(f"gain over {arm:<20} {gain['median']:.2f}x ({gain['least']:.2f} to {gain['most']:.2f})")
    print(f"mean/max {found['mean_over_max']:.3f}, loss differs by {result['loss_difference']:.1e}")
    if not asked.dry:
        name = f"{datetime.date.today().isoformat()}_{platform.machine()}.json"
        (HERE / "results" / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
