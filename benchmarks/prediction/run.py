"""Question: does the planner's step, made from measured units and links, take as long as the real one?

Two processes, one thread and one core each. In turns (A B A B): the units of the whole model are timed, and
the plan made from the first of these timings is run. Compared are the step, and for each stage its forward
and backward per microbatch. With --beside the first process alone times the units, beside a neighbour that it
forks, as `measured=True` does; with --alone nothing runs beside it.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from harness import launched

HERE = Path(__file__).parent
CASES = ("resnet50-24x96x96", "resnet50-64x128x128", "gpt2-8-layers", "unet", "gpt2-124M")
HOWS = ("cpu-clock", "alone", "beside")


def measure(case: str, extra: list[str]) -> dict[str, Any]:
    """One launch of two processes."""
    return summary(case, launched(HERE / "worker.py", 2, "--case", case, *extra))


def summary(case: str, found: dict[str, Any]) -> dict[str, Any]:
    """Predicted against real; errors are predicted / real - 1."""
    first, pooled = found["predicted"]
    return {
        "case": case,
        "schedule": found["plan"]["schedule"],
        "microbatches": found["plan"]["microbatches"],
        "units": [stage["units"] for stage in pooled["stages"]],
        "link": found["cluster"]["inner"],
        "step": compared(pooled["step_s"], found["steps_s"]),
        "step_error_before_the_run": first["step_s"] / statistics.median(found["steps_s"]) - 1,
        "stages": [stage_of(n, stage, found["spans_s"]) for n, stage in enumerate(pooled["stages"])],
        "profile_step_s": found["profile_step_s"],
    }


def stage_of(number: int, stage: dict[str, Any], spans: dict[str, list[float]]) -> dict[str, Any]:
    """Forward, backward and both, per microbatch."""
    forward, backward = spans[f"{number}F"], backwards(number, spans)
    both = stage["forward_s"] + stage["backward_s"]
    real = statistics.median(forward) + statistics.median(backward)
    return {
        "forward": compared(stage["forward_s"], forward),
        "backward": compared(stage["backward_s"], backward),
        "error": both / real - 1,
    }


def backwards(number: int, spans: dict[str, list[float]]) -> list[float]:
    """Seconds of a stage's backwards; of those in two halves both."""
    halves = zip(*(spans.get(f"{number}{kind}", []) for kind in "IW"), strict=True)
    return [*spans.get(f"{number}B", []), *map(sum, halves)]


def compared(predicted_s: float, laps: list[float]) -> dict[str, float]:
    """Median and quartiles of the laps, and the prediction's error."""
    low, median, high = statistics.quantiles(laps, n=4, method="inclusive")
    error = predicted_s / median - 1
    return {"predicted_s": predicted_s, "real_s": median, "q1": low, "q3": high, "error": error}


def main() -> None:
    """All cases, as a table and as JSON under results/."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cases", default=",".join(CASES))
    options, extra = parser.parse_known_args()
    machine = f"{platform.machine()}-{platform.system().lower()}"
    result: dict[str, Any] = {"date": str(datetime.date.today()), "machine": machine, "options": extra}
    result["rows"] = rows = []
    how = "".join(f"_{name}" for name in HOWS if f"--{name}" in extra)
    path = HERE / "results" / f"{result['date']}_{machine}{how}.json"
    path.parent.mkdir(exist_ok=True)
    for case in options.cases.split(","):
        rows.append(measure(case, extra) | {"load": os.getloadavg()[0]})
        path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if options.json else table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """The same for people: milliseconds, and errors in percent."""
    lines = [
        "case                 m  cut       step ms   predicted  error   stages' errors (forward, backward)"
    ]
    for row in rows:
        step = row["step"]
        parts = [
            f"{stage['error']:+.1%} ({stage['forward']['error']:+.1%}, {stage['backward']['error']:+.1%})"
            for stage in row["stages"]
        ]
        cut = "+".join(map(str, row["units"]))
        lines.append(
            f"{row['case']:20s} {row['microbatches']:2d}  {cut:8s} {step['real_s'] * 1e3:8.1f}"
            f"  {step['predicted_s'] * 1e3:9.1f} {step['error']:+6.1%}   {'  '.join(parts)}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
