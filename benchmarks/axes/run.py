"""Question: which axis when: what do two devices cost and save along each axis, on the same model?

python benchmarks/axes/run.py                    two pinned processes, about three minutes
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
_OUTSIZE = "import sys; from outsize.cli import main; sys.exit(main())"


def measured(rounds: int) -> dict[str, Any]:
    """One launch of two processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-c", _OUTSIZE, "run", "--nproc-per-node", "2", str(HERE / "worker.py")]
        subprocess.run([*command, "--out", str(out), "--rounds", str(rounds)], check=True)
        return json.loads(out.read_text())


def rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    """By axis: seconds of a step, speed-up over one process round by round, the fuller rank's peak."""
    alone = found["times_s"]["one process"]
    return [
        {
            "axis": name,
            "step_s": statistics.median(times),
            "speedup": _spread([a / b for a, b in zip(alone, times, strict=True)]),
            "peak_bytes": max(found["peak_bytes"][name]),
            "loss_difference": abs(found["losses"][name] - found["losses"]["one process"]),
        }
        for name, times in found["times_s"].items()
    ]


def _spread(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "low": low, "high": high}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dry", action="store_true", help="write no file")
    asked = parser.parse_args()
    found = measured(asked.rounds)
    table = rows(found)
    print(f"{'axis':<20}{'step':>9}{'speed-up':>10}{'quartiles':>14}{'peak':>10}{'loss differs':>14}")
    for row in table:
        ups = row["speedup"]
        spread = f"{ups['low']:.2f}-{ups['high']:.2f}"
        print(
            f"{row['axis']:<20}{row['step_s'] * 1e3:>6.0f} ms{ups['median']:>10.2f}{spread:>14}"
            f"{row['peak_bytes'] / 2**20:>6.0f} MiB{row['loss_difference']:>14.1e}"
        )
    if not asked.dry:
        write({"axes": table, "measured": found})


def write(result: dict[str, Any]) -> None:
    """results/<date>_<machine>.json"""
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    head = {
        "date": now.isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }
    path = folder / f"{now:%Y-%m-%d}_{platform.machine()}-{platform.system().lower()}.json"
    path.write_text(json.dumps(head | result, indent=2) + "\n")


if __name__ == "__main__":
    main()
