"""Times a model's units on this machine at several microbatch sizes, as stages of a run would compute
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import psutil
import torch

from outsize.capture.fakes.precision import casting, check_precision, inputs_in_precision
from outsize.capture.graph.build import Captured
from outsize.capture.measure.units import Progress, UnitTimingOptions, measure_units
from outsize.errors import BadOption
from outsize.ir.cluster import Cluster
from outsize.ir.profile import Profile, ProfileSet
from outsize.run.stage.rng import seeder
from outsize.train.measure.training_case import TrainingCase


def measure_sizes(
    case: TrainingCase,
    sizes: Iterable[int],
    how: UnitTimingOptions | None = None,
    progress: Progress | None = None,
    *,
    needed: int = 1,
) -> ProfileSet:
    """Returns a profile per microbatch size; `progress(laps done, laps to do)` starts again with each size.

    Sizes below `needed` are left out where the model rejects so few samples. Raises BadOption for a model
    whose weights have no values, or one that runs by modules.
    """
    sorted_sizes = sorted(set(sizes))
    if not sorted_sizes or sorted_sizes[0] < 1:
        raise BadOption(
            f"microbatch sizes {sorted_sizes} make no sense", next_step="--microbatch-sizes 1,2,4"
        )
    name = type(case.module).__name__
    captures = (case.taken(n, needed) for n in sorted_sizes)
    profiles = [measure_captured(case, c, how, progress) for c in captures if c is not None]
    return ProfileSet.of(name, profiles)


def measure_captured(
    case: TrainingCase,
    captured: Captured,
    how: UnitTimingOptions | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Returns the profile of the case captured at one size."""
    if captured.graph.form == "modules":
        raise BadOption(
            f"{captured.graph.model} runs by modules, whose units are not timed",
            numbers=captured.graph.notes[0],
            next_step="outsize plan MODEL, which estimates them",
        )
    batch = case.batch.resized(captured.graph.batch_size)
    how = dataclasses.replace(how or UnitTimingOptions(), seed=seeder(0, 0, 0))
    with casting(case.precision):
        profile = measure_units(captured, case.module, batch.tensors(), how, progress)
    return profile.model_copy(update={"precision": case.precision})


def with_values_in(case: TrainingCase, precision: str) -> TrainingCase:
    """Returns the case in a precision, with values: under bf16 its weights are converted where they are."""
    check_precision(precision)
    if precision != "bf16":
        return case.under(precision)
    args, kwargs = inputs_in_precision((case.batch.args, case.batch.kwargs), precision)
    batch = dataclasses.replace(case.batch, args=args, kwargs=kwargs)
    return TrainingCase(case.module.bfloat16(), batch, case.loss_fn, precision)


def how_on(cluster: Cluster) -> UnitTimingOptions:
    """Returns how to measure for this cluster: with the threads of a process when all share this machine's
    cores.
    """
    cores = psutil.cpu_count(logical=True) or 1
    return UnitTimingOptions(threads=max(1, min(torch.get_num_threads(), cores // cluster.devices_per_node)))
