"""Question: what does memory that a stage lacks cost in time, planned by unit, against all or nothing?

One stage, GPipe, several microbatches. Each plan is one that `outsize.plan` makes for a device of so many
bytes; its peak is counted (benchmarks/memory's meter), its step timed in CPU seconds, plans in turns.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "memory"))
from cases import Case, classifier, language  # pyright: ignore[reportMissingImports]

import outsize
from outsize.errors import NoFeasiblePlan
from outsize.ir.cluster import make_cluster

MEMORY: Final = Path(__file__).resolve().parent.parent / "memory"
MICROBATCHES: Final = 4
# of the way from what full recompute holds to what none holds; below 0 a stage fits block by block at best
BUDGETS: Final = (-0.15, 0.0, 0.2, 0.4, 0.6, 0.8)
CASES: Final[dict[str, Callable[[], Case]]] = {
    "ResNet-50": partial(classifier, "resnet50", 128),
    "GPT-2": partial(
        language, "GPT2LMHeadModel", 128, n_layer=12, n_head=4, n_embd=128, vocab_size=512, n_positions=128
    ),
}


def plan_for(case: Case, **wishes: Any) -> outsize.Plan:
    """One stage, all microbatches forward and then backward."""
    how = {"stages": 1, "schedule": "gpipe", "microbatches": MICROBATCHES, "optimizer": "sgd"}
    batch = case.batch
    given = {"target": batch.target, "loss_fn": case.loss_fn}
    return outsize.plan(case.model, batch.args, batch.kwargs, **given, **how, **wishes)


def plans(case: Case) -> dict[str, outsize.Plan]:
    """None, full, offload, and what is planned for each budget that has a plan."""
    found = {how: plan_for(case, cluster="1xcpu", recompute=how) for how in ("none", "full", "offload")}
    least, most = (predicted_bytes(found[how]) for how in ("full", "none"))
    for share in BUDGETS:
        budget = round(least + share * (most - least))
        try:
            cluster = make_cluster("1xcpu", "cpu", 1, 1, budget)
            found[f"planned for {budget / 1e6:.1f} MB"] = plan_for(case, cluster=cluster)
        except NoFeasiblePlan:
            print(f"no plan for {budget / 1e6:.1f} MB", file=sys.stderr)
    return found


def predicted_bytes(plan: outsize.Plan) -> int:
    """The stage's peak by the planner's account."""
    assert plan.expected is not None
    return plan.expected.stages[0].peak_bytes


def seconds(case: Case, chosen: dict[str, outsize.Plan], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each round's step, by plan; the first step of each is not counted."""
    engines, batch = {}, case.batch
    for name, plan in chosen.items():
        model = copy.deepcopy(case.model)
        how = {
            "loss_fn": case.loss_fn,
            "target": batch.target,
            "optimizer": partial(torch.optim.SGD, lr=1e-3),
        }
        engines[name] = outsize.parallelize(model, batch.args, batch.kwargs, plan=plan, **how)
    taken: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds + 1):
        for name, engine in engines.items():
            start = time.process_time()
            engine.step(*batch.args, target=batch.target, **batch.kwargs)
            taken[name].append(time.process_time() - start)
    return {name: laps[1:] for name, laps in taken.items()}


def measured(name: str, rounds: int) -> list[dict[str, Any]]:
    """A row per plan."""
    torch.manual_seed(0)
    case = CASES[name]()
    case.model.train()
    chosen = plans(case)
    laps = seconds(case, chosen, rounds)
    rows: list[dict[str, Any]] = []
    for how, plan in chosen.items():
        copied = Case(copy.deepcopy(case.model), case.batch, case.loss_fn)
        meter = _memory().real(copied, plan, partial(torch.optim.SGD, lr=1e-3))
        expected = plan.expected
        assert expected is not None
        rows.append(
            {
                "model": name,
                "plan": how,
                "recompute": plan.recompute_of(0),
                "predicted_bytes": predicted_bytes(plan),
                "real_bytes": meter.peaks[0],
                "predicted_s": expected.step_s,
                "cpu_s": statistics.median(laps[how]),
                "laps_s": laps[how],
            }
        )
    return rows


def _memory() -> Any:
    """benchmarks/memory/run.py, which has our own name."""
    spec = importlib.util.spec_from_file_location("memory_run", MEMORY / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["memory_run"] = module
    spec.loader.exec_module(module)
    return module


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Memory against time, relative to no recompute."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(4.2 * len(models), 3.4), layout="constrained")
    for place, model in enumerate(models, 1):
        mine = {row["plan"]: row for row in rows if row["model"] == model}
        ends, base = (mine["full"], mine["none"]), mine["none"]["cpu_s"]
        others = [row for row in mine.values() if row not in (*ends, mine["offload"])]
        planned = sorted(others, key=lambda row: row["real_bytes"])
        axes = figure.add_subplot(1, len(models), place, title=model)
        axes.plot(*_points(planned, base), "o-", label="planned")
        axes.step(*_points(list(ends), base), "s--", where="post", color="gray", label="all or nothing")
        axes.plot(*_points([mine["offload"]], base), "^", label="offload")
        axes.set_xlabel("peak, MB")
        axes.set_ylabel("CPU seconds of a step / none")
        axes.legend()
    figure.savefig(path, dpi=120)


def _points(rows: list[dict[str, Any]], base: float) -> tuple[list[float], list[float]]:
    return [row["real_bytes"] / 1e6 for row in rows], [row["cpu_s"] / base for row in rows]


def main() -> None:
    """Measure, print a table or JSON, write both files."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--models", nargs="*", choices=list(CASES), default=list(CASES))
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--json", action="store_true")
    asked.add_argument("--out", type=Path, help="a folder for curve.json and curve.png")
    options = asked.parse_args()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rows = [row for name in options.models for row in measured(name, options.rounds)]
    found = {"rows": rows, "machine": f"{platform.machine()}, torch {torch.__version__}, one thread"}
    if options.out is not None:
        (options.out / "curve.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        draw(rows, options.out / "curve.png")
    print(json.dumps(found) if options.json else table(rows))


def table(rows: list[dict[str, Any]]) -> str:
    """A line per plan."""
    base = {row["model"]: row["cpu_s"] for row in rows if row["plan"] == "none"}
    return "\n".join(_line(row, base[row["model"]]) for row in rows)


def _line(row: dict[str, Any], base: float) -> str:
    predicted, real = (row[key] / 1e6 for key in ("predicted_bytes", "real_bytes"))
    sizes = f"predicted {predicted:7.1f} MB real {real:7.1f} MB"
    return (
        f"{row['model']:10} {row['plan']:24} {row['recompute']:9} {sizes}  {row['cpu_s'] / base:.3f} of none"
    )


if __name__ == "__main__":
    main()
