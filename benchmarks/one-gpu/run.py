"""Question: how near is what `outsize plan` says of one GPU to what that GPU does?

Predicts each case of a file that measure.py has written on a GPU, on any machine. See README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from cases import CASES, image_loss

import outsize

HERE = Path(__file__).parent
MEASURED = HERE / "results" / "2026-11-26_h100-80gb_measured.json"


def predicted(name: str, cluster: str) -> dict[str, float]:
    """Returns what the product says of a step on one device of the cluster."""
    case = CASES[name]
    with torch.device("meta"):
        model = case.build()
    model = (model.bfloat16() if case.precision == "bf16" else model).train()
    batch = case.batch()
    how: dict[str, Any] = {"cluster": cluster, "stages": 1, "microbatches": 1}
    if case.precision == "bf16-mixed":
        how["precision"] = case.precision
    if "images" in batch:
        target = batch["classes"]
        plan = outsize.plan(model, (batch["images"],), loss_fn=image_loss, target=target, **how)
    else:
        plan = outsize.plan(model, kwargs=batch, **how)
    assert plan.expected is not None
    stage = plan.expected.stages[0]
    return {"step_s": plan.expected.step_s, "p50_bytes": stage.p50_bytes, "p95_bytes": stage.p95_bytes}


def main() -> int:
    """Prints a row for each case and the errors over all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--measured", type=Path, default=MEASURED)
    parser.add_argument("--cluster", default="1xh100-80gb", help="or a report of outsize doctor --gpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = list[dict[str, Any]]()
    for row in json.loads(options.measured.read_text())["rows"]:
        found = predicted(row["name"], options.cluster)
        errors = {
            "step_error": found["step_s"] / row["step_s"] - 1,
            "p50_error": found["p50_bytes"] / row["device_used_bytes"] - 1,
            "p95_error": found["p95_bytes"] / row["device_used_bytes"] - 1,
        }
        rows.append({"name": row["name"], "measured": row, "predicted": found, **errors})
        shown = "  ".join(f"{errors[name]:+7.1%}" for name in errors)
        print(f"{row['name']:34} {row['step_s'] * 1e3:7.1f} ms  {shown}", flush=True)
    steps = [row["step_error"] for row in rows]
    summary = {
        "cluster": options.cluster,
        "rows": len(rows),
        "step_mape": statistics.fmean(map(abs, steps)),
        "step_median": statistics.median(map(abs, steps)),
        "step_bias": statistics.fmean(steps),
        "p50_within_tenth": sum(abs(row["p50_error"]) <= 0.1 for row in rows),
        "p95_covers": sum(row["p95_error"] >= 0 for row in rows),
    }
    print(json.dumps(summary, indent=1))
    if options.json:
        options.json.write_text(json.dumps({"summary": summary, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
