"""Times a model's units on this machine at several microbatch sizes, as stages of a run would compute
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import psutil
import torch

from outsize.capture.fakes.precision import (
    casting,
    check_precision,
    inputs_in_precision,
    with_values_in_precision,
)
from outsize.capture.graph.build import Captured
from outsize.capture.measure.local_cluster import device_kind
from outsize.capture.measure.units import Progress, UnitTimingOptions, measure_units
from outsize.device.accelerators import CPU, accelerator_type, current_device, properties, spoken
from outsize.errors import BadOption
from outsize.ir.cluster import Cluster
from outsize.ir.hardware.devices import STAND_IN, TABLE
from outsize.ir.profile import Profile, ProfileSet
from outsize.policies.precisions import precision_policy
from outsize.run.stage.rng import seeder
from outsize.run.stage.to_device import device_of_model
from outsize.train.measure.training_case import TrainingCase


def measure_sizes(
    case: TrainingCase,
    sizes: Iterable[int],
    how: UnitTimingOptions | None = None,
    progress: Progress | None = None,
    *,
    needed: int = 1,
    cluster: Cluster | None = None,
) -> ProfileSet:
    """Returns a profile per microbatch size; `progress(laps done, laps to do)` starts again with each size.

    The units run on a device of the cluster, or where the model is. Sizes below `needed` are left out where
    the model rejects so few samples. Raises BadOption for a model whose weights have no values, or one that
    runs by modules, and for a cluster of other devices than are here.
    """
    case = case if cluster is None else case.moved_to(timed_device(cluster))
    sorted_sizes = sorted(set(sizes))
    if not sorted_sizes or sorted_sizes[0] < 1:
        raise BadOption(
            f"microbatch sizes {sorted_sizes} make no sense", next_step="--microbatch-sizes 1,2,4"
        )
    name = type(case.module).__name__
    captures = (case.taken(n, needed, case.captured) for n in sorted_sizes)
    profiles = [measure_captured(case, c, how, progress) for c in captures if c is not None]
    return ProfileSet.of(name, profiles)


def is_timed_here(cluster: Cluster) -> bool:
    """Tells whether this machine has a device whose times are those of the cluster's."""
    try:
        timed_device(cluster)
    except BadOption:
        return False
    return True


def timed_device(cluster: Cluster) -> torch.device:
    """Returns the device of this process that is timed for a cluster.

    Raises BadOption where this machine has none of the cluster's kind.
    """
    kind = cluster.devices[0].kind
    if kind == CPU:
        return torch.device(CPU)
    if accelerator_type() is None:
        raise BadOption(
            f"this machine has no device of {cluster.name} to be measured",
            numbers=f"torch sees no {spoken()} device",
            next_step="--cluster 2xcpu, or outsize plan MODEL, which estimates the times",
        )
    device = current_device()
    known = properties(device)
    here = device_kind(known.name, known.memory_bytes)
    if kind in TABLE and here not in (kind, STAND_IN):
        raise BadOption(
            f"the times of {kind} cannot be measured on {known.name}",
            numbers=f"{cluster.name} has {len(cluster.devices)} of them, here are {here}",
            next_step="--cluster local, or outsize plan MODEL, which estimates the times",
        )
    return device


def measure_captured(
    case: TrainingCase,
    captured: Captured,
    how: UnitTimingOptions | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Returns the profile of the case captured at one size, where its model is."""
    if captured.graph.form == "modules":
        raise BadOption(
            f"{captured.graph.model} runs by modules, whose units are not timed",
            numbers=captured.graph.notes[0],
            next_step="outsize plan MODEL, which estimates them",
        )
    batch = case.batch.resized(captured.graph.batch_size)
    how = dataclasses.replace(how or UnitTimingOptions(), seed=seeder(0, 0, 0))
    with casting(case.precision, device_type=device_of_model(case.module).type):
        profile = measure_units(captured, case.whole, batch.tensors(), how, progress)
    return profile.model_copy(update={"precision": case.precision})


def with_values_in(case: TrainingCase, precision: str) -> TrainingCase:
    """Returns the case in a precision, with values: weights of another type are converted in place.

    Raises BadOption for a precision whose units are not timed.
    """
    check_precision(precision)
    policy = precision_policy(precision)
    if policy.weights is None and policy.is_timed:
        return case.under(precision)
    args, kwargs = inputs_in_precision((case.batch.args, case.batch.kwargs), precision)
    batch = dataclasses.replace(case.batch, args=args, kwargs=kwargs)
    module = with_values_in_precision(case.module, precision)
    return TrainingCase(module, batch, case.loss_fn, precision)


def how_on(cluster: Cluster) -> UnitTimingOptions:
    """Returns how to measure for this cluster: with the threads of a process when all share this machine's
    cores, and beside as many others as ranks of a CPU cluster share a host, where each has one core.
    """
    cores, ranks = psutil.cpu_count(logical=True) or 1, cluster.devices_per_node
    threads = max(1, min(torch.get_num_threads(), cores // ranks))
    shares = threads == 1 and cluster.devices[0].kind == CPU
    return UnitTimingOptions(threads=threads, beside=min(ranks, cores) - 1 if shares else 0)
