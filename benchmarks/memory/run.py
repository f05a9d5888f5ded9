"""Is the predicted peak of a step what a real step holds? Per model, plan and stage; see README.md."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from caching_allocator import replay
from cases import CASES, MORE, Case
from meter import Meter, Split, metered

import outsize
from outsize.api import price
from outsize.capture.measure.local_cluster import find_cluster
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Stage
from outsize.ir.profile import Profile
from outsize.ir.units.names import compress_units
from outsize.planner.costs.stage_edges import edges_between
from outsize.planner.evaluate.pricing import Pricing
from outsize.planner.layout.layout import Layout
from outsize.planner.memory.account import StageMemory, account_stages
from outsize.planner.partition.stage_prices import PricedModel
from outsize.planner.strategies.selective_recompute import recomputing
from outsize.schedules.builders import build

Schedule = Literal["gpipe", "1f1b", "zero-bubble"]
How = Literal["none", "selective", "blocks", "full"]
PLANS: tuple[tuple[int, Schedule, int], ...] = ((1, "1f1b", 4), (2, "1f1b", 4), (3, "gpipe", 4))
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
}


@final
@dataclass(frozen=True)
class Row:
    """One stage of one plan of one model."""

    model: str
    optimizer: str
    recompute: str
    stages: int
    schedule: str
    stage: int
    predicted_bytes: int
    real_bytes: int
    when: str
    reserved_bytes: int  # by a replay of CUDA's allocator over the same births and ends

    @property
    def error(self) -> float:
        """(predicted - real) / real."""
        return self.predicted_bytes / self.real_bytes - 1


def compare(
    name: str, plan: tuple[int, Schedule, int], optimizer: str, recompute: How = "none"
) -> Iterator[Row]:
    """Predict every stage's peak, then run two steps and look at the second."""
    stages, schedule, microbatches = plan
    torch.manual_seed(0)
    case = (CASES | MORE)[name]()
    case.model.train()
    chosen = outsize.plan(
        case.model,
        case.batch.args,
        case.batch.kwargs,
        target=case.batch.target,
        loss_fn=case.loss_fn,
        cluster=f"{stages}xcpu",
        stages=stages,
        schedule=schedule,
        microbatches=microbatches,
        optimizer=optimizer,
        recompute="full" if recompute == "full" else "none",
    )
    if recompute in ("selective", "blocks"):
        chosen = some_again(case, chosen, random.Random(f"{name} {stages}"), every=recompute == "blocks")
    predicted = predict(case, chosen)
    meter = real(case, chosen, OPTIMIZERS[optimizer])
    for stage, memory in enumerate(predicted):
        found = memory.peak_bytes, meter.peaks[stage], meter.moments[stage]
        events = [(number, size) for where, number, size in meter.events if where == stage]
        yield Row(name, optimizer, recompute, stages, schedule, stage, *found, replay(events).peak_reserved)


def predict(case: Case, plan: outsize.Plan) -> tuple[StageMemory, ...]:
    """The account of each stage, from the model's shapes."""
    batch = case.batch
    _, graph, _ = price(plan, case.model, batch.args, batch.kwargs, loss_fn=case.loss_fn, target=batch.target)
    profile, bounds = outsize.estimate(graph, plan.cluster), plan.bounds(graph)
    if plan.stages[0].recomputed:
        return _selective(plan, graph, profile)
    tables = PricedModel.of(graph, profile, plan.microbatches, plan.optimizer, plan.recompute).ranges
    schedule = build(plan.schedule, len(plan.stages), plan.microbatches)
    return account_stages(tables, graph, bounds, edges_between(graph, bounds).lowered(schedule))


def some_again(case: Case, plan: outsize.Plan, draw: random.Random, every: bool = False) -> outsize.Plan:
    """About half of the units of each stage recomputed, in runs of one to eight; or `every` one."""
    batch, stages = case.batch, list[Stage]()
    _, graph, _ = price(plan, case.model, batch.args, batch.kwargs, loss_fn=case.loss_fn, target=batch.target)
    names, bounds = [u.name for u in graph.units], plan.bounds(graph)
    for number, stage in enumerate(plan.stages):
        at, units = bounds[number] + draw.randint(0, 2), list[int]()
        while at < bounds[number + 1]:
            end = min(at + draw.randint(1, 8), bounds[number + 1])
            units, at = [*units, *range(at, end)], end + draw.randint(1, 8)
        units = list(range(bounds[number], bounds[number + 1])) if every else units
        patterns = compress_units(names, units or [bounds[number]])
        stages.append(stage.model_copy(update={"recompute": "selective", "recomputed": patterns}))
    return plan.model_copy(update={"stages": tuple(stages)})


def _selective(plan: outsize.Plan, graph: ModelGraph, profile: Profile) -> tuple[StageMemory, ...]:
    cluster, layout = find_cluster(plan.cluster), Layout.of_plan(plan)
    menu = Pricing({plan.microbatches: (graph, profile)}, cluster, plan.optimizer, most=len(graph.units))
    names, stages = [u.name for u in graph.units], range(len(plan.stages))
    pipeline = menu.pipeline(layout, ("none", "full"))
    assert pipeline is not None
    chosen = {stage: plan.recomputed(stage, names) for stage in stages}
    return recomputing(pipeline, plan.bounds(graph), [0] * len(stages), chosen, menu, plan.optimizer).memories


def real(case: Case, plan: outsize.Plan, make: Any) -> Meter:
    """What the second step holds, by stage."""
    meter, batch = Meter(len(plan.stages)), case.batch
    engine = outsize.parallelize(
        case.model, batch.args, batch.kwargs, plan=plan, loss_fn=case.loss_fn, target=batch.target
    )
    home, named = engine._ownership.placement.home, dict(case.model.named_parameters())
    groups = {s: [w for n, w in named.items() if home.get(n) == s] for s in range(len(plan.stages))}
    engine.optimizer = Split(groups, make, meter)
    with metered(meter):
        engine.step(*batch.args, target=batch.target, **batch.kwargs)
        gc.collect()
        with meter:
            for stage, weights in groups.items():
                meter.hold(stage, held(case.model, weights, engine.optimizer, home, stage))
            meter.share(batch.tensors())
            meter.elsewhere(b for lane in engine.crew.activations.lanes.values() for b in lane.buffers)
            engine.step(*batch.args, target=batch.target, **batch.kwargs)
    return meter


def held(
    model: nn.Module, weights: list[nn.Parameter], optimizer: Split, home: dict[str, int], stage: int
) -> list[torch.Tensor]:
    """What a stage holds between two steps."""
    part = optimizer.parts.get(stage)
    states = [t for state in part.state.values() for t in state.values()] if part else []
    buffers = [b for n, b in model.named_buffers() if home.get(n) == stage]
    return [*weights, *buffers, *(t for t in states if isinstance(t, torch.Tensor))]


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Of the absolute errors per stage."""
    errors = [abs(row.error) for row in rows]
    under = sorted(row.real_bytes / row.predicted_bytes - 1 for row in rows)
    segments = sorted(row.reserved_bytes / row.real_bytes - 1 for row in rows)
    return {
        "stages": len(rows),
        "median_error": statistics.median(errors),
        "p90_error": sorted(errors)[int(0.9 * len(errors))],
        "worst_error": max(errors),
        "real_over_predicted_p95": under[int(0.95 * len(rows))],
        "reserved_over_real_median": statistics.median(segments),
        "reserved_over_real_p95": segments[int(0.95 * len(rows))],
    }


def main() -> None:
    """Run what was asked for; print a table or JSON; write the results."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--models", nargs="*", choices=list(CASES | MORE))
    asked.add_argument("--more", action="store_true", help="the models that were held out")
    asked.add_argument("--optimizer", default="adamw", choices=list(OPTIMIZERS))
    asked.add_argument("--recompute", default="none", choices=["none", "selective", "blocks", "full"])
    asked.add_argument("--json", action="store_true")
    asked.add_argument("--out", type=Path)
    options = asked.parse_args()
    models = options.models or list(MORE if options.more else CASES)
    rows = [r for m in models for p in PLANS for r in table_rows(m, p, options)]
    found = {"summary": summary(rows), "rows": [asdict(r) | {"error": r.error} for r in rows]}
    found["machine"] = f"{platform.machine()}, torch {torch.__version__}"
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found) if options.json else found["summary"])


def table_rows(model: str, plan: tuple[int, Schedule, int], options: argparse.Namespace) -> list[Row]:
    """The rows of one run, printed unless JSON is wanted."""
    rows = list(compare(model, plan, options.optimizer, options.recompute))
    for row in () if options.json else rows:
        place = f"{row.model:12} {row.stages} x {row.schedule:5} stage {row.stage}"
        sizes = f"{row.predicted_bytes / 1e6:9.3f} MB  real {row.real_bytes / 1e6:9.3f} MB"
        print(f"{place}  predicted {sizes}  {100 * row.error:+7.2f} %  at {row.when}", flush=True)
    return rows


if __name__ == "__main__":
    main()
