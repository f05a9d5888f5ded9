"""Tunes a plan on the devices that it is for: a profile, then a few real steps chosen by the simulator."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, TypeVar, Unpack, final

import torch.distributed as dist
from torch import nn

from outsize.api.options import TuneOptions, reads_options, request_of
from outsize.api.planning import Args, Kwargs
from outsize.api.problem import Profiler, asked_in, case_of, cluster_of
from outsize.api.records import OF_A_SEARCH
from outsize.capture.measure.local_cluster import cluster_of_run
from outsize.capture.measure.units import Progress
from outsize.device.accelerators import CPU, device_type
from outsize.device.cores import usable_cores
from outsize.device.malloc import keep_freed_memory
from outsize.errors import BadOption
from outsize.ir.answers.request import PlanRequest
from outsize.ir.answers.tuned import Tuned
from outsize.ir.base import Record
from outsize.ir.cluster import Cluster
from outsize.ir.plan import Plan
from outsize.ir.profile import Profile, ProfileSet, UnitCost
from outsize.ir.timeline import Timeline
from outsize.planner.search.tune import TRIALS, Tuner
from outsize.run.transport.control_messages import all_gather_json, broadcast_json
from outsize.train.context.options import EngineOptions
from outsize.train.engine.factory import make_engine
from outsize.train.measure.training_case import TrainingCase
from outsize.train.measure.units import how_on, measure_sizes
from outsize.train.world.join import join
from outsize.train.world.world import World

# Microbatches per stage that are profiled, and those that are interpolated between two profiles.
_PROFILED: Final = (1, 2, 4)
_BETWEEN: Final = (1.5, 3)
_SECONDS: Final = ("forward_s", "backward_input_s", "backward_weight_s", "spread_s")


AnyRecord = TypeVar("AnyRecord", bound=Record)


@reads_options(TuneOptions)
def tune(
    model: nn.Module, args: Args = (), kwargs: Kwargs | None = None, **options: Unpack[TuneOptions]
) -> Tuned:
    """Returns the fastest plan of those that ran one real step each (forward and backward).

    Called by every process of a run, one for each device, with the same arguments. The units are timed, the
    best predicted plan runs one step, its stage times correct the profile, and so on until no other plan is
    predicted to be 2 % faster. The model stays as it is; each trial works on a copy. The options are those
    of `plan` but `measured`, and:

    - `trials`: the real steps at most.
    - `how`: the laps and threads of the profile; `progress(done, total)` is called after each lap.
    - `tried`: called with each trial, on rank 0.
    - `seed`: of random numbers in the model; 0 by default.

    Raises BadOption in a single process, and as `plan`.
    """
    asked = asked_in(options)
    if asked.inference:
        raise BadOption(
            "tune runs training steps, and inference has none",
            numbers="inference=True",
            next_step="outsize.plan(model, args, request=outsize.Request(inference=True))",
        )
    asked.insist_on_none(
        "tune", ("lora", "quantize", "measured"), "leave it out: tune times the model as it is"
    )
    asked.insist_on_none("tune", OF_A_SEARCH, "leave it out: outsize.plan follows it")
    where = None if asked.cluster is None else cluster_of(asked.cluster)
    kind = device_type() if where is None or where.devices[0].kind != "cpu" else CPU
    world = join(kind)
    if world.group is None:
        raise BadOption(
            "tuning runs real steps, which need one process for each stage",
            numbers="this is one process",
            next_step="outsize tune MODEL --nproc 2, or outsize run --nproc-per-node 2 for this script",
        )
    if kind == CPU:
        keep_freed_memory()  # as engines do, so that a trial's one step does not pay for new pages
    case = case_of(model, args, kwargs, options)
    request = request_of(asked.layout, case.batch.size)
    if request.in_slices:
        raise BadOption(
            "tune tries schedules, cuts and microbatches, and none in slices of sequences",
            numbers=f"slices={request.slices}",
            next_step="outsize.plan(model, args, request=outsize.Request(slices=...)), which estimates them",
        )
    if request.stages is None:
        request = request.model_copy(update={"stages": world.world_size})
    case = case.under(request.precision)
    task = _Task(
        world,
        case,
        request,
        where or cluster_of_run(world.device_type, world.machines or (world.world_size,)),
    )
    tuner = task.tuner(options, asked.progress)
    tried, seed = options.get("tried"), options.get("seed", 0)
    while (plan := _shared(world, Plan, tuner.next() if tuner else None)) is not None:
        measured = _step(world, case, plan, seed)
        trial = tuner.learn(plan, measured) if tuner else None
        if trial is not None and tried is not None:
            tried(trial)
    tuned = _shared(world, Tuned, tuner.tuned() if tuner else None)
    assert tuned is not None
    return tuned


def counts_to_tune(batch_size: int, stages: int, microbatches: int | None) -> tuple[list[int], list[int]]:
    """Returns counts of microbatches to profile, and those that lie between two of them."""
    if microbatches is not None:
        return [microbatches], []
    profiled = sorted({1, *(stages * k for k in _PROFILED if stages * k <= batch_size)})
    between = {round(stages * k) for k in _BETWEEN if stages * k <= batch_size}
    return profiled, sorted(c for c in between - {*profiled} if profiled[0] < c < profiled[-1])


@final
@dataclass(frozen=True)
class _Task:
    """Holds what is tuned, on which devices, and the rank of this process."""

    world: World
    case: TrainingCase
    request: PlanRequest
    cluster: Cluster

    def tuner(self, options: TuneOptions, progress: Progress | None) -> Tuner | None:
        """Returns the tuner on rank 0, and None on others.

        It has the mean of the profiles of all ranks that have a core or a device of their own.
        """
        size, count = self.request.batch_size, self.request.microbatches
        profiled, between = counts_to_tune(size, self.world.world_size, count)
        own = self._profiles([-(-size // c) for c in profiled], options, progress)
        assert self.world.host is not None
        texts = all_gather_json(
            None if own is None else own.model_dump_json(), self.world.host, "measured units"
        )
        if self.world.rank:
            return None
        profiles = _mean([ProfileSet.model_validate_json(text) for text in texts if text is not None])
        profiler, candidates = Profiler(profiles), {}
        case = self.case.in_pieces(self.request.loss_pieces or 1, self.request.module_pieces or 1)
        for count in profiles.counts(sorted([*profiled, *between]), size):
            captured = case.on(self.cluster).captured(-(-size // count))
            candidates[count] = captured.graph, profiler.profile(case, captured.graph, self.cluster)
        return Tuner(self.request, candidates, self.cluster, options.get("trials", TRIALS))

    def _profiles(
        self, sizes: Sequence[int], options: TuneOptions, progress: Progress | None
    ) -> ProfileSet | None:
        """Returns what this rank times, or None where another rank shares its device."""
        if self.world.rank and not _undisturbed(self.cluster):
            return None
        return measure_sizes(
            self.case.in_pieces(self.request.loss_pieces or 1, self.request.module_pieces or 1),
            sizes,
            options.get("how") or how_on(self.cluster),
            progress if self.world.rank == 0 else None,
            needed=self.request.batch_size // (self.request.microbatches or 1),
            cluster=self.cluster,
        )


def _undisturbed(where: Cluster) -> bool:
    """Tells whether this process shares its device with no other of the run."""
    cores = usable_cores()
    return where.devices[0].kind != "cpu" or len(cores) == 1


def _mean(profile_sets: Sequence[ProfileSet]) -> ProfileSet:
    """Returns the mean of the profiles, unit by unit."""
    profiles = [_mean_profile(same) for same in zip(*(one.profiles for one in profile_sets), strict=True)]
    return ProfileSet.of(profile_sets[0].model, profiles)


def _mean_profile(same: Sequence[Profile]) -> Profile:
    def mean(costs: Sequence[UnitCost]) -> UnitCost:
        return costs[0].model_copy(update={n: fmean(getattr(c, n) for c in costs) for n in _SECONDS})

    units = tuple(mean(costs) for costs in zip(*(p.units for p in same), strict=True))
    return same[0].model_copy(update={"units": units})


def _step(world: World, case: TrainingCase, plan: Plan, seed: int) -> Timeline:
    """Runs one step of the plan with a copy of the model, whose other stages' weights the engine frees."""
    batch = case.batch.resized(plan.batch_size)
    engine = make_engine(
        copy.deepcopy(case.module), plan, world.group, EngineOptions(case.loss_fn, seed=seed)
    )
    engine.prepare(batch)
    dist.barrier(group=world.host)
    engine.step(*batch.args, target=batch.target, update=False, **batch.kwargs)
    return engine.timeline()


def _shared(world: World, kind: type[AnyRecord], record: AnyRecord | None) -> AnyRecord | None:
    """Returns rank 0's record on every rank."""
    assert world.host is not None
    text = broadcast_json(None if record is None else record.model_dump_json(), world.host)
    return record if world.rank == 0 or text is None else kind.model_validate_json(text)
