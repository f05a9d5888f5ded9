"""Step times and choices: each row of a file of published runs, predicted by the product.

Rows are halved by a hash of what they have in common (rows.py): the product's constants for GPUs were last
changed looking at half 0 ("tuned"); half 1 ("held out") is what the figures are worth. A choice is between
rows of one model, machine, number of GPUs and global batch; its regret is the measured time of the layout
that the product predicts to be fastest over the best measured.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from priced import priced
from rows import HALVES, Run

from outsize.errors import OutsizeError

Told = dict[str, Any]


def timed(runs: Iterable[Run]) -> list[Told]:
    """A row per run, in the order of the captures that they share; a refused one has its error."""
    return [row_of(run) for run in sorted(runs, key=lambda r: (repr(r.shape), r.division.microbatch))]


def row_of(run: Run) -> Told:
    """What was measured, and what the product says of it."""
    division, start_s = run.division, time.process_time()
    row: Told = {
        "group": " ".join(run.group),
        "system": run.system,
        "kind": run.kind,
        "half": HALVES[run.half],
        "layers": run.shape.layers,
        "hidden": run.shape.hidden,
        "tp": division.tp,
        "pp": division.pp,
        "chunks": division.chunks,
        "dp": division.dp,
        "microbatch": division.microbatch,
        "microbatches": division.microbatches,
        "measured_s": run.seconds,
    }
    try:
        row["predicted_s"] = priced(run.shape, division).step_s
        row["error"] = round(row["predicted_s"] / run.seconds - 1, 4)
    except OutsizeError as refusal:
        row["refused"] = str(refusal)
    row["cpu_s"] = round(time.process_time() - start_s, 2)
    return row


def errors_of(rows: Sequence[Told]) -> dict[str, dict[str, float]]:
    """MAPE, bias and the worst by kind of rows and by half; a system has its line, too."""
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        if "error" in row:
            for name in (row["kind"], row["system"]):
                groups[f"{name}, {row['half']}"].append(row["error"])
                groups[f"{name}, all"].append(row["error"])
    return {
        name: {
            "rows": len(errors),
            "mape": statistics.mean(map(abs, errors)),
            "bias": math.exp(statistics.mean(map(math.log1p, errors))) - 1,
            "worst": max(errors, key=abs),
        }
        for name, errors in sorted(groups.items())
    }


def choices(rows: Sequence[Told]) -> list[Told]:
    """The choice in each group of rows that has one, the worst first."""
    groups: defaultdict[str, list[Told]] = defaultdict(list)
    for row in rows:
        if "predicted_s" in row:
            groups[row["group"]].append(row)
    found = [_choice(name, group) for name, group in groups.items() if len(group) > 1]
    return sorted(found, key=lambda choice: -choice["regret"])


def _choice(name: str, group: Sequence[Told]) -> Told:
    chosen = min(group, key=lambda row: row["predicted_s"])
    best = min(group, key=lambda row: row["measured_s"])
    return {
        "group": name,
        "kind": chosen["kind"],
        "half": chosen["half"],
        "layouts": len(group),
        "chosen": layout_of(chosen),
        "best": layout_of(best),
        "regret": round(chosen["measured_s"] / best["measured_s"], 4),
    }


def layout_of(row: Told) -> str:
    """The layout in a few words, its microbatch last."""
    return f"tp {row['tp']} pp {row['pp']} dp {row['dp']} x{row['microbatch']}"


def regrets_of(found: Sequence[Told]) -> dict[str, dict[str, float]]:
    """Mean and worst regret by half."""
    halves = {name: [c["regret"] for c in found if name in ("all", c["half"])] for name in (*HALVES, "all")}
    return {
        name: {"choices": len(r), "mean": statistics.mean(r), "worst": max(r)}
        for name, r in halves.items()
        if r
    }
