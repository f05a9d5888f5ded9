"""Tune a plan on the devices it is for: profile, then a few real steps chosen by the simulator."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from outsize.api.asking import cluster_of, profile_of, request_of
from outsize.api.planning import Kwargs
from outsize.capture.ladder import LossFn
from outsize.capture.measure import How, Progress
from outsize.errors import BadOption
from outsize.ir.cluster import Cluster
from outsize.ir.plan import Plan
from outsize.ir.profile import Profile, ProfileSet, UnitCost
from outsize.ir.timeline import Timeline
from outsize.ir.tuned import Trial, Tuned
from outsize.planner.request import Request
from outsize.planner.tune import TRIALS, Tuner
from outsize.run.host_memory import keep_freed_memory
from outsize.train.batch_dims import Asked
from outsize.train.launch import join
from outsize.train.measuring import how_on, measure_sizes
from outsize.train.parallel import make_engine
from outsize.train.subject import Subject, as_batch
from outsize.train.world import World

# Microbatches for each stage that are tried: as many profiles, and those between their neighbours.
_PROFILED: Final = (1, 2, 4)
_BETWEEN: Final = (1.5, 3)
_SECONDS: Final = ("forward_s", "backward_input_s", "backward_weight_s", "spread_s")


def tune(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Kwargs | None = None,
    *,
    loss_fn: LossFn | None = None,
    target: Any = None,
    batch_dims: Asked | None = None,
    cluster: str | Cluster | None = None,
    trials: int = TRIALS,
    how: How | None = None,
    progress: Progress | None = None,
    tried: Callable[[Trial], None] | None = None,
    seed: int = 0,
    **wishes: Any,
) -> Tuned:
    """The fastest plan of those that ran, at most `trials`, one real step each (forward and backward).

    Called by every process of a run, one for each device, with the same arguments. The units are timed, the
    best predicted plan runs one step, its stage times correct the profile, and so on until no other plan is
    predicted to be 2 % faster. `wishes` as for `plan` (batch_size, microbatches, schedule, ...). `progress`
    counts the laps of the profile, `tried` hears of each step on rank 0. The model stays as it is; each trial
    works on a copy. Raises BadOption in a single process, and as `plan`.
    """
    where = None if cluster is None else cluster_of(cluster)
    cuda = torch.cuda.is_available() and (where is None or where.devices[0].kind != "cpu")
    world = join("cuda" if cuda else "cpu")
    if world.group is None:
        raise BadOption(
            "tuning runs real steps, which take one process for each stage",
            numbers="this is one process",
            next_step="outsize tune MODEL --nproc 2, or outsize run --nproc-per-node 2 for this script",
        )
    if not cuda:
        keep_freed_memory()  # as engines do: a trial's one step shall not pay for pages that the profile had
    found = Subject.of(model, as_batch(args, kwargs, target), loss_fn, batch_dims)
    request = request_of(**{"batch_size": found.batch.size, "stages": world.world_size, **wishes})
    found = found.under(request.precision)
    where = where or cluster_of("local" if cuda else f"{world.world_size}xcpu")
    tuner = _tuner(world, found, request, where, trials, how, progress)
    while (plan := _shared(world, tuner.next() if tuner else None)) is not None:
        measured = _step(world, found, plan, seed)
        trial = tuner.learn(plan, measured) if tuner else None
        if trial is not None and tried is not None:
            tried(trial)
    return _shared(world, tuner.tuned() if tuner else None)


def counts_to_tune(batch_size: int, stages: int, microbatches: int | None) -> tuple[list[int], list[int]]:
    """Counts of microbatches to profile, and those that lie between two of them."""
    if microbatches is not None:
        return [microbatches], []
    profiled = sorted({1, *(stages * k for k in _PROFILED if stages * k <= batch_size)})
    between = {round(stages * k) for k in _BETWEEN if stages * k <= batch_size}
    return profiled, sorted(c for c in between - {*profiled} if profiled[0] < c < profiled[-1])


def _tuner(
    world: World,
    found: Subject,
    request: Request,
    where: Cluster,
    trials: int,
    how: How | None,
    progress: Progress | None,
) -> Tuner | None:
    """On rank 0, with the mean of the profiles of all ranks that have a core or a device of their own."""
    size = request.batch_size
    profiled, between = counts_to_tune(size, world.world_size, request.microbatches)
    own = None
    if world.rank == 0 or _undisturbed(where):
        sizes, needed = [-(-size // c) for c in profiled], size // (request.microbatches or 1)
        told = progress if world.rank == 0 else None
        own = measure_sizes(_on_device(found, world, where), sizes, how or how_on(where), told, needed=needed)
    all_found: list[Any] = [None] * world.world_size
    dist.all_gather_object(all_found, own, group=world.group)
    if world.rank:
        return None
    profiles = _mean([one for one in all_found if one is not None])
    candidates = {}
    for count in profiles.counts(sorted([*profiled, *between]), size):
        captured = found.captured(-(-size // count))
        candidates[count] = captured.graph, profile_of(found, captured, where, profiles, None)
    return Tuner(request, candidates, where, trials)


def _on_device(found: Subject, world: World, where: Cluster) -> Subject:
    """As it is on CPUs; a copy on this process's GPU."""
    if where.devices[0].kind == "cpu":
        return found
    device = torch.device("cuda", world.local_rank)
    batch = found.batch.mapped(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf)
    return replace(found, module=copy.deepcopy(found.module).to(device), batch=batch)


def _undisturbed(where: Cluster) -> bool:
    """Whether this process shares its device with no other of the run."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    return where.devices[0].kind != "cpu" or len(cores) == 1


def _mean(found: Sequence[ProfileSet]) -> ProfileSet:
    """Unit by unit."""
    profiles = [_mean_profile(same) for same in zip(*(one.profiles for one in found), strict=True)]
    return ProfileSet.of(found[0].model, profiles)


def _mean_profile(same: Sequence[Profile]) -> Profile:
    def mean(costs: Sequence[UnitCost]) -> UnitCost:
        return costs[0].model_copy(update={n: fmean(getattr(c, n) for c in costs) for n in _SECONDS})

    units = tuple(mean(costs) for costs in zip(*(p.units for p in same), strict=True))
    return same[0].model_copy(update={"units": units})


def _step(world: World, found: Subject, plan: Plan, seed: int) -> Timeline:
    """One step of the plan with a copy of the model, whose other stages' weights the engine frees."""
    batch = found.batch.resized(plan.batch_size)
    engine = make_engine(copy.deepcopy(found.module), plan, world.group, loss_fn=found.loss_fn, seed=seed)
    engine.prepare(batch)
    dist.barrier(group=world.group)
    engine.step(*batch.args, target=batch.target, update=False, **batch.kwargs)
    return engine.timeline()


def _shared(world: World, value: Any) -> Any:
    """What rank 0 has."""
    box = [value]
    dist.broadcast_object_list(box, group=world.group, group_src=0)
    return box[0]
