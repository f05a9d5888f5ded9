"""The training script of the demo, as a user would write it; each process executes it.

    outsize run --nproc-per-node 2 -m outsize.cli.demo.training full gpt2 FOLDER

It reads FOLDER/plan.json and writes FOLDER/losses.csv, FOLDER/history.json (what was recorded of the steps)
and FOLDER/measured.json (the timeline of a typical one). Only `outsize.Plan`, `outsize.parallelize` and the
recorder around `engine.step` are outsize's; the rest is plain PyTorch.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import outsize
from outsize.cli.demo.images import image_job
from outsize.cli.demo.job import DemoJob
from outsize.cli.demo.text import text_job
from outsize.ir.answers.runs.recorded_run import RecordedRun
from outsize.ops.publish.recorder import RunRecorder

JOBS = {"gpt2": text_job, "resnet": image_job}


def train(job: DemoJob, plan: outsize.Plan, folder: Path, *, steps: int) -> None:
    """Trains by the plan and writes the losses and a timeline."""
    first = job.batch(0)
    engine = outsize.parallelize(
        job.model(),
        first.args,
        first.kwargs,
        plan=plan,
        loss_fn=job.loss_fn,
        target=first.target,
        optimizer=job.recipe.optimizer,
        clip_norm=1.0,
    )
    assert engine.optimizer is not None
    schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, job.recipe.factor)
    is_first_rank = torch.distributed.get_rank() == 0
    recorder = RunRecorder(engine, watched=True)
    with _progress(shown=is_first_rank) as bar, recorder.watching():
        task = bar.add_task("training", total=steps, loss="")
        for step in range(steps):
            batch = job.batch(step)
            row = recorder.step(batch.args, dict(batch.kwargs or {}), batch.target)
            schedule.step()
            bar.update(task, advance=1, loss="" if row.loss is None else f"loss {row.loss:.3f}")
    measured, history = recorder.typical()
    if is_first_rank:
        _write(folder, history, measured)


def _progress(*, shown: bool) -> Progress:
    """Returns a bar for the terminal of the first rank; it shows nothing where there is no terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("  {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True)


def _write(folder: Path, history: RecordedRun, measured: outsize.Timeline) -> None:
    with (folder / "losses.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("step", "loss", "step_s"))
        writer.writerows((row.step, row.loss, row.step_s) for row in history.steps)
    history.write(folder / "history.json")
    measured.write(folder / "measured.json")


def main(size: str, name: str, folder: Path) -> None:
    """Trains the job `name` of JOBS; `size` is "full" or "quick"."""
    job = JOBS[name](quick=size == "quick")
    train(job, outsize.Plan.load(folder / "plan.json"), folder, steps=job.recipe.steps)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
