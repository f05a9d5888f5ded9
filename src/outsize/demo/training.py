"""The training script of the demo, as a user would write it; each process executes it.

    outsize run --nproc-per-node 2 -m outsize.demo.training full gpt2 FOLDER

It reads FOLDER/plan.json and writes FOLDER/losses.csv and FOLDER/measured.json (the timeline
of a typical step). Only `outsize.Plan`, `outsize.parallelize` and `engine.step` are outsize's; the rest is
plain PyTorch.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import outsize
from outsize.demo.images import image_job
from outsize.demo.job import DemoJob
from outsize.demo.text import text_job

JOBS = {"gpt2": text_job, "resnet": image_job}
# The timeline that is written is the median one of this many last steps.
WATCHED = 9
Row = tuple[int, float, float]  # step, loss, seconds


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
    rows: list[Row] = []
    timelines: list[outsize.Timeline] = []
    with _progress(shown=is_first_rank) as bar:
        task = bar.add_task("training", total=steps, loss="")
        for step in range(steps):
            start = time.perf_counter()
            batch = job.batch(step)
            result = engine.step(*batch.args, target=batch.target, **(batch.kwargs or {}))
            schedule.step()
            rows.append((step, result.loss.item(), time.perf_counter() - start))
            if step >= steps - WATCHED:
                timelines.append(engine.timeline())
            bar.update(task, advance=1, loss=f"loss {rows[-1][1]:.3f}")
    if is_first_rank:
        _write(folder, rows, timelines)


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


def _write(folder: Path, rows: Iterable[Row], timelines: Sequence[outsize.Timeline]) -> None:
    with (folder / "losses.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("step", "loss", "step_s"))
        writer.writerows(rows)
    by_duration = sorted(timelines, key=lambda timeline: timeline.duration_s)
    (folder / "measured.json").write_text(by_duration[len(by_duration) // 2].to_json())


def main(size: str, name: str, folder: Path) -> None:
    """Trains the job `name` of JOBS; `size` is "full" or "quick"."""
    job = JOBS[name](quick=size == "quick")
    train(job, outsize.Plan.load(folder / "plan.json"), folder, steps=job.recipe.steps)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
