"""One process of `outsize run MODEL`: build the model, agree on a plan, train, leave the figures in a file.

Started by cli/launching.py under train/launch.py as `python -m outsize.cli.worker FOLDER`; rank 0 has the
terminal and shows the bars.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from outsize import api
from outsize.cli.job import Folder, Job, Outcome
from outsize.cli.screen import Screen, error_document, warn_on_one_line
from outsize.cli.subject import Subject, make_subject
from outsize.errors import OutsizeError
from outsize.ir.base import Record
from outsize.ir.graph import ModelGraph
from outsize.ir.plan import Plan
from outsize.ir.timeline import Timeline
from outsize.schedules.planned import read
from outsize.train.devices import cluster_of, places_of
from outsize.train.engine import Engine
from outsize.train.launch import World, join, leave
from outsize.train.memory_watch import MemoryWatch, with_memory

# The timeline that is kept is the median one of so many last steps.
WATCHED = 5
Decision = tuple[Plan, ModelGraph, Timeline]
Timed = tuple[float, Timeline]  # when this rank's first action began, and what all did


def main(folder: Folder) -> None:
    """Do the folder's job as this rank."""
    job = Job.model_validate_json(folder.job.read_text(encoding="utf-8"))
    serve(folder, lambda world: train(job, world), as_json=job.as_json)


def serve(
    folder: Folder, work: Callable[[World], Record], *, as_json: bool, device_type: str = "cpu"
) -> None:
    """Leave rank 0's outcome in the folder, and an error of ours there as well as to the launcher."""
    world = join(device_type)
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            outcome = work(world)
    except OutsizeError as error:
        folder.error.write_text(json.dumps(error_document(error)), encoding="utf-8")
        # no frame of the user's is in the traceback: without it the launcher shows the line alone
        raise error.with_traceback(None) from None
    if world.rank == 0:
        folder.outcome.write_text(outcome.to_json(), encoding="utf-8")
    leave(world)


def train(job: Job, world: World) -> Outcome:
    """The job on this rank; every rank returns the outcome."""
    screen = Screen(job.as_json)
    warn_on_one_line()
    if world.rank:
        warnings.simplefilter("ignore")  # rank 0 says it
    with screen.working(f"building {job.model}"):
        subject = make_subject(job.model, job.input, job.batch, meta=job.weights is not None, seed=job.seed)
    plan, graph, predicted = _agree(world, job, subject, screen)
    engine = _engine(job, subject, plan)
    watch = MemoryWatch(engine.crew.device or engine.crew.device_of(0))
    with watch if job.watch_memory else contextlib.nullcontext():
        losses, steps_s, timelines = _steps(engine, subject, job.steps, screen)
    origin_s, middle = sorted(timelines, key=lambda t: t[1].duration_s)[len(timelines) // 2]
    return Outcome(
        plan=plan,
        graph=graph,
        losses=losses,
        steps_s=steps_s,
        predicted=predicted,
        measured=with_memory(middle, origin_s, _of_all(world, watch)),
        used=engine.report(middle),
    )


def _of_all(world: World, watch: MemoryWatch) -> Sequence[list[tuple[float, int]]]:
    """The readings of each rank."""
    found: list[Any] = [watch.readings] * world.world_size
    if world.group is not None:
        dist.all_gather_object(found, watch.readings, group=world.group)
    return found


def _agree(world: World, job: Job, subject: Subject, screen: Screen) -> Decision:
    """Decided on rank 0 and sent to all: measured costs differ from process to process."""
    box: list[Any] = [_decide(world, job, subject, screen) if world.rank == 0 else None]
    if world.group is not None:
        dist.broadcast_object_list(box, group=world.group, group_src=0)
    return box[0]


def _decide(world: World, job: Job, subject: Subject, screen: Screen) -> Decision:
    plan = job.plan or _make_plan(world, job, subject, screen)
    with screen.working("pricing the plan"):
        measured = job.measure or is_measured(plan)
        priced, graph, timeline = api.price(plan, *subject.call, **subject.loss, measured=measured)
    return priced.model_copy(update={"why": plan.why}), graph, timeline


def is_measured(plan: Plan) -> bool:
    """A plan made of measured times is priced by measured times again, not compared with estimates."""
    return plan.expected is not None and plan.expected.source == "measured"


def _make_plan(world: World, job: Job, subject: Subject, screen: Screen) -> Plan:
    stages, places = job.stages or world.world_size, places_of(job.devices) if job.devices else ()
    stages = max(stages, len(places))
    with screen.bar("planning") as progress:
        return api.plan(
            *subject.call,
            **subject.loss,
            cluster=cluster_of(places, stages) if places else f"{max(stages, world.world_size)}xcpu",
            batch_size=job.batch,
            microbatches=job.microbatches,
            stages=stages,
            schedule=read(job.actions) if job.actions else job.schedule,
            measured=job.measure,
            progress=progress,
        )


def _engine(job: Job, subject: Subject, plan: Plan) -> Engine:
    def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=job.lr, fused=plan.streams or None)

    how: dict[str, Any] = {"plan": plan, "optimizer": adamw, "seed": job.seed, "weights": job.weights}
    how |= {"devices": job.devices} if job.devices else {}
    return api.parallelize(*subject.call, **subject.loss, **how)


def _steps(
    engine: Engine, subject: Subject, steps: int, screen: Screen
) -> tuple[tuple[float, ...], tuple[float, ...], list[Timed]]:
    """Loss and seconds of each step, and the last timelines; the batch is the same in all."""
    losses, seconds, timelines = [], [], deque[Timed](maxlen=WATCHED)
    with screen.bar("training") as progress:
        progress(0, steps)
        for done in range(steps):
            start = time.perf_counter()
            result = engine.step(*subject.args, target=subject.objective.target, **subject.kwargs)
            losses.append(float(result.loss))
            seconds.append(time.perf_counter() - start)
            origin_s = min((s[3] for s in engine.crew.own_spans()), default=start)
            timelines.append((origin_s, engine.timeline()))
            progress(done + 1, steps)
    return tuple(losses), tuple(seconds), list(timelines)


if __name__ == "__main__":
    main(Folder(path=Path(sys.argv[1])))
