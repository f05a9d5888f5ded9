"""Runs one process of `outsize tune`, on its own core where each can have one; rank 0 has the terminal."""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from pathlib import Path

import torch

from outsize.cli.model_input import make_model_input
from outsize.cli.processes.job import JobFolder, TuneJob
from outsize.cli.processes.run_worker import serve
from outsize.cli.screen import Screen, warn_on_one_line
from outsize.device import accelerators
from outsize.device.accelerators import CPU, device_count
from outsize.device.cores import usable_cores
from outsize.ir.answers.tuned import Tuned
from outsize.ops import tuning
from outsize.train.world.world import World


def main(folder: JobFolder) -> None:
    """Runs the folder's job as this rank."""
    job = TuneJob.model_validate_json(folder.job.read_text(encoding="utf-8"))
    serve(folder, lambda world: tune(job, world), as_json=job.as_json, device_type=device_type)


def tune(job: TuneJob, world: World) -> Tuned:
    """Runs the job on this rank."""
    screen = Screen(job.as_json)
    quieten(world)
    pin(world)
    with screen.working(f"building {job.model}"):
        inputs = make_model_input(job.model, job.input, job.batch, seed=job.seed)
    steps = itertools.count(1)
    with screen.bar("tuning") as progress:  # laps of the profile first, then real steps
        return tuning.tune(
            *inputs.call,
            **inputs.loss,
            cluster=cluster(world),
            microbatches=job.microbatches,
            schedule=job.schedule,
            trials=job.trials,
            seed=job.seed,
            progress=progress,
            tried=lambda _: progress(next(steps), job.trials),
        )


def device_type() -> str:
    """Returns the accelerator's type where each process of this machine has a device of it, else cpu."""
    return accelerators.device_type() if device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else CPU


def cluster(world: World) -> str:
    """Returns the name of the run's devices."""
    return "local" if device_type() != CPU else f"{world.world_size}xcpu"


def quieten(world: World) -> None:
    """Shows warnings on one line, and those of rank 0 alone."""
    warn_on_one_line()
    if world.rank:
        warnings.simplefilter("ignore")


def pin(world: World) -> None:
    """Pins the process to a core, where each process of one thread can have its own."""
    if not hasattr(os, "sched_setaffinity") or device_type() != CPU or torch.get_num_threads() > 1:
        return
    cores = sorted(usable_cores())
    if len(cores) >= world.world_size:
        os.sched_setaffinity(0, {cores[world.local_rank]})


if __name__ == "__main__":
    main(JobFolder(path=Path(sys.argv[1])))
