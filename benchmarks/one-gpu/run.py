"""Question: how near is what `outsize plan` says of one GPU to what that GPU does?

    python benchmarks/one-gpu/run.py --set held-out --predict FILE         # predicts alone
    python benchmarks/one-gpu/run.py --predictions FILE --measured FILE    # judges what was predicted
    python benchmarks/one-gpu/run.py --measured FILE                       # predicts now, and judges

`--measured` is a file that measure.py has written on a GPU. See README.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cases import image_loss
from sets import SETS

import outsize
from outsize.capture.models.imports import import_torchvision, import_transformers
from outsize.capture.models.on_meta import built_on_meta

HERE = Path(__file__).parent
MEASURED = HERE / "results" / "2026-11-26_h100-80gb_measured.json"
CASES = {name: case for cases in SETS.values() for name, case in cases.items()}
PACKAGES = ("torch", "transformers", "torchvision", "timm", "peft")
Row = dict[str, Any]


def predicted(name: str, cluster: str) -> dict[str, float]:
    """Returns what the product says of a step on one device of the cluster."""
    case = CASES[name]
    model = built_on_meta(case.build)
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
    return {
        "step_s": plan.expected.step_s,
        "peak_bytes": stage.peak_bytes,
        "p50_bytes": stage.p50_bytes,
        "p95_bytes": stage.p95_bytes,
    }


def predictions(names: list[str], cluster: str) -> Row:
    """Returns the predictions of the cases; one that the product refuses says how."""
    rows = list[Row]()
    for name in names:
        try:
            row: Row = {"name": name, "predicted": predicted(name, cluster)}
            seen = row["predicted"]
            print(
                f"{name:34} {seen['step_s'] * 1e3:7.1f} ms {seen['p50_bytes'] / 2**30:7.2f} GiB", flush=True
            )
        except Exception as error:
            row = {"name": name, "failed": f"{type(error).__name__}: {error}"}
            print(f"{name:34} {row['failed']}", flush=True)
        rows.append(row)
    packages = {package: version(package) for package in PACKAGES}
    return {"head": {"cluster": cluster, "packages": packages}, "rows": rows}


def judged(found: Row, measured: Row) -> Row:
    """Returns each row that was measured and predicted with its errors, and the errors over all."""
    known = {row["name"]: row["predicted"] for row in found["rows"] if "predicted" in row}
    taken = [row for row in measured["rows"] if "step_s" in row and row["name"] in known]
    rows = [with_errors(row, known[row["name"]]) for row in taken]
    left = [row["name"] for row in measured["rows"] if row not in taken]
    images = [row for row in rows if CASES[row["name"]].is_of_images]
    words = [row for row in rows if not CASES[row["name"]].is_of_images]
    parts = {"all": rows, "images": images, "words": words}
    summary = {name: errors_over(part) for name, part in parts.items() if part}
    return {
        "head": found["head"],
        "device": measured["head"]["device"],
        "left_out": left,
        "summary": summary,
        "rows": rows,
    }


def with_errors(row: Row, found: dict[str, float]) -> Row:
    """Returns a row with the errors of what was predicted for it."""
    used = row["device_used_bytes"]
    return {
        "name": row["name"],
        "measured": row,
        "predicted": found,
        "step_error": found["step_s"] / row["step_s"] - 1,
        "p50_error": found["p50_bytes"] / used - 1,
        "p95_error": found["p95_bytes"] / used - 1,
    }


def errors_over(rows: list[Row]) -> dict[str, float]:
    """Returns the figures of the issue's targets over these rows."""
    steps = [row["step_error"] for row in rows]
    return {
        "rows": len(rows),
        "step_mape": statistics.fmean(map(abs, steps)),
        "step_median": statistics.median(map(abs, steps)),
        "step_bias": statistics.fmean(steps),
        "p50_within_tenth": statistics.fmean(abs(row["p50_error"]) <= 0.1 for row in rows),
        "p95_covers": statistics.fmean(row["p95_error"] >= 0 for row in rows),
        "p95_above_median": statistics.median(row["p95_error"] for row in rows),
    }


def main() -> int:
    """Predicts, judges, or both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", choices=SETS, default="first")
    parser.add_argument("--cluster", default="1xh100-80gb", help="or a report of outsize doctor --gpu")
    parser.add_argument(
        "--predict", type=Path, metavar="FILE", help="write the predictions of a set, and judge nothing"
    )
    parser.add_argument(
        "--predictions", type=Path, metavar="FILE", help="judge these, in place of plans as of now"
    )
    parser.add_argument("--measured", type=Path, default=MEASURED)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # Where torchvision's compiled part does not load, this makes that its models import.
    import_torchvision()
    import_transformers()
    if options.predict:
        options.predict.write_text(
            json.dumps(predictions(list(SETS[options.set]), options.cluster), indent=1)
        )
        return 0
    measured = json.loads(options.measured.read_text())
    if options.predictions:
        found = json.loads(options.predictions.read_text())
    else:
        found = predictions([row["name"] for row in measured["rows"] if "step_s" in row], options.cluster)
    told = judged(found, measured)
    for row in told["rows"]:
        errors = "  ".join(f"{row[name]:+7.1%}" for name in ("step_error", "p50_error", "p95_error"))
        print(f"{row['name']:34} {row['measured']['step_s'] * 1e3:7.1f} ms  {errors}")
    print(json.dumps({"left_out": told["left_out"], **told["summary"]}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(told, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
