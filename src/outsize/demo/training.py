"""The training script of the demo, as a user would write it; each process of the run executes it.

    outsize run --nproc-per-node 2 -m outsize.demo.training full gpt2 FOLDER

It reads FOLDER/plan.json and leaves FOLDER/losses.csv and FOLDER/measured.json (the steadiest of the last
steps). Only `outsize.Plan`, `outsize.parallelize` and `engine.step` are outsize's; the rest is plain PyTorch.
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
from outsize.demo.catalogue import job
from outsize.demo.job import Job

# Of so many last steps the timeline of the median one is kept.
WATCHED = 9
Row = tuple[int, float, float]  # step, loss, seconds


def train(job: Job, plan: outsize.Plan, folder: Path, *, steps: int) -> None:
    """Train by the plan and write down what happened."""
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
    """A bar on the terminal of the first rank; nothing off a terminal."""
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
    """`size` is full or quick, `name` a job of the catalogue."""
    found = job(name, quick=size == "quick")
    train(found, outsize.Plan.load(folder / "plan.json"), folder, steps=found.recipe.steps)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
