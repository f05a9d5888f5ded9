"""One pinned rank: rounds of A (time the units of the whole model) and B (real pipelined steps).

The plan is made from the first A. Rank 0 writes what was predicted and what happened.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import CASES, Case

import outsize
from outsize.capture.graph.build import Captured
from outsize.capture.graph.by_modules import capture_model
from outsize.capture.measure.links import measure_links
from outsize.capture.measure.units import UnitTimingOptions, measure_units
from outsize.device import clock
from outsize.ir.answers.request import PlanRequest
from outsize.ir.cluster import Cluster
from outsize.ir.plan import Plan
from outsize.ir.profile import Profile
from outsize.planner.search.evaluate_plan import price
from outsize.planner.search.search import search
from outsize.run.stage.rng import seeder
from outsize.train.measure.round_trip import TimedWire
from outsize.train.world.join import join
from outsize.train.world.world import World, leave


def main() -> None:
    """A B A B ..., then the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="rank 1 rests while rank 0 times the units")
    parser.add_argument("--beside", action="store_true", help="the same, beside a neighbour that it forks")
    parser.add_argument("--cpu-clock", action="store_true", help="stages' seconds while on the CPU only")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    world = join()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[world.rank]})
    options.cores = frozenset(cores[:2])
    torch.set_num_threads(1)
    if options.cpu_clock:
        clock.perf_counter = time.thread_time  # pyright: ignore[reportPrivateImportUsage]
    case = CASES[options.case]()
    captured = capture_at_microbatch(case)
    cluster = measured_cluster(world)
    profiles = [measured(case, captured, world, options)]
    plan = agreed(planned(case, captured, profiles[0], cluster), world)
    engine = engine_of(options.case, plan)
    steps_s, spans = real(engine, case, 2)  # the first ones make buffers and gradients
    steps_s, spans = [], {}
    for number in range(options.rounds):
        if number:
            profiles.append(measured(case, captured, world, options))
        more, found = real(engine, case, options.steps)
        steps_s += more
        for key, seconds in found.items():
            spans.setdefault(key, []).extend(seconds)
    if world.rank == 0:
        document = {
            "plan": plan.model_dump(mode="json"),
            "cluster": cluster.model_dump(mode="json"),
            "predicted": [expectation(plan, captured, p, cluster) for p in (profiles[0], middle(profiles))],
            "profile_step_s": [p.step_compute_s for p in profiles],
            "steps_s": steps_s,
            "spans_s": spans,
        }
        options.out.write_text(json.dumps(document))
    leave(world)


def capture_at_microbatch(case: Case) -> Captured:
    """The model at one microbatch."""
    size = case.batch.size // case.microbatches
    part = case.batch.resized(size)
    return capture_model(case.model, part.args, part.kwargs, case.loss_fn, part.target, size)


def measured_cluster(world: World) -> Cluster:
    """Two CPU processes with the link between them as it is."""
    assert world.group is not None
    return agreed(
        measure_links(world.group, TimedWire(world.group, torch.device("cpu"))).cluster("measured"), world
    )


def measured(case: Case, captured: Captured, world: World, options: argparse.Namespace) -> Profile:
    """A: the units' times, seen by rank 0 while the other rank does the same (or rests)."""
    part = case.batch.resized(captured.graph.batch_size)
    clock = time.thread_time if options.cpu_clock else None
    beside, resting = int(options.beside), options.alone or options.beside
    how = UnitTimingOptions(repeats=options.repeats, seed=seeder(0, 0, 0), clock=clock, beside=beside)
    dist.barrier()
    found = None
    if world.rank == 0 or not resting:
        own = os.sched_getaffinity(0)
        if options.beside:
            os.sched_setaffinity(0, own | options.cores)  # of which it gives one to each neighbour
        found = measure_units(captured, case.model, part.tensors(), how)
        os.sched_setaffinity(0, own)
    dist.barrier()
    return agreed(found, world)


def planned(case: Case, captured: Captured, profile: Profile, cluster: Cluster) -> Plan:
    """The planner's choice for two processes and so many microbatches."""
    request = PlanRequest(batch_size=case.batch.size, microbatches=case.microbatches, stages=2)
    return search(request, {case.microbatches: (captured.graph, profile)}, cluster)


def engine_of(name: str, plan: Plan) -> outsize.Engine:
    """The run of the plan, on a model of its own: the ranks free what others own."""
    case = CASES[name]()
    batch = case.batch
    return outsize.parallelize(
        case.model, batch.args, batch.kwargs, plan=plan, loss_fn=case.loss_fn, target=batch.target
    )


def real(engine: outsize.Engine, case: Case, count: int) -> tuple[list[float], dict[str, list[float]]]:
    """B: seconds of `count` steps without the optimizer's, and of each action kind of each stage."""
    laps: list[float] = []
    spans: dict[str, list[float]] = {}
    for _ in range(count):
        for p in engine.model.parameters():
            p.grad = None
        dist.barrier()
        start = time.perf_counter()
        engine.step(*case.batch.args, target=case.batch.target, update=False, **case.batch.kwargs)
        dist.barrier()
        laps.append(time.perf_counter() - start)
        for span in engine.timeline().spans:
            if span.lane == "compute":
                spans.setdefault(span.action.rstrip("0123456789"), []).append(span.duration_s)
    return laps, spans


def expectation(plan: Plan, captured: Captured, profile: Profile, cluster: Cluster) -> dict[str, Any]:
    """What the planner says of this plan with this profile."""
    expected = price(plan, captured.graph, profile, cluster).expected
    assert expected is not None
    return expected.model_dump(mode="json", include={"step_s": True, "stages": {"__all__": STAGE}})


STAGE = {"units", "forward_s", "backward_s"}


def middle(profiles: list[Profile]) -> Profile:
    """Unit by unit the median over the rounds."""
    units = []
    for copies in zip(*(p.units for p in profiles), strict=True):
        fields = ("forward_s", "backward_input_s", "backward_weight_s")
        more = {field: statistics.median(getattr(c, field) for c in copies) for field in fields}
        units.append(copies[0].model_copy(update=more))
    return profiles[0].model_copy(update={"units": tuple(units)})


def agreed(value: Any, world: World) -> Any:
    """Rank 0's."""
    box = [value]
    dist.broadcast_object_list(box, group=world.group, group_src=0)
    return box[0]


if __name__ == "__main__":
    main()
