"""Trains by a plan, goes on from a checkpoint, and checks that its numbers are those of one process."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Unpack, get_args

import torch
import torch.distributed as dist
from torch import nn

from outsize.api.asked import AUTO, AskedRun
from outsize.api.elastic import ElasticRun, elastic_plan, request_like
from outsize.api.memory_room import MemoryRoom
from outsize.api.memory_share import MemoryShare
from outsize.api.options import CheckOptions, ParallelizeOptions, reads_options, request_of
from outsize.api.planning import Args, Kwargs, plan_case
from outsize.api.problem import Profiler, case_of, cluster_of
from outsize.api.records import Checkpoint, OnOutOfMemory, Request
from outsize.capture.measure.local_cluster import cluster_of_run, find_cluster
from outsize.capture.models.planned_precision import warn_of_precision
from outsize.capture.recording.fallbacks import insist_on_module
from outsize.device.accelerators import CPU, device_type, is_accelerator
from outsize.errors import BadOption
from outsize.errors.interruptions import suppressed
from outsize.ir.answers.compilation import GraphUse
from outsize.ir.answers.request import LayoutOptions, PlanRequest
from outsize.ir.answers.verdict import Verdict
from outsize.ir.cluster import Cluster
from outsize.ir.hardware.devices import places_in
from outsize.ir.plan import Plan
from outsize.planner.advice.compilation import BACKEND, compilation_of
from outsize.planner.advice.device_graphs import graph_use_of
from outsize.planner.advice.utilisation import utilisation
from outsize.planner.costs.kernel_stacks import stack_of_run
from outsize.planner.costs.roofline import roofline
from outsize.planner.search.search import search
from outsize.policies.activations import KEEP
from outsize.program.objects import model_copy
from outsize.program.source_line import warn_user
from outsize.run.checkpoint.read import CheckpointReader
from outsize.run.stage.batchnorm import use_local_statistics
from outsize.run.weights.load import load_weights, source_for
from outsize.run.weights.safetensors import WeightFiles
from outsize.schedules.families import DEFAULT
from outsize.schedules.refine import by_blocks
from outsize.train.batch.batch import Batch
from outsize.train.batch.batch_dims import SplitTable
from outsize.train.batch.wrapped_models import insist_on_unwrapped
from outsize.train.check.check import Question, enough_steps, verify
from outsize.train.check.trainers import check_trainer
from outsize.train.checkpoint.checkpoints import newest_checkpoint
from outsize.train.checkpoint.loop.attached import ResumeNote
from outsize.train.checkpoint.weights import CheckpointWeights
from outsize.train.context.options import EngineOptions, RankOptions
from outsize.train.crew.devices import cluster_of as cluster_of_places
from outsize.train.crew.devices import places_for, places_of
from outsize.train.engine.engine import Engine
from outsize.train.engine.factory import agreed, make_engine
from outsize.train.measure.training_case import TrainingCase, known_tapes
from outsize.train.ranks.divided_weights import insist_on_bits
from outsize.train.world.handshake import shake_hands
from outsize.train.world.join import join
from outsize.train.world.world import World

# A check without a plan splits a model into this many stages and microbatches.
STAGES: Final = 2
MICROBATCHES: Final = 4


@reads_options(ParallelizeOptions)
def parallelize(
    model: nn.Module,
    args: Args = (),
    kwargs: Kwargs | None = None,
    *,
    plan: Plan | Request | None = None,
    **options: Unpack[ParallelizeOptions],
) -> Engine:
    """Returns an engine that trains by the plan: under torchrun a process per stage, else all stages here.

    `outsize.parallelize` (ops/training.py) explains the options. It is this function with two callbacks more:
    one that watches the ranks, and one that publishes the run; here nobody does.

    Raises WorldMismatch, ModelMismatch, BadPlan, UnsupportedPlan, BadOption, BadWeights, UnknownDevice,
    BadCheckpoint.
    """
    insist_on_module(model)
    insist_on_unwrapped(model)
    asked = AskedRun.of(plan, options)
    ranks, plan = asked.ranks, asked.plan
    named = None if ranks.devices is None else places_of(ranks.devices)
    engine_options = asked.engine_options(model, utilisation)
    kind = device_type() if plan is None or is_accelerator(plan.stages[0].device) else CPU
    world = join(kind, backend=ranks.backend)
    group, host = world.group, world.host
    if world.world_size == 1 and (named or (plan is not None and places_in(plan.cluster))):
        group = host = None  # one process, started by a launcher
    given = plan
    if world.sizes and plan is not None and plan.axes.world_size != world.world_size:
        plan = None  # an elastic run plans again for the ranks that are there
    if host is not None:
        _check_no_devices(named, world)
        use_local_statistics(model)
        shake_hands(host, plan, model, asked.loss.function)
    saved = _saved(asked.checkpoint.folder, world, host)
    if saved is not None:
        engine_options = _with_weights(engine_options, model, saved)
        plan = plan or (None if given else _saved_plan(saved, asked, kind, group))
    with warnings.catch_warnings():
        if world.rank:
            warnings.simplefilter("ignore", SplitTable)  # rank 0 says it
        case = case_of(model, args, kwargs, asked.example)
    case = replace(case, in_loop=bool(asked.request.loop), reads=True)
    share = MemoryShare.of(ranks.memory_share, world)
    whole = partial(_cluster_here, asked, world, kind, named, case.batch.size)
    room = _memory_room(asked, world, whole)
    plan = _if_it_fits(plan, room)
    if plan is None:
        before = given or (None if saved is None else Plan.of_document(saved.values["plan"]))
        elastic = _elastic_run(world, kind, asked, before) if world.sizes and group is not None else None
        ahead = partial(_record_ahead, case, asked)
        if elastic is None:
            plan = agreed(host, lambda: _made_plan(case, asked, _within(room, whole()), group is None), ahead)
        else:
            elastic = elastic.within(lambda cluster: _within(room, share.of_cluster(cluster)))
            plan = agreed(host, lambda: _elastic_plan(case, asked.request, elastic, given), ahead)
    case = case.in_pieces(plan.loss_pieces, plan.module_pieces)
    warn_of_precision(plan, model, speaks=not world.rank)
    if plan.shards and group is not None:
        plan = by_blocks(plan, case.captured(plan.microbatch_size).graph)
    engine = make_engine(
        model,
        plan,
        group,
        replace(
            _decided(engine_options, asked, case, plan),
            known=known_tapes(case),
            on_out_of_memory=None if room is None else partial(room.shrink, plan),
        ),
        RankOptions(
            places=places_for(plan, named) if group is None else None,
            own_batches=ranks.own_batches,
            offload_folder=ranks.offload_folder,
        ),
    )
    share.enforce(plan, engine.crew, world)
    replica_count = engine.crew.replicas.count if engine.crew.replicas.own_batches else 1
    engine.prepare(case.batch.resized(max(1, plan.batch_size // replica_count)))
    _go_on(engine, asked.checkpoint, saved)
    engine.begin(world)
    return engine


@reads_options(CheckOptions)
def check(
    model: nn.Module | None = None,
    args: Args = (),
    kwargs: Kwargs | None = None,
    **options: Unpack[CheckOptions],
) -> Verdict:
    """Runs the model split and plain on the same batches; compares loss, gradients, buffers and parameters.

    The model itself is not changed. Before the last update the gradients of a second batch are added, in
    which a value that became a constant of the recorded program shows. The options:

    - `plan`: the plan to check; without one the planner cuts the model by the five options that follow.
    - `stages` (2), `microbatches` (4, or 1 with `bn="sync"`), `schedule` ("1f1b"), `recompute` ("none") and
      `bn` ("micro").
    - `processes`: True runs one process per rank; by default all ranks take turns in this one.
    - `steps` (1, or 3 where the model or loss keeps state from call to call): the AdamW steps that are
      compared; `seed` (0): of random numbers in the model.
    - `second_batch`: `outsize.microbatch(*args, target=..., **kwargs)`, of the same kind; by default one is
      made of the first: samples in another order, and floating-point tensors without samples halved. Where
      the model refuses that, or nothing can be changed, there is none.
    - `weight_files`: as in `parallelize`; a copy of the model gets all of them.
    - `loss_fn`, `target`, `batch_dims`: as for `plan`.
    - `trainer`: in place of a model, a trainer of `outsize.integrations.transformers`, also one of TRL's or
      of your own behind it. Two updates (`steps`) run plain and split, each in a fork, over processes on each
      rank; `first_divergence` names the first logged number, gradient or weight that differs, its update, and
      the rank if it is another than rank 0. All ranks return the same verdict.

    Raises BadOption, UnsupportedPlan, and as `plan`.
    """
    trainer = options.get("trainer")
    if trainer is not None:
        return check_trainer(trainer, **_steps_alone(model, args, kwargs, options))
    insist_on_module(model)
    assert model is not None
    plan, weights, processes = (
        options.get("plan"),
        options.get("weight_files"),
        options.get("processes", False),
    )
    if not isinstance(plan, Plan | None):
        raise BadOption(
            f"plan is a {type(plan).__name__}, no Plan",
            numbers="what a check asks for itself: stages, microbatches, schedule, recompute, bn",
            next_step="outsize.check(model, (x,), stages=2), or plan=outsize.plan(model, (x,), request=...)",
        )
    if plan is not None:
        plan.check_runs()
    if plan is not None and not processes:
        insist_on_bits(plan)
    model = model if weights is None else _loaded(model, weights)
    case = case_of(model, args, kwargs, options)
    request = _request_to_check(options, case.batch.size)
    start = time.perf_counter()
    count = request.microbatches or 1
    captured = case.captured(-(-case.batch.size // count) if plan is None else plan.microbatch_size)
    capture_s = time.perf_counter() - start
    if plan is None:
        cluster = find_cluster(f"{request.stages}xcpu")
        costs = roofline(captured.graph, cluster.devices[0])
        plan = search(request, {count: (captured.graph, costs)}, cluster)
    planned = case.in_pieces(plan.loss_pieces, plan.module_pieces).captured(captured.graph.batch_size)
    plan.owners(planned.graph)  # a plan of another model, or with other units, must not pass
    question = Question(
        model=model,
        batch=case.batch,
        loss_fn=case.loss_fn,
        plan=plan,
        captured=captured,
        planned=planned,
        capture_s=capture_s,
        steps=options.get("steps") or enough_steps(captured),
        seed=options.get("seed", 0),
        second_batch=_second_batch(case, options),
    )
    return verify(question, processes=processes)


def _steps_alone(model: object, args: Args, kwargs: Kwargs | None, options: CheckOptions) -> dict[str, int]:
    """Returns how many updates of a trainer are compared. Raises BadOption for what its model would want."""
    others = [name for name, value in options.items() if name not in ("trainer", "steps") and value]
    if model is not None or args or kwargs or others:
        raise BadOption(
            "a trainer is checked as it is: it has its model, its batches, and its outsize= options",
            numbers=", ".join(others) or "a model, or its arguments",
            next_step="outsize.check(trainer=trainer), with steps= at most",
        )
    steps = options.get("steps")
    return {} if steps is None else {"updates": steps}


def _second_batch(case: TrainingCase, options: CheckOptions) -> Batch | None:
    """Returns the user's second batch, whose samples lie as in the first. Raises BadOption."""
    second = options.get("second_batch")
    if second is None:
        return None
    if not isinstance(second, Batch):
        raise BadOption(
            f"second_batch is a {type(second).__name__}",
            next_step="second_batch=outsize.microbatch(x, target=y), as in model(x) and loss_fn(output, y)",
        )
    return case.sized(second, options.get("batch_dims"))


def _loaded(model: nn.Module, weights: str | Path) -> nn.Module:
    """Returns a copy of the model with all its weights."""
    model = model_copy(model)
    load_weights(model, source_for(model, WeightFiles(weights)), torch.device("cpu"), set())
    return model


def _decided(engine_options: EngineOptions, run: AskedRun, case: TrainingCase, plan: Plan) -> EngineOptions:
    """Returns the options with the answers to compiled="auto" and device_graphs."""
    asked = run.compile.compiled, run.compile.device_graphs
    if asked[1] not in (True, False, AUTO):
        raise BadOption(
            f"device_graphs={asked[1]!r} says nothing", next_step='device_graphs=True, False or "auto"'
        )
    if asked[1] is True:
        runs_stages = plan.form == "tape"
        use = GraphUse(on=runs_stages, cause="asked" if runs_stages else "modules")
        engine_options = replace(engine_options, device_graphs=use)
    if AUTO not in asked:
        return engine_options
    cluster = cluster_of(run.request.cluster or plan.cluster)
    graph, device = case.captured(plan.microbatch_size).graph, cluster.devices[0]
    if asked[1] == AUTO:
        engine_options = replace(engine_options, device_graphs=graph_use_of(graph, plan, device))
    if asked[0] != AUTO or plan.slices > 1:
        return engine_options
    compilation = compilation_of(graph, plan, device)
    return replace(engine_options, compiled=compilation.backend, compilation=compilation)


def _saved(
    folder: str | Path | None, world: World, host: dist.ProcessGroup | None
) -> CheckpointReader | None:
    """Returns the newest checkpoint in the folder; None without a folder, or where it has none."""
    if folder is None:
        return None
    saved = newest_checkpoint(folder, host)
    if saved is None and world.rank == 0:
        warn_user(f"no checkpoint in {folder}: the run begins at step 0", ResumeNote)
    if saved is not None and not saved.values.get("weights", True) and world.rank == 0:
        warn_user(
            f"{saved.folder} was saved without weights, so those of the model stay: "
            "engine.weights.load(FOLDER)",
            ResumeNote,
        )
    return saved


def _go_on(engine: Engine, checkpoint: Checkpoint, saved: CheckpointReader | None) -> None:
    """Sets the engine to what was saved, once it is known that it can save itself in such a way."""
    saves_in = checkpoint.saves_in or checkpoint.folder
    if saves_in is not None:
        engine.state.insist_on_resumable(saves_in)
    if saved is not None:
        engine.state.resume(saved.folder)


def _with_weights(options: EngineOptions, model: nn.Module, saved: CheckpointReader) -> EngineOptions:
    """Returns options by which a model on meta gets its weights from the checkpoint."""
    on_meta = any(weight.is_meta for weight in model.parameters())
    if options.weights is not None or not on_meta:
        return options
    return replace(options, weights=CheckpointWeights(saved))


def _saved_plan(
    saved: CheckpointReader, run: AskedRun, kind: str, group: dist.ProcessGroup | None
) -> Plan | None:
    """Returns the checkpoint's plan, where no other is asked for and these ranks can run it."""
    plan = Plan.of_document(saved.values["plan"])
    asked = run.request.given() or run.ranks.devices is not None
    is_here = is_accelerator(plan.stages[0].device) == is_accelerator(kind)
    ranks = plan.axes.group_size == 1 if group is None else plan.axes.world_size == group.size()
    return plan if ranks and is_here and not asked else None


def _devices_of_this_run(world: World, kind: str) -> Cluster | int | str:
    """Returns a device for each process of the run; all of this machine for a process that is alone."""
    if kind == CPU:
        return world.world_size
    return "local" if world.group is None else cluster_of_run(world.device_type, world.machines)


def _elastic_run(world: World, kind: str, asked: AskedRun, before: Plan | None) -> ElasticRun:
    """Returns what is known of a run whose number of ranks may change."""
    folder, wanted = asked.checkpoint.folder, asked.request.cluster

    def cluster(ranks: int) -> Cluster:
        if wanted is not None:
            return cluster_of(wanted)
        if kind == CPU:
            return find_cluster(f"{ranks}xcpu")
        each = max(world.machines)
        whole = ranks % each == 0 and len(world.machines) > 1
        known = (
            world.machines if ranks == world.world_size else (each,) * (ranks // each) if whole else (ranks,)
        )
        return cluster_of_run(world.device_type, known)

    return ElasticRun(
        ranks=world.world_size,
        sizes=world.sizes,
        cluster=cluster,
        folder=None if folder is None else Path(folder),
        before=before,
        prefers_exact=asked.request.exact is None,
    )


def _cluster(
    asked: str | Cluster | None,
    stages: int | None,
    devices: tuple[str, ...] | None,
    here: Cluster | int | str,
) -> str | Cluster:
    """Returns the cluster to plan for: the one asked for, the named devices, or what is `here`.

    `here` is a cluster, its name, or a number of CPU processes. Raises BadOption for devices and a cluster.
    """
    if devices is not None and asked is not None:
        raise BadOption(
            f"cluster={asked!r} cannot be used together with devices=, which are the cluster",
            next_step="leave out cluster=",
        )
    if devices is not None:
        return cluster_of_places(devices, stages)
    if asked is not None:
        return asked
    return f"{max(here, stages or 1)}xcpu" if isinstance(here, int) else here


def _memory_room(asked: AskedRun, world: World, whole: Callable[[], Cluster]) -> MemoryRoom | None:
    """Returns how much memory plans may fill; None where a run ends for want of memory. Raises BadOption."""
    choice = world.on_oom if asked.ranks.on_oom is None else asked.ranks.on_oom
    if choice not in get_args(OnOutOfMemory):
        raise BadOption(
            f"on_oom={choice!r} is unknown", next_step="outsize.Ranks(on_oom='raise'), or 'replan'"
        )
    if choice == "raise":
        return None
    return MemoryRoom.of(asked.checkpoint.folder, whole())


def _within(room: MemoryRoom | None, cluster: Cluster) -> Cluster:
    """Returns the cluster with the memory that plans may fill."""
    return cluster if room is None else room.of_cluster(cluster)


def _if_it_fits(plan: Plan | None, room: MemoryRoom | None) -> Plan | None:
    """Returns the plan unless one that was predicted to hold as much ran out of memory."""
    return plan if plan is None or room is None or room.holds(plan) else None


def _cluster_here(
    asked: AskedRun, world: World, kind: str, devices: tuple[str, ...] | None, batch_size: int
) -> Cluster:
    """Returns the cluster that a run without a plan is planned for. Raises BadOption and UnknownDevice."""
    stages = request_of(asked.request.layout, batch_size).stages
    cluster = cluster_of(_cluster(asked.request.cluster, stages, devices, _devices_of_this_run(world, kind)))
    return MemoryShare.of(asked.ranks.memory_share, world).of_cluster(cluster)


def _elastic_plan(case: TrainingCase, asked: Request, run: ElasticRun, given: Plan | None) -> Plan:
    """Returns the plan of an elastic run for the ranks that are there."""
    request = request_like(given) if given else request_of(asked.layout, case.batch.size)
    request = request.model_copy(update={"every_device": True})
    return elastic_plan(case, request, Profiler.of(asked), run)


def _made_plan(case: TrainingCase, asked: AskedRun, cluster: Cluster, alone: bool) -> Plan:
    """Returns the plan of a run that has none; one process `alone` runs pipelines over its devices."""
    layout = asked.request.layout
    request = request_of(layout, case.batch.size).model_copy(update={"every_device": True})
    if alone and request.has_group_axes and asked.request.cluster is None and not asked.ranks.devices:
        count = request.mesh(request.stages or 1).world_size
        raise BadOption(
            f"{request.mesh(1).beyond_pp} wants several devices, and this is one process on its own",
            numbers=f"{count} processes at least",
            next_step=f"outsize run --nproc-per-node {count} train.py",
        )
    if cluster.devices[0].is_accelerator and "kernels" not in layout:
        compiled, graphs = asked.compile.compiled, asked.compile.device_graphs
        stack = stack_of_run(compiled=compiled in (True, BACKEND), device_graphs=graphs is True)
        request = request.model_copy(update={"kernels": stack})
    if alone and not (request.has_group_axes or layout.get("axes") or request.in_slices):
        request = request.model_copy(update={"exact": True})
    return plan_case(case, request, cluster, Profiler.of(asked.request)).plan


def _record_ahead(case: TrainingCase, asked: AskedRun) -> None:
    """Records the microbatch that a rank is likely to run, while another one plans."""
    with suppressed():  # What is wrong is said by the rank that plans.
        size = case.batch.size
        count = request_of(asked.request.layout, size).total_microbatches
        if count is not None and 0 < count <= size:
            case.captured(-(-size // count))


def _request_to_check(options: CheckOptions, batch_size: int) -> PlanRequest:
    """Returns the request of a check without a plan, as small as it can show a difference."""
    sync = options.get("bn") == "sync"
    asked: LayoutOptions = {
        "stages": options.get("stages") or STAGES,
        "microbatches": options.get("microbatches") or (1 if sync else MICROBATCHES),
        "schedule": options.get("schedule") or DEFAULT.name,
        "recompute": options.get("recompute") or KEEP.name,
        "bn": options.get("bn"),
    }
    return request_of(asked, batch_size)


def _check_no_devices(places: tuple[str, ...] | None, world: World) -> None:
    if places is not None:
        raise BadOption(
            "devices= is for one process, and this is one of several",
            numbers=f"rank {world.rank} of {world.world_size}; devices {', '.join(places)}",
            next_step="leave out devices= (each process has its own), or start the script with python alone",
        )
