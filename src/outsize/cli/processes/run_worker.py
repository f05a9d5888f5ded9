"""Runs one process of `outsize run MODEL`: builds the model, agrees on a plan, trains, writes the figures to
a file.

It is started by cli/processes/launch.py under ops/launch/launch.py as `python -m
outsize.cli.processes.run_worker FOLDER`; rank 0 has the terminal and shows the bars.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import nn

from outsize import api
from outsize.api.elastic import ElasticRun, elastic_plan, request_like
from outsize.api.memory_share import MemoryShare
from outsize.api.options import CaseOptions
from outsize.api.planning import plan_case
from outsize.api.problem import Profiler, case_of, cluster_of
from outsize.api.records import Ranks, Watch
from outsize.capture.measure.local_cluster import cluster_of_run
from outsize.cli.model_input import ModelInput, make_model_input
from outsize.cli.processes.job import FinishedRun, JobFolder, RunJob, RunOutcome
from outsize.cli.screen import Screen, error_document, warn_on_one_line
from outsize.errors import OutsizeError
from outsize.ir.base import Record
from outsize.ir.hardware.devices import places_in
from outsize.ir.plan import Plan
from outsize.ops.publish.recorder import RunRecorder
from outsize.ops.training import parallelize
from outsize.planner.advice.overview import Outlook
from outsize.run.checkpoint.read import CheckpointReader
from outsize.run.transport.control_messages import broadcast_json
from outsize.train.checkpoint.checkpoints import newest_folder
from outsize.train.crew.devices import cluster_of as cluster_of_places
from outsize.train.crew.devices import places_of
from outsize.train.engine.engine import Engine
from outsize.train.measure.units import is_timed_here
from outsize.train.world.join import join
from outsize.train.world.variables import devices_needed
from outsize.train.world.world import World, device_type_for, leave, visible_accelerators

_OUTLOOK = TypeAdapter(Outlook)


def main(folder: JobFolder) -> None:
    """Runs the folder's job as this rank."""
    job = RunJob.model_validate_json(folder.job.read_text(encoding="utf-8"))
    serve(folder, lambda world: train(job, world), as_json=job.as_json, device_type=lambda: _device_type(job))


def _device_type(job: RunJob) -> str:
    """Returns the type of this process's device; where one process uses several, it has none of its own."""
    plan = job.plan
    if job.devices or (plan is not None and places_in(plan.cluster)):
        return "cpu"
    needed = devices_needed(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), os.environ)
    return device_type_for(plan, needed, visible_accelerators)


def serve(
    folder: JobFolder,
    work: Callable[[World], Record | None],
    *,
    as_json: bool,
    device_type: Callable[[], str],
) -> None:
    """Writes rank 0's outcome to the folder; an error of outsize goes there as well as to the launcher."""
    try:
        world = join(device_type())
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            outcome = work(world)
    except OutsizeError as error:
        folder.error.write_text(json.dumps(error_document(error)), encoding="utf-8")
        # The traceback has no frame of the user's; without it the launcher shows only the message.
        raise error.with_traceback(None) from None
    if world.rank == 0 and outcome is not None:
        folder.outcome.write_text(outcome.to_json(), encoding="utf-8")
    leave(world)


def train(job: RunJob, world: World) -> RunOutcome | FinishedRun:
    """Runs the job on this rank; every rank returns the outcome, a FinishedRun where no step is left."""
    screen = Screen(job.as_json)
    warn_on_one_line()
    if world.rank:
        warnings.simplefilter("ignore")  # rank 0 shows them
    with screen.working(f"building {job.model}"):
        inputs = make_model_input(
            job.model, job.input, job.request.batch_size, meta=job.weights is not None, seed=job.seed
        )
    chosen = _agree(world, job, inputs, screen)
    engine = _engine(job, inputs, chosen.plan)
    if engine.steps >= job.steps:
        if not world.rank:
            screen.note(_nothing_left(engine.steps, job))
        return FinishedRun(plan=chosen.plan, predicted=chosen.timeline)
    recorder = RunRecorder(engine, watched=job.watched)
    with recorder.watching():
        _train(engine, recorder, inputs, job, screen)
    measured, history = recorder.typical()
    return RunOutcome(
        plan=chosen.plan,
        graph=chosen.graph,
        profile=chosen.profile,
        history=history,
        predicted=chosen.timeline,
        measured=measured,
        used=engine.report(measured),
    )


def _nothing_left(steps: int, job: RunJob) -> str:
    """Words a run that was killed behind its last save, or that has been started once more."""
    return (
        f"outsize: {job.checkpoint} has a run of {steps} steps already, and --steps {job.steps} counts all "
        f"of them, so nothing is left to do. Next: --steps {steps + job.steps}, or another --checkpoint DIR"
    )


def _agree(world: World, job: RunJob, inputs: ModelInput, screen: Screen) -> Outlook:
    """Returns rank 0's decision on all ranks: measured costs differ from process to process."""
    decided = _decide(world, job, inputs, screen) if world.rank == 0 else None
    if world.host is not None:
        text = broadcast_json(decided and _OUTLOOK.dump_json(decided).decode(), world.host)
        decided = decided or _OUTLOOK.validate_json(text)
    assert decided is not None
    return decided


def _decide(world: World, job: RunJob, inputs: ModelInput, screen: Screen) -> Outlook:
    if world.sizes and world.host is not None:
        plan = _elastic_plan(world, job, inputs, screen)
    else:
        plan = job.plan or _make_plan(world, job, inputs, screen)
    with screen.working("pricing the plan"):
        # A plan with the times of other machines is tried on this one, whose times are estimated then.
        measured = job.measure or (is_measured(plan) and is_timed_here(cluster_of(plan.cluster)))
        priced = api.outlook(*inputs.call, **inputs.loss, plan=plan, measured=measured)
    return replace(priced, plan=priced.plan.model_copy(update={"why": plan.why}))


def is_measured(plan: Plan) -> bool:
    """Tells whether a plan was made of measured times; then it is priced by measured times again."""
    return plan.expected is not None and plan.expected.source == "measured"


def _elastic_plan(world: World, job: RunJob, inputs: ModelInput, screen: Screen) -> Plan:
    """Returns the plan for the ranks that are there, of a run whose number of ranks may change."""
    newest = None if job.checkpoint is None else newest_folder(job.checkpoint)
    saved = None if newest is None else Plan.of_document(CheckpointReader(Path(newest)).values["plan"])
    if job.plan is not None and job.plan.axes.world_size == world.world_size:
        return job.plan
    request = job.request if job.plan is None else request_like(job.plan)
    known = world.machines or (world.world_size,)
    share = MemoryShare(world.memory_share)
    run = ElasticRun(
        ranks=world.world_size,
        sizes=world.sizes,
        cluster=lambda ranks: share.of_cluster(
            cluster_of_run(world.device_type, known if sum(known) == ranks else (ranks,))
        ),
        folder=job.checkpoint,
        before=job.plan or saved,
        prefers_exact=True,
    )
    options: CaseOptions = {**inputs.loss}
    with screen.bar("planning") as progress:
        case = case_of(*inputs.call, options)
        asked = request.model_copy(update={"every_device": True})
        return elastic_plan(case, asked, Profiler(job.measure, progress), run)


def _make_plan(world: World, job: RunJob, inputs: ModelInput, screen: Screen) -> Plan:
    from_places = places_of(job.devices) if job.devices else ()
    stages = max(job.request.stages or world.world_size, len(from_places))
    if from_places:
        cluster = cluster_of(cluster_of_places(from_places, stages))
    else:
        cluster = cluster_of_run(world.device_type, world.machines or (max(stages, world.world_size),))
    cluster = MemoryShare(world.memory_share).of_cluster(cluster)
    # Several processes share the work along any axis; one alone runs the stages of a pipeline.
    alone = world.world_size == 1 or from_places
    request = job.request.model_copy(update={"stages": stages}) if alone else job.request
    with screen.bar("planning") as progress:
        profiler = Profiler(job.measure, progress)
        options: CaseOptions = {**inputs.loss}
        return plan_case(case_of(*inputs.call, options), request, cluster, profiler).plan


def _engine(job: RunJob, inputs: ModelInput, plan: Plan) -> Engine:
    def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=job.lr, fused=plan.streams or None)

    return parallelize(
        *inputs.call,
        **inputs.loss,
        plan=plan,
        optimizer=adamw,
        weight_files=job.weights,
        devices=Ranks(job.devices or None, seed=job.seed),
        resume=job.checkpoint,
        callbacks=[Watch(total_steps=job.steps)],
    )


def _train(engine: Engine, recorder: RunRecorder, inputs: ModelInput, job: RunJob, screen: Screen) -> None:
    """Takes the steps that are left; the batch is the same in all."""
    save = _saver(engine, job)
    with screen.bar("training") as progress:
        progress(engine.steps, job.steps)
        while engine.steps < job.steps:
            recorder.step(inputs.args, inputs.kwargs, inputs.objective.target)
            save()
            progress(engine.steps, job.steps)


def _saver(engine: Engine, job: RunJob) -> Callable[[], None]:
    """Returns what saves a checkpoint after a step, where one is due."""
    folder = job.checkpoint
    if folder is None:
        return lambda: None

    def save() -> None:
        if engine.steps == job.steps:
            engine.save(folder, keep=job.keep)
        else:
            engine.state.checkpoint(folder, every=job.every, keep=job.keep)

    return save


if __name__ == "__main__":
    main(JobFolder(path=Path(sys.argv[1])))
