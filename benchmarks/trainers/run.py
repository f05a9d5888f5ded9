"""Question: which trainers have one process's numbers over two, how fast, and in what memory?

    python benchmarks/trainers/run.py                          # all; an idle machine of two cores
    python benchmarks/trainers/run.py --only SFT/pp2 DPO       # some
    python benchmarks/trainers/run.py --table                  # docs/fine-tuning.md from the results

For each trainer the plain one in one process and each layout over two take turns, A B C A B C, a thread for
each process; seconds are medians of warm updates. Results of a trainer are in a file of `results`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))
from harness import with_table

HERE: Final = Path(__file__).parent
RESULTS: Final = HERE / "results"
PAGE: Final = HERE.parents[1] / "docs" / "fine-tuning.md"
BEGIN: Final = "| trainer | layout | numbers |"
TURNS: Final = 2
OUTSIZE: Final = "import sys; sys.argv[0] = 'outsize'; from outsize.cli import main; main()"
PACKAGES: Final = {
    "sentence-transformers": ("sentence-transformers", "transformers", "torch"),
    "diffusers": ("diffusers", "accelerate", "torch"),
}


CASES: Final = (
    *("SFT", "SFT LoRA", "DPO", "DPO LoRA", "Reward", "KTO", "GRPO", "RLOO"),
    *("sentence-transformers", "diffusers"),
)
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "pp2": {"stages": 2},
    "dp_replicate2": {"stages": 1, "axes": {"dp_replicate": 2}},
    "dp_shard2": {"stages": 1, "axes": {"dp_shard": 2}},
}


@dataclass(frozen=True)
class Launched:
    """What the ranks of one run have written; `error` is what a failed one has said last."""

    folder: Path
    ranks: list[dict[str, Any]]
    error: str = ""

    @property
    def seconds(self) -> list[float]:
        """Of warm updates: those of the slowest rank."""
        return [max(each) for each in zip(*(rank["seconds"] for rank in self.ranks), strict=True)]


def launched(case: str, split: dict[str, Any] | None, updates: int, folder: Path) -> Launched:
    """Runs a trainer in one process, or split over two."""
    own = [str(HERE / "worker.py"), case, str(folder), str(updates), json.dumps(split)]
    command = [sys.executable, *own]
    if split is not None:
        command = [sys.executable, "-c", OUTSIZE, "run", "--nproc-per-node", "2", *own]
    folder.mkdir(parents=True)
    command = ["env", "OMP_NUM_THREADS=1", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if "[E" in line] or done.stderr.splitlines()[-1:]
        return Launched(folder, [], told[-1].partition("]: ")[2] or told[-1])
    count = 1 if split is None else 2
    return Launched(folder, [json.loads((folder / f"rank{n}.json").read_text()) for n in range(count)])


def difference(plain: Launched, split: Launched) -> float:
    """Returns 0 for equal logs on every rank and equal weights, else how far weights are apart, relative to
    each one's largest element; numbers of logs that differ count in the same way.
    """
    import torch

    one, other = (torch.load(each.folder / "weights.pt", weights_only=True) for each in (plain, split))
    one, other = ({k.removeprefix("model."): v for k, v in each.items()} for each in (one, other))
    far = max(float((other[n] - w).abs().max() / w.abs().max().clamp_min(1e-30)) for n, w in one.items())
    for rank in split.ranks:
        for log, found in zip(plain.ranks[0]["logs"], rank["logs"], strict=True):
            pairs = [(value, found.get(name, float("inf"))) for name, value in log.items()]
            far = max([far, *(abs(a - b) / max(abs(a), 1e-3) for a, b in pairs if a != b)])
    return far


def cell(plain: Sequence[Launched], split: Sequence[Launched]) -> dict[str, Any]:
    """Returns the figures of one layout."""
    failed = next((each.error for each in split if each.error), "")
    if failed:
        return {"numbers": f"refused: {failed}"}
    far = difference(plain[0], split[0])
    one, two = (median(s for each in runs for s in each.seconds) for runs in (plain, split))
    ranks = split[0].ranks
    every = [rank for each in split for rank in each.ranks]
    ratios = [rank["peak_bytes"] / rank["planned_bytes"] for rank in every if rank["planned_bytes"]]
    return {
        "numbers": "equal" if far == 0 else f"within {far:.0e}",
        "form": ranks[0]["form"],
        "stages": ranks[0]["stages"],
        "together": ranks[0]["together"],
        "plain_s": round(one, 4),
        "split_s": round(two, 4),
        "peak_bytes": [rank["peak_bytes"] for rank in ranks],
        "planned_bytes": [rank["planned_bytes"] for rank in ranks],
        "memory": round(max(ratios), 3) if ratios else None,  # None: a plan that was not priced
        "plain_peak_bytes": plain[0].ranks[0]["peak_bytes"],
    }


def measure(case: str, layouts: Sequence[str], updates: int) -> dict[str, Any]:
    """Returns the figures of one trainer; its runs take turns."""
    runs: dict[str | None, list[Launched]] = {None: [], **{name: [] for name in layouts}}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(TURNS):
            for name, found in runs.items():
                split = None if name is None else LAYOUTS[name]
                found.append(launched(case, split, updates, Path(folder) / f"{name}{turn}"))
        if runs[None][0].error:
            raise RuntimeError(f"{case} fails plain: {runs[None][0].error}")
        cells = {name: cell(runs[None], runs[name]) for name in layouts}
    packages = PACKAGES.get(case, ("trl", "transformers", "torch"))
    return {
        "case": case,
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[1], 1),
        "versions": {name: version(name) for name in packages},
        "updates": updates,
        "cells": cells,
    }


def write(found: dict[str, Any]) -> None:
    """Writes the cells of one trainer beside those that are there."""
    file = RESULTS / f"{found['case'].lower().replace(' ', '-')}.json"
    before = json.loads(file.read_text())["cells"] if file.exists() else {}
    file.write_text(json.dumps(found | {"cells": before | found["cells"]}, indent=1) + "\n")


def table() -> list[str]:
    """Returns the lines of the table, from the results."""
    lines = [
        f"{BEGIN} batches in one pipeline | seconds of an update: one process, two | ratio | memory / plan |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    files = {json.loads(path.read_text())["case"]: path for path in RESULTS.glob("*.json")}
    for case in (name for name in CASES if name in files):
        document = json.loads(files[case].read_text())
        kind = case if case in PACKAGES else f"TRL {case}"
        for layout in (name for name in LAYOUTS if name in document["cells"]):
            lines.append(f"| {kind} | {layout} | {_figures(document['cells'][layout])} |")
    return lines


def _figures(found: dict[str, Any]) -> str:
    if found["numbers"].startswith("refused"):
        return f"{found['numbers']} | | | |"
    overlaps = found["together"] if found["form"] == "tape" else "none, by modules"
    pipeline = overlaps if found["stages"] > 1 else "ranks side by side"
    one, two = found["plain_s"], found["split_s"]
    memory = "not planned" if found["memory"] is None else f"{found['memory']:.2f}"
    return f"{found['numbers']} | {pipeline} | {one:.2f}, {two:.2f} | {two / one:.2f} | {memory}"


def main() -> None:
    """Measures what is asked for, and writes the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=CASES, metavar="CASE[/LAYOUT]")
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--table", action="store_true", help="write the page from the results alone")
    asked = parser.parse_args()
    wanted: dict[str, list[str]] = {}
    for name in asked.only:
        case, _, layout = name.partition("/")
        wanted.setdefault(case, []).extend([layout] if layout else LAYOUTS)
    for case, layouts in ({} if asked.table else wanted).items():
        found = measure(case, layouts, asked.updates)
        write(found)
        print(case, json.dumps(found["cells"]), flush=True)
    PAGE.write_text(with_table(PAGE.read_text(), BEGIN, table()))


if __name__ == "__main__":
    main()
