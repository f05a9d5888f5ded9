"""Question: is any axis slower than torch's own parallelism along it, and how far is each from its bound?

    python benchmarks/peers/run.py                                    # all; an idle machine of two cores
    python benchmarks/peers/run.py --only replicas/llama pipeline     # some
    python benchmarks/peers/run.py --before DIRECTORY                 # beside another checkout of outsize
    python benchmarks/peers/run.py --table                            # docs/speed.md from the results alone

README.md says what is compared. Each row is one launch of two pinned processes, in which outsize, the peer
and the computing alone take a step in turn; with `--before` a second launch has the other checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from harness import with_table

HERE: Final = Path(__file__).parent
RESULTS: Final = HERE / "results"
PAGE: Final = HERE.parents[1] / "docs" / "speed.md"
BEGIN: Final = "| axis | model | samples |"
OUTSIZE: Final = "import sys; sys.argv[0] = 'outsize'; from outsize.cli import main; main()"
SHARES: Final = (0.05, 0.3, 0.6)
COUNTS: Final = (4.0, 8.0)
ALL: Final = ("llama", "gpt2", "resnet50", "vit")
MODELS: Final = {
    "replicas": ALL,
    "shards": ALL,
    "tensor": ("llama",),
    "pipeline": ("llama",),
    "one process": ALL,
}
POINTS: Final = dict.fromkeys(("replicas", "shards", "tensor"), SHARES) | dict.fromkeys(
    ("pipeline", "one process"), COUNTS
)
"""Shares of communication in the peer's step, or numbers of microbatches."""


def launched(axis: str, model: str, point: float, rounds: int, source: Path) -> dict[str, Any]:
    """One launch of two processes with this source of outsize."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        own = [str(HERE / "worker.py"), axis, model, str(point), str(out), str(rounds)]
        command = [sys.executable, "-c", OUTSIZE, "run", "--nproc-per-node", "2", *own]
        settings = [f"PYTHONPATH={source / 'src'}:{HERE}", "OMP_NUM_THREADS=1"]
        done = subprocess.run(["env", *settings, *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return json.loads(out.read_text())


def row(found: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """The figures of one launch: medians, and ratios round by round with their quartiles."""
    times = found.pop("times_s")
    computing, ours = times.pop("computing", None), times.pop("outsize")
    name = min(times, key=lambda each: statistics.median(times[each]))  # Of torch's schedules the faster one.
    peer_s = statistics.median(times[name])
    result = found | {
        "peer": name,
        "outsize_s": round(statistics.median(ours), 4),
        "peer_s": round(peer_s, 4),
        "ratio": ratios(ours, times[name]),
    }
    if computing is not None:
        computing_s = statistics.median(computing)
        bound_s = round(max(computing_s, found["wire_s"]), 4)
        result |= {"share": round(1 - computing_s / peer_s, 3), "bound_s": bound_s}
    if before is not None:
        old = before["times_s"]
        result["before_ratio"] = ratios(old["outsize"], old[name])
        result["before_samples"] = before["samples"]
    return result


def ratios(ours: list[float], others: list[float]) -> dict[str, float]:
    """Of steps that followed each other."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, others, strict=True)], n=4)
    return {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}


def table() -> list[str]:
    """Returns the lines of the table, from the results."""
    lines = [
        f"{BEGIN} communication in the peer's step | before / peer | outsize / peer (quartiles) | "
        "bound / peer |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    files = {json.loads(path.read_text())["name"]: path for path in RESULTS.glob("*.json")}
    for axis, models in MODELS.items():
        for model in models:
            if f"{axis}/{model}" in files:
                document = json.loads(files[f"{axis}/{model}"].read_text())
                lines += [line_of(found) for found in document["rows"]]
    return lines


def line_of(found: dict[str, Any]) -> str:
    """One row of the table."""
    ratio, before = found["ratio"], found.get("before_ratio")
    spread = f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    old = "" if before is None else f"{before['median']:.2f}"
    is_share = found["point"] < 1
    point = f"{100 * found['share']:.0f} %" if is_share else f"{found['point']:.0f} microbatches"
    bound = f"{found['bound_s'] / found['peer_s']:.2f}" if "bound_s" in found else ""
    cells = [found["axis"], found["model"], str(found["samples"]), point]
    return f"| {' | '.join([*cells, old, spread, bound])} |"


def main() -> None:
    """Measures what is asked for, and writes the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=list(MODELS), metavar="AXIS[/MODEL]")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--points", nargs="+", type=float, help="shares, or numbers of microbatches")
    parser.add_argument("--table", action="store_true", help="write the page from the results alone")
    parser.add_argument("--dry", action="store_true", help="write no file")
    asked = parser.parse_args()
    for name in [] if asked.table else asked.only:
        axis, _, one = name.partition("/")
        for model in [one] if one else MODELS[axis]:
            rows = []
            for point in asked.points or POINTS[axis]:
                found = launched(axis, model, point, asked.rounds, HERE.parents[1])
                old = asked.before and launched(axis, model, point, asked.rounds, asked.before)
                rows.append(row(found, old))
                print(line_of(rows[-1]), flush=True)
            if not asked.dry:
                write(axis, model, [with_known_before(axis, model, each) for each in rows])
    if not asked.dry:
        PAGE.write_text(with_table(PAGE.read_text(), BEGIN, table()))


def with_known_before(axis: str, model: str, found: dict[str, Any]) -> dict[str, Any]:
    """The row, with what an earlier call has found for the other checkout, unless this one has asked."""
    path = path_of(axis, model)
    old = json.loads(path.read_text())["rows"] if path.exists() and "before_ratio" not in found else []
    known = next((each for each in old if each["point"] == found["point"]), {})
    return found | {name: known[name] for name in ("before_ratio", "before_samples") if name in known}


def path_of(axis: str, model: str) -> Path:
    """Where the results of an axis and model are."""
    return RESULTS / f"{axis}-{model}.json".replace(" ", "-")


def write(axis: str, model: str, rows: list[dict[str, Any]]) -> None:
    """One file for each axis and model."""
    RESULTS.mkdir(exist_ok=True)
    head = {
        "name": f"{axis}/{model}",
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[1], 1),
    }
    path_of(axis, model).write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
