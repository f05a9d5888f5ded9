"""Draws calibration.svg: predicted against published seconds of a step, each row of the benchmark a point.

    python docs/img/calibration.py            # from the newest benchmarks/foresight/results/*.json
    python docs/img/calibration.py FILE.json

Both axes are logarithmic. On the line a step takes as long as predicted; the band is 10 % each way.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from outsize.report.palette import STAGES

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "foresight" / "results"
KINDS = {"single node": "o", "multi node": "s", "large": "^", "well-known run": "*"}


def main() -> None:
    """Read, draw, write."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "calibration", "svg.fonttype": "none", "font.size": 10})
    import matplotlib.pyplot as plt

    path = Path(sys.argv[1]) if len(sys.argv) > 1 else sorted(RESULTS.glob("*linux.json"))[-1]
    points = points_of(json.loads(path.read_text(encoding="utf-8")))
    seconds = [value for row in points for value in row[1:]]
    ends = [min(seconds) / 1.3, max(seconds) * 1.3]
    figure, axes = plt.subplots(figsize=(6.4, 6))
    axes.fill_between(
        ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="0.88", lw=0, label="10 %"
    )
    axes.plot(ends, ends, color="0.35", lw=1)
    for number, (kind, marker) in enumerate(KINDS.items()):
        of_kind = [row for row in points if row[0] == kind]
        axes.scatter(
            [row[1] for row in of_kind],
            [row[2] for row in of_kind],
            marker=marker,
            s=70 if marker == "*" else 16,
            color=STAGES[number],
            edgecolors="black" if marker == "*" else "none",
            linewidths=0.6,
            alpha=0.9 if marker in "*^s" else 0.6,
            label=f"{kind} ({len(of_kind)})",
        )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    axes.set(xlabel="published seconds of a step", ylabel="predicted seconds of a step")
    axes.grid(visible=True, which="major", color="0.9")
    axes.legend(frameon=False, loc="upper left")
    figure.tight_layout()
    figure.savefig(HERE / "calibration.svg", metadata={"Date": None})


def points_of(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(kind, published, predicted) of every row that has both."""
    rows = [
        (row["kind"], row["measured_s"], row["predicted_s"])
        for row in found["steps"]["rows"]
        if "predicted_s" in row
    ]
    known = [
        ("well-known run", row["published_s"], row["step_s"])
        for row in found["published"]["rows"]
        if "published_s" in row
    ]
    return rows + known


if __name__ == "__main__":
    main()
