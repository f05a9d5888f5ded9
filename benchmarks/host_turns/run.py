"""Question: how near are stages that devices take in turns to their bound, and to RoundPipe's figures?

    python benchmarks/host_turns/run.py                   # all, and the tables of README.md
    python benchmarks/host_turns/run.py --only order      # also: planned, limited, sums
    python benchmarks/host_turns/run.py --only planned --rows "32B 8x"
    python benchmarks/host_turns/run.py --only planned --rows 235B --kinds planned on_host
    python benchmarks/host_turns/run.py --check           # replans; fails where a row is stale or absent
    python benchmarks/host_turns/run.py --table           # README.md from the results alone

README.md says what each part is. Results are a file for each part.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
RESULTS: Final = HERE / "results"
PAGE: Final = HERE / "README.md"
OUTSIZE: Final = "import sys; sys.argv[0] = 'outsize'; from outsize.cli import main; main()"
RATIOS: Final = (0.25, 1.0, 2.0)
# Predictions have no noise: this much is another plan, or other figures of the product.
SAME: Final = 1e-6
Rows = list[dict[str, Any]]


def order(_: argparse.Namespace) -> Rows:
    """Three rules of who takes the next stage."""
    from order import compared

    return compared(seeds=21)


def planned(asked: argparse.Namespace) -> Rows:
    """Four models on cards that are not there."""
    from planned import rows

    found = list[dict[str, Any]]()
    for row in rows(asked.rows, asked.kinds):
        print(planned_line(row), flush=True)
        found.append(row)
        if not asked.check:
            write("planned", found)
    return found


def limited(asked: argparse.Namespace) -> Rows:
    """CPUs that stand for cards, whose copies have a bandwidth."""
    return [row for ranks in (1, 2) for row in _launched(ranks, asked.rounds)]


def _launched(ranks: int, rounds: int) -> Rows:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        own = [str(HERE / "worker.py"), str(out), str(rounds), *map(str, RATIOS)]
        command = [sys.executable, "-c", OUTSIZE, "run", "--nproc-per-node", str(ranks), *own]
        settings = [f"PYTHONPATH={HERE.parents[1] / 'src'}:{HERE}", "OMP_NUM_THREADS=1"]
        done = subprocess.run(["env", *settings, *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        return json.loads(out.read_text())


def sums(_: argparse.Namespace) -> Rows:
    """Errors of products."""
    from sums import rows

    return rows()


def planned_line(row: dict[str, Any]) -> str:
    """A row of the table of plans."""
    published = row["published_tokens_per_s"]
    cells = [row["model"], row["cluster"], row["precision"], f"{row['tokens']:,}"]
    cells += ["" if published is None else f"{published:,.0f}"]
    for name in ("planned", "compiled", "on_host"):
        found = row.get(name, {})
        if "tokens_per_s" not in found:
            cells += ["no plan" if "refused" in found else ""]
            continue
        speed = found["tokens_per_s"]
        beside = "" if published is None else f" ({speed / published:.2f})"
        cells += [f"{speed:,.0f}{beside}"]
    own = row.get("on_host", {}).get("of_bound")
    cells += ["" if own is None else f"{own:.2f}", _layout(row["planned"])]
    return f"| {' | '.join(cells)} |"


def _layout(found: dict[str, Any]) -> str:
    if "refused" in found:
        return ""
    axes = " x ".join(f"{name} {size}" for name, size in found["axes"].items()) or "one device"
    again = "" if found["recompute"] == "none" else f", recompute {found['recompute'][:9]}"
    return f"{axes}, weights {found['weights']}, {found['microbatches']} microbatches{again}"


def order_line(row: dict[str, Any]) -> str:
    """A row of the table of rules."""
    cells = [f"{row['devices']} x {row['stages']} stages, {row['microbatches']} microbatches", row["case"]]
    cells += [f"{row['copied']:.1f}", f"{row['noise'] * 100:.0f} %"]
    cells += [f"{row[name]:.2f}" for name in ("first free", "soonest", "in proportion", "bound")]
    return f"| {' | '.join(cells)} |"


def limited_line(row: dict[str, Any]) -> str:
    """A row of the table of bounds."""
    cells = [str(row["ranks"]), f"{row['ratio']:.2f}", f"{row['computing_s']:.2f}", f"{row['copies_s']:.2f}"]
    cells += [f"{row['step_s']:.2f}"]
    for share in (row["of_bound"], row["of_passes"]):
        cells += [f"{share['median']:.2f} ({share['low']:.2f} to {share['high']:.2f})"]
    cells += [f"{row['waited_for_optimizer_s']:.2f}"]
    return f"| {' | '.join([*cells, 'equal' if row['losses_equal'] else 'differ'])} |"


def sums_line(row: dict[str, Any]) -> str:
    """A row of the table of errors, in percent."""
    cells = [f"{row['terms']:,}", f"{row['told'] * 100:.2f}"]
    for signs in ("random signs", "mean of 0.1"):
        cells += [f"{row[signs][kind] * 100:.2f}" for kind in ("float16 sums", "float32 sums", "bfloat16")]
    return f"| {' | '.join(cells)} |"


PARTS: Final[dict[str, tuple[Callable[[argparse.Namespace], Rows], Callable[[dict[str, Any]], str]]]] = {
    "order": (order, order_line),
    "planned": (planned, planned_line),
    "limited": (limited, limited_line),
    "sums": (sums, sums_line),
}


def page(text: str) -> str:
    """The page with each part's table from its results, between its two marks."""
    for name, (_, line) in PARTS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
            head, _, rest = text.partition(begin)
            kept, _, tail = rest.partition(end)
            heading = kept.splitlines()[:2]
            lines = [*heading, *map(line, json.loads(path.read_text())["rows"])]
            text = head + begin + "\n".join(lines) + "\n" + end + tail
    return text


def write(name: str, rows: Rows) -> None:
    """One file for each part; rows of models that were not asked for stay."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    if name in ("planned", "check") and path.exists():
        new = {_key(row) for row in rows}
        rows = [row for row in json.loads(path.read_text())["rows"] if _key(row) not in new] + rows
        rows.sort(key=_place)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    head = {"date": date.today().isoformat(), "machine": machine, "load": round(os.getloadavg()[1], 1)}
    path.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")


def _key(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["model"], row["cluster"], row["tokens"]


def _place(row: dict[str, Any]) -> tuple[int, int]:
    from planned import MODELS

    asked = [(model.name, cluster) for model in MODELS for cluster in model.tokens_per_s]
    return asked.index((row["model"], row["cluster"])), row["tokens"]


def differences(asked: argparse.Namespace) -> list[str]:
    """Rows of plans that are not what the product plans now, or that nobody has planned; `check.json` keeps
    what was compared.
    """
    known = {_key(row): row for row in json.loads((RESULTS / "planned.json").read_text())["rows"]}
    wrong, compared = list[str](), list[dict[str, Any]]()
    for row in planned(asked):
        name, old = f"{row['model']} on {row['cluster']}, {row['tokens']:,} tokens", known.get(_key(row))
        if old is None:
            wrong.append(f"{name}: absent")
            continue
        compared.append({field: row[field] for field in ("model", "cluster", "tokens")})
        for kind in (kind for kind in asked.kinds if kind in old):
            now_s, then_s = (each[kind].get("step_s", 0.0) for each in (row, old))
            compared[-1][kind] = {"then_s": then_s, "now_s": now_s}
            if abs(now_s - then_s) > SAME * max(now_s, then_s):
                wrong.append(f"{name}, {kind}: {then_s:.3f} s a step then, {now_s:.3f} s now")
    write("check", compared)
    return wrong


def main() -> None:
    """Measures or plans what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rows", default="", help="of plans: those with this in their model and cluster")
    kinds = ("planned", "compiled", "on_host")
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="which plans of a row")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--check", action="store_true", help="compare plans with the results, write nothing")
    parser.add_argument("--table", action="store_true", help="write README.md from the results alone")
    asked = parser.parse_args()
    if asked.check:
        wrong = differences(asked)
        sys.exit("\n".join(wrong) if wrong else 0)
    for name in [] if asked.table else asked.only:
        write(name, PARTS[name][0](asked))
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
