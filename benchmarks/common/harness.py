"""What the benchmarks have in common: workers are launched, medians have a spread, results are files.

A script puts this folder on its path before it imports the module, as scripts have no package.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_LAUNCHER = (
    "import sys; from outsize.ops.launch.launch import run_script; "
    "sys.exit(run_script(sys.argv[2:], int(sys.argv[1])))"
)


def launched(worker: Path, processes: int, *options: str) -> Any:
    """Runs a script in so many processes, without a launcher in one, and returns the JSON that it writes to
    the file of its option `--out`. Raises CalledProcessError where it fails.
    """
    launcher = ["-c", _LAUNCHER, str(processes)] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, *launcher, str(worker), "--out", str(out), *options]
        subprocess.run(command, check=True)
        return json.loads(out.read_text())


def spread(laps: Sequence[float]) -> dict[str, float]:
    """Returns the median, the quartiles and the best of at least two figures, and how many there are."""
    low, median, high = statistics.quantiles(laps, n=4)
    return {"median": median, "q1": low, "q3": high, "best": min(laps), "laps": len(laps)}


def saved(script: Path, figures: dict[str, Any], tag: str = "") -> dict[str, Any]:
    """Writes figures to results/DATE_MACHINE[TAG].json beside the script, headed by date, machine and load,
    and returns them with the heading. A file of the same day gets the new figures.
    """
    machine = f"{platform.machine()}-{platform.system().lower()}"
    head = {"date": str(datetime.date.today()), "machine": machine, "load": os.getloadavg()[0]}
    path = script.parent / "results" / f"{head['date']}_{machine}{tag}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(head | figures, indent=1) + "\n")
    return head | figures


def with_table(page: str, begin: str, table: Sequence[str]) -> str:
    """Returns the page with a table in the place of the one whose first line begins with `begin`."""
    lines = page.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(begin))
    end = next(at for at in range(start, len(lines)) if not lines[at].startswith("|"))
    return "\n".join([*lines[:start], *table, *lines[end:]]) + "\n"
