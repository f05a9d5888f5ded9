"""Question: how far from published runs are the predicted step time, the choice of a plan, and the memory?

    python benchmarks/foresight/run.py --runs CSV --memory CSV --calibrate 10 [--json]

The files are not part of the project; without them the benchmark says so and ends with status 2. README.md
says what is measured and how the constants were tuned on one half of the rows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import runs
import steptime

import golden

Result = dict[str, Any]
HALVES = {"tuned_half": 0, "reported_half": 1}


def report(runs_csv: Path, memory_csv: Path, calibrate: int) -> Result:
    """All figures: of all rows, and of each half apart."""
    found, skipped = runs.read_all(runs_csv)
    timed = steptime.time_all(found, calibrate)
    errors, memory_skipped = memory_errors(memory_csv)
    result: Result = {"calibrate": calibrate, **figures(timed, [error for _, error in errors])}
    for name, half in HALVES.items():
        of_half = [t for t in timed if t.run.half == half]
        result[name] = figures(of_half, [error for which, error in errors if which == half])
    result["systems"] = {name: rounded(steptime.mape(of)) for name, of in by_system(timed).items()}
    result["runs"] = {
        "used": len(found),
        "calibrated_on": sum(t.seen for t in timed),
        "skipped": dict(skipped),
    }
    result["memory"] = {"used": len(errors), "skipped": dict(memory_skipped)}
    return result


def figures(timed: Sequence[steptime.Timed], errors: Sequence[float]) -> Result:
    """The figures of the question for some rows; None where no row tells."""
    vtrain = [t for t in timed if t.run.vtrain]
    regrets = steptime.regrets(timed)
    return {
        "step_time_mape_single": rounded(steptime.mape(t for t in vtrain if t.run.nodes == 1)),
        "step_time_mape_multi": rounded(steptime.mape(t for t in vtrain if t.run.nodes > 1)),
        "step_time_mape_calculon": rounded(steptime.mape(t for t in timed if t.run.calculon)),
        "choice_regret_mean": rounded(statistics.fmean(regrets) if regrets else None),
        "choice_regret_worst": rounded(max(regrets, default=None)),
        "choices": len(regrets),
        "memory_median": rounded(statistics.median(errors) if errors else None),
        "memory_p95": rounded(p95(errors)),
    }


def memory_errors(path: Path) -> tuple[list[tuple[int, float]], Counter[str]]:
    """(half, |predicted / measured - 1|) of each Megatron golden row, and how many others by reason."""
    errors: list[tuple[int, float]] = []
    skipped: Counter[str] = Counter()
    for row in runs.read_rows(path):
        if row["id"] != "megatron-golden":
            skipped[f"not Megatron's golden values: {row['id']}"] += 1
            continue
        try:
            predicted = golden.peak_bytes(golden.read(row))
            error = abs(predicted / measured_bytes(row) - 1)
        except golden.Skip as reason:
            skipped[str(reason)] += 1
            continue
        except (ValueError, ArithmeticError):
            skipped["not a run that can be: a number is no number, or out of range"] += 1
            continue
        errors.append((runs.half_of([row["model"]]), error))
    return errors, skipped


def measured_bytes(row: dict[str, str]) -> float:
    """The peak. Raises golden.Skip for one that is none."""
    if not 0 < float(row["mem_value"]) < math.inf:
        raise golden.Skip("peak not positive")
    return float(row["mem_value"])


def by_system(timed: Sequence[steptime.Timed]) -> dict[str, list[steptime.Timed]]:
    """The runs of each system on each machine."""
    found: dict[str, list[steptime.Timed]] = {}
    for t in timed:
        found.setdefault(f"{t.run.system}, {t.run.site[1]}", []).append(t)
    return found


def p95(errors: Sequence[float]) -> float | None:
    """The smallest error that 95 % of the rows do not exceed."""
    return sorted(errors)[-(-95 * len(errors) // 100) - 1] if errors else None


def rounded(value: float | None) -> float | None:
    """Four decimals."""
    return None if value is None else round(value, 4)


def table(result: Result) -> str:
    """For people: each figure of all rows and of the halves, then what was left out and why."""
    names = [name for name, value in result["reported_half"].items() if not isinstance(value, dict)]
    lines = [f"{'':26}{'all':>10}{'tuned on':>10}{'reported':>10}"]
    for name in names:
        cells = (result[name], result["tuned_half"][name], result["reported_half"][name])
        lines.append(f"{name:26}" + "".join(f"{'-' if cell is None else cell:>10}" for cell in cells))
    for kind in ("runs", "memory"):
        lines.append(f"\n{kind}: {result[kind]['used']} rows used; left out:")
        lines += [f"{count:6}  {reason}" for reason, count in Counter(result[kind]["skipped"]).most_common()]
    return "\n".join(lines)


def main() -> int:
    """0, or 2 when a file is not there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="CSV of published runs")
    parser.add_argument("--memory", type=Path, required=True, help="CSV of published peak memory")
    parser.add_argument("--calibrate", type=int, default=10, help="runs that may be looked at")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for path in (options.runs, options.memory):
        if not path.is_file():
            print(
                f"no file {path}: pass --runs and --memory the CSV files of published figures",
                file=sys.stderr,
            )
            return 2
    result = report(options.runs, options.memory, options.calibrate)
    print(json.dumps(result, indent=1) if options.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
