"""Question: how long is it from `import` to the first step, what do later steps cost, and how much memory?

python benchmarks/startup/first_step.py --other CHECKOUT      two processes, A B A B, about ten minutes
python benchmarks/startup/first_step.py --other CHECKOUT --figures start --rounds 3

    start    a Llama of 24 layers of transformers in two stages over two processes: seconds until the first
             step has ended, and of the first step of another length, without those of a second step
    step     Python of `engine.step` beyond the plain loop, of 80 small layers
    memory   the most host memory of `parallelize` with weight_files=, by the bytes of the rank's own weights

Each measurement is a fresh process (two for `start` and `memory`). On a busy machine the seconds of the CPU
say more than those of the wall, and the ratios of two builds that ran in turns more than either.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORKER = HERE / "first_step_worker.py"
ROOT = HERE.parents[1]
FIGURES = ("start", "step", "memory")
TARGETS = {"start": 0.5, "start again": 0.5, "new shape": 0.3, "step": 0.6, "memory": 1.1}
TIMEOUT_S = 300
Found = list[dict[str, Any]]


def free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def measured(checkout: Path, figure: str, extra: list[str], processes: int) -> Found:
    """Returns what each rank has found with the package of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        out, port = Path(folder) / "found", str(free_port())
        command = [sys.executable, str(WORKER), figure, "--out", str(out), *extra]
        whole = dict(os.environ)  # noqa: TID251
        inherited = whole.get("PYTHONPATH", "").split(os.pathsep)
        packages = [path for path in inherited if path and not path.endswith("src")]
        env = {name: text for name, text in whole.items() if name not in ("RANK", "WORLD_SIZE")}
        env |= {"PYTHONPATH": os.pathsep.join([str(checkout / "src"), *packages]), "OMP_NUM_THREADS": "1"}
        # Bytecode is there, as of an installed package; the first round, which writes it, does not count.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        env["PYTHONPYCACHEPREFIX"] = str(Path(tempfile.gettempdir()) / "outsize-startup-bytecode")
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
        places = [meet | {"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(processes)]
        ranks = [subprocess.Popen(command, env=env | place) for place in places if processes > 1]
        ranks = ranks or [subprocess.Popen(command, env=env)]
        try:
            codes = [rank.wait(timeout=TIMEOUT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise SystemExit(f"{figure} with {checkout} has ended with {codes}")
        return [json.loads(out.with_suffix(f".{n}.json").read_text()) for n in range(processes)]


def start_figures(ranks: Found) -> dict[str, float]:
    """Returns seconds of the slower rank: until the first step has ended, outsize's part, new lengths."""
    found: dict[str, float] = {}
    for clock in ("wall", "cpu"):
        each = [{name: s[clock] for name, s in rank["seconds"].items()} for rank in ranks]
        upto = list(each[0]).index("first step") + 1
        found[f"start, {clock}"] = max(sum(list(one.values())[:upto]) for one in each)
        ours = ("import outsize", "parallelize", "first step")
        found[f"ours, {clock}"] = max(sum(one[n] for n in ours) - one["second step"] for one in each)
        lengths = [name for name in each[0] if name.startswith("first step of")]
        for place, name in enumerate(lengths):
            steady = name.replace("first", "second")
            found[f"new shape {place + 1}, {clock}"] = max(one[name] - one[steady] for one in each)
    return found


def step_figures(ranks: Found) -> dict[str, float]:
    """Returns microseconds of a step beyond the plain loop."""
    return {f"own us, {name}": one["own_us"] for name, one in ranks[0].items()}


def memory_figures(ranks: Found) -> dict[str, float]:
    """Returns the most memory by the rank's own weights, on the rank where that is more."""
    return {"peak by own part": max(rank["peak_by_own"] for rank in ranks)}


def rounds_of(figure: str, builds: dict[str, Path], options: argparse.Namespace, folder: Path) -> Any:
    """Returns the figures of each build in each round, in turns."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in builds}
    losses: dict[str, Any] = {}
    extra, processes = list[str](), 1 if figure == "step" else 2
    if figure == "memory":
        extra = ["--weights", str(folder / "weights")]
        measured(ROOT, "weights", extra, 1)
    for lap in range(options.rounds + (figure == "start")):
        for name, checkout in builds.items():
            asked = ["--asked", options.asked] if figure == "start" and name == "this" else []
            ranks = measured(checkout, figure, [*extra, *asked], processes)
            summarise = {"start": start_figures, "step": step_figures, "memory": memory_figures}[figure]
            if figure != "start" or lap:
                rows[name].append(summarise(ranks))
            losses[name] = [rank.get("losses") for rank in ranks]
    if figure == "start" and len({json.dumps(of) for of in losses.values()}) > 1:
        raise SystemExit(f"the builds have other losses: {losses}")
    return rows


def medians(rows: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Returns the median of each figure by build, and the median of the rounds' ratios."""
    names = list(next(iter(rows.values()))[0])
    found = {name: {b: statistics.median(r[name] for r in of) for b, of in rows.items()} for name in names}
    if len(rows) == 2:
        this, other = rows.values()
        for name in names:
            pairs = zip(this, other, strict=True)
            found[name]["ratio"] = statistics.median(a[name] / b[name] for a, b in pairs)
    return found


def main() -> None:
    """Measures, prints and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--other", type=Path, help="another checkout, which is measured in turns")
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=FIGURES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--asked", default="{}", help="more options of this build's parallelize, as JSON")
    parser.add_argument("--tag", default="", help="suffix of the result's name")
    options = parser.parse_args()
    builds = {"this": ROOT} | ({} if options.other is None else {"other": options.other.resolve()})
    with tempfile.TemporaryDirectory() as folder:
        rows = {f: rounds_of(f, builds, options, Path(folder)) for f in options.figures}
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
        "targets": TARGETS,
        "medians": {figure: medians(of) for figure, of in rows.items()},
        "rounds": rows,
    }
    name = f"{result['date']}_first_step{options.tag}_{platform.machine()}-{os.cpu_count()}cpu.json"
    (HERE / "results" / name).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for figure, found in result["medians"].items():
        for what, row in found.items():
            print(f"{figure:7s} {what:34s} " + "  ".join(f"{b} {v:.4g}" for b, v in row.items()))
    print(f"load {result['load']}")


if __name__ == "__main__":
    main()
