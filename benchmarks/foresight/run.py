"""Question: how far is the product from published runs: seconds of a step, the choice of a layout, memory?

    python benchmarks/foresight/run.py               # all; tables, and results/<date>_<machine>.json
    python benchmarks/foresight/run.py --only steps  # step times and choices; also: memory, peaks, ...
    python benchmarks/foresight/run.py --data DIR    # with published_runs.csv, published_memory.csv
    python benchmarks/foresight/run.py --json        # one JSON, with every row
    python benchmarks/foresight/run.py --sample 4    # models of which a hash is a multiple of 4: a sample of
                                                     # step times and memory, and so named in the results

The CSV files are not part of the project (`../shared/data` beside the repository unless --data says where);
without them their parts are skipped with a word. Published runs need no file. Nothing here computes a second
or a byte: every figure is the product's, by capture (README.md).
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peaks
import published
import recent as recent_runs
import recent_peaks
import rows
import step_times

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[2] / "shared" / "data"
PARTS = ("steps", "memory", "published", "recent", "peaks")
FILES = {
    "steps": "published_runs.csv",
    "memory": "published_memory.csv",
    "recent": "published_runs_3.csv",
    "peaks": "published_runs_3.csv",
}
TARGETS = {
    "single node": "8 %, bias 5 %",
    "multi node": "10 %, bias 5 %",
    "large": "10 %, bias 5 %",
    "regret": "mean 1.02, worst 1.15",
    "images": "within 10 % for 80 %",
    "Megatron-LM": "median 3 %, 95 % within 10 %",
    "published": "each within 10 %",
}
Result = dict[str, Any]


def steps(path: Path, sample: int) -> Result:
    """Errors of step times and regrets of choices."""
    found, skipped = rows.read_all(path)
    found = [r for r in found if rows.in_sample(f"{r.shape.layers} {r.shape.hidden}", sample)]
    timed = step_times.timed(found)
    chosen = step_times.choices(timed)
    return {
        "errors": step_times.errors_of(timed),
        "regrets": step_times.regrets_of(chosen),
        "choices": chosen,
        "refused": sum("refused" in row for row in timed),
        "skipped": dict(skipped),
        "rows": timed,
    }


def memory(path: Path, sample: int) -> Result:
    """Errors of peaks."""
    judged, skipped = peaks.judged([r for r in rows.read_rows(path) if rows.in_sample(r["model"], sample)])
    return {"errors": peaks.errors_of(judged), "skipped": dict(skipped), "rows": judged}


def runs(only: str) -> Result:
    """Errors of well-known runs."""
    return {"rows": [published.row_of(run) for run in published.RUNS if only in run.name]}


def recent(path: Path, sample: int) -> Result:
    """Errors of runs of 2024 to 2026 by kind, with the noise of their measurement."""
    found, skipped = recent_runs.read_all(path)
    judged = list(recent_runs.asked_all([q for q in found if rows.in_sample(q.group, sample)]))
    return {
        "errors": recent_runs.errors_of(judged),
        "noise": recent_runs.noise(found),
        "skipped": dict(skipped),
        "rows": judged,
    }


def peaks_of_runs(path: Path, sample: int) -> Result:
    """Errors of the peaks of runs of 2024 to 2026 by source."""
    found, skipped = recent_peaks.read_all(path, sample)
    judged = list(recent_peaks.judged(found))
    return {"errors": recent_peaks.errors_of(judged), "skipped": dict(skipped), "rows": judged}


def table(result: Result) -> str:
    """The same for people."""
    lines = list[str]()
    if "steps" in result:
        lines += _steps_table(result["steps"])
    if "memory" in result:
        lines += _memory_table(result["memory"])
    if "published" in result:
        lines += [
            f"\n{'published run':30s} {'published':>10} {'predicted':>10} {'step':>7}   tokens/s and device"
        ]
        for row in result["published"]["rows"]:
            told = row.get("predicted_tokens_per_s")
            figures = "refused" if told is None else f"{told:10.0f} {row['error']:+7.1%}"
            lines.append(f"{row['name']:30s} {row['published_tokens_per_s']:10.0f} {figures}")
        lines.append(f"target: {TARGETS['published']}")
    if "recent" in result:
        lines += _recent_table(result["recent"])
    if "peaks" in result:
        lines += _peaks_table(result["peaks"])
    return "\n".join(lines)


def _recent_table(found: Result) -> list[str]:
    heads = f"{'rows':>5} {'told':>5} {'mean':>7} {'bias':>7} {'worst':>7} {'of row':>6}  noise"
    lines = [f"\n{'runs of 2024 to 2026':44} {heads}"]
    for name, f in found["errors"].items():
        figures = (
            f"{f['mape']:7.1%} {f['bias']:+7.1%} {f['worst']:+7.1%} {f['worst_row']:>6}"
            if "mape" in f
            else ""
        )
        noise = found["noise"].get(name.rpartition(",")[0])
        told = "" if noise is None else f"  {noise:.1%}"
        lines.append(f"{name:44} {f['rows']:5d} {f['answered']:5d} {figures}{told}")
    refused = Counter((r.get("refused") or r.get("crashed") or "")[:90] for r in found["rows"])
    lines += [f"{count:6}  {reason}" for reason, count in refused.most_common() if reason]
    return [*lines, *_left_out(found["skipped"])]


def _peaks_table(found: Result) -> list[str]:
    heads = f"{'rows':>5} {'told':>5} {'median':>7} {'bias':>7} {'worst':>7} {'of row':>6}  in 8 %   P95"
    lines = [f"\n{'peaks of 2024 to 2026':34} {heads}"]
    for name, f in found["errors"].items():
        figures = (
            f"{f['median']:7.1%} {f['bias']:+7.1%} {f['worst']:+7.1%} {f['worst_row']:>6}"
            f" {f['near']:7.0%} {f['covered']:5.0%}"
            if "median" in f
            else ""
        )
        lines.append(f"{name:34} {f['rows']:5d} {f['answered']:5d} {figures}")
    refused = Counter((r.get("refused") or r.get("crashed") or "")[:90] for r in found["rows"])
    lines += [f"{count:6}  {reason}" for reason, count in refused.most_common() if reason]
    return [*lines, *_left_out(found["skipped"])]


def _steps_table(found: Result) -> list[str]:
    lines = [f"{'step times of':42} {'rows':>5} {'MAPE':>7} {'bias':>7} {'worst':>7}  target"]
    for name, f in found["errors"].items():
        target = TARGETS.get(name.rpartition(",")[0], "")
        lines.append(
            f"{name:42} {f['rows']:5d} {f['mape']:7.1%} {f['bias']:+7.1%} {f['worst']:+7.1%}  {target}"
        )
    lines += [f"\n{'regret of choices':42} {'groups':>6} {'mean':>7} {'worst':>7}  target"]
    for name, f in found["regrets"].items():
        lines.append(f"{name:42} {f['choices']:6d} {f['mean']:7.3f} {f['worst']:7.3f}  {TARGETS['regret']}")
    lines += ["", f"{'choice':84} {'half':>8} {'layouts':>7} {'regret':>6}  chosen, best"]
    for c in found["choices"]:
        words = c["chosen"] if c["regret"] == 1 else f"{c['chosen']}, {c['best']}"
        lines.append(f"{c['group'][:84]:84} {c['half']:>8} {c['layouts']:7d} {c['regret']:6.3f}  {words}")
    return [*lines, f"refused by the product: {found['refused']}", *_left_out(found["skipped"])]


def _memory_table(found: Result) -> list[str]:
    heads = f"{'median':>7} {'95 %':>7} {'bias':>7} {'within 10 %':>12}"
    lines = [f"\n{'peak bytes of':30} {'rows':>5} {heads}  target"]
    for name, f in found["errors"].items():
        target = next(words for kind, words in TARGETS.items() if name.startswith(kind))
        lines.append(
            f"{name:30} {f['rows']:5d} {f['median']:7.1%} {f['p95']:7.1%} {f['bias']:+7.1%}"
            f" {f['within_10']:12.0%}  {target}"
        )
    return [*lines, *_left_out(found["skipped"])]


def _left_out(skipped: Mapping[str, int]) -> list[str]:
    return ["left out:", *(f"{count:6}  {reason}" for reason, count in Counter(skipped).most_common())]


def main() -> int:
    """Always 0: a part whose file is not there is skipped with a word."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--run", default="", help="of the published runs, those with this in their name")
    parser.add_argument("--sample", type=int, default=1, metavar="N", help="one model in N, by a hash")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    start_s = time.monotonic()
    result: Result = {"date": str(datetime.date.today()), "one_model_in": max(1, options.sample)}
    judges = {"steps": steps, "memory": memory, "recent": recent, "peaks": peaks_of_runs}
    for part, name in FILES.items():
        path = options.data / name
        if options.only not in (None, part):
            continue
        if not path.is_file():
            print(f"{part}: skipped, as there is no file {path} (--data DIR)", file=sys.stderr)
            continue
        result[part] = judges[part](path, result["one_model_in"])
    if options.only in (None, "published"):
        result["published"] = runs(options.run)
    result["wall_s"] = round(time.monotonic() - start_s)
    if options.only is None:
        kind = "" if result["one_model_in"] == 1 else f"_sample-{result['one_model_in']}"
        machine = f"{platform.machine()}-{platform.system().lower()}"
        save(result, HERE / "results" / f"{result['date']}_{machine}{kind}.json")
    print(json.dumps(result) if options.json else table(result))
    return 0


def save(result: Result, path: Path) -> None:
    """One JSON, each row on one line."""
    text = json.dumps(result, indent=1)
    path.parent.mkdir(exist_ok=True)
    path.write_text(_rows_on_lines(text) + "\n", encoding="utf-8")


def _rows_on_lines(text: str) -> str:
    """Innermost objects, which are rows and figures, on one line each."""
    return re.sub(r"\{[^{}]*\}", lambda found: re.sub(r"\n\s*", " ", found[0]), text)


if __name__ == "__main__":
    sys.exit(main())
