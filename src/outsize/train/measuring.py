"""Time a model's units on this machine at several microbatch sizes, as stages of a run would compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import psutil
import torch

from outsize.capture.graph import Captured
from outsize.capture.measure import How, Progress, measure_units
from outsize.capture.precision import casting, check_precision, inputs_in_precision
from outsize.errors import BadOption
from outsize.ir.cluster import Cluster
from outsize.ir.profile import Profile, ProfileSet
from outsize.run.rng import seeder
from outsize.train.subject import Subject


def measure_sizes(
    subject: Subject,
    sizes: Iterable[int],
    how: How | None = None,
    progress: Progress | None = None,
    *,
    needed: int = 1,
) -> ProfileSet:
    """A profile per microbatch size; `progress(laps done, laps to do)` begins anew with each size.

    Sizes below `needed` are left out where the model rejects so few samples. Raises BadOption for a model
    without values on its weights, or one that runs by modules.
    """
    wanted = sorted(set(sizes))
    if not wanted or wanted[0] < 1:
        raise BadOption(f"microbatch sizes {wanted} make no sense", next_step="--microbatch-sizes 1,2,4")
    name = type(subject.module).__name__
    taken = (subject.taken(n, needed) for n in wanted)
    profiles = [measure_captured(subject, c, how, progress) for c in taken if c is not None]
    return ProfileSet.of(name, profiles)


def measure_captured(
    subject: Subject, captured: Captured, how: How | None = None, progress: Progress | None = None
) -> Profile:
    """The profile of the subject captured at one size."""
    if captured.graph.form == "modules":
        raise BadOption(
            f"{captured.graph.model} runs by modules, whose units are not timed",
            numbers=captured.graph.notes[0],
            next_step="outsize plan MODEL, which estimates them",
        )
    batch = subject.batch.resized(captured.graph.batch_size)
    how = dataclasses.replace(how or How(), seed=seeder(0, 0, 0))
    with casting(subject.precision):
        found = measure_units(captured, subject.module, batch.tensors(), how, progress)
    return found.model_copy(update={"precision": subject.precision})


def in_earnest(subject: Subject, precision: str) -> Subject:
    """The subject in a precision, with values: under bf16 its weights are converted where they are."""
    check_precision(precision)
    if precision != "bf16":
        return subject.under(precision)
    args, kwargs = inputs_in_precision((subject.batch.args, subject.batch.kwargs), precision)
    batch = dataclasses.replace(subject.batch, args=args, kwargs=kwargs)
    return Subject(subject.module.bfloat16(), batch, subject.loss_fn, precision)


def how_on(cluster: Cluster) -> How:
    """With as many threads as a process has when the cluster's processes share this machine's cores."""
    cores = psutil.cpu_count(logical=True) or 1
    return How(threads=max(1, min(torch.get_num_threads(), cores // cluster.devices_per_node)))
