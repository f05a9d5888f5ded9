"""The order of the demo, and the table at its end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from outsize.cli.demo.compared_models import ComparedModel, compared_models
from outsize.cli.demo.images import image_job
from outsize.cli.demo.screen import DemoScreen, verdict_text
from outsize.cli.demo.text import text_job
from outsize.cli.demo.trained_job import TrainedJob, plan_check_and_train
from outsize.errors import ModelNotImportable
from outsize.ir.answers.verdict import Verdict
from outsize.ir.formatting import seconds_text

# Modules that outsize itself does not need -> the extra of pyproject.toml that installs them.
EXTRAS = {
    "transformers": "hf",
    "torchvision": "vision",
    "PIL": "vision",
    "matplotlib": "plot",
    "sklearn": "test",
}


def show(out: Path, *, quick: bool) -> int:
    """Runs all parts and the summary; see `outsize.cli.demo.main`."""
    check_extras()
    start, screen = time.perf_counter(), DemoScreen()
    screen.line(Text("outsize demo", "bold"))
    screen.line("Unmodified models, planned, split and trained over two processes.")
    with one_thread():
        trained: list[tuple[TrainedJob, Path]] = []
        for number, job in enumerate((text_job(quick=quick), image_job(quick=quick)), start=1):
            screen.heading(f"{number}. {job.title} learns {job.data}")
            screen.line(Text(job.about))
            folder = out if number == 1 else out / job.name
            trained.append((plan_check_and_train(job, screen, folder, quick=quick), folder))
        screen.heading("3. Two more models, in two and in three stages, compared with the plain loop")
        compared = [(model, model.check(screen)) for model in compared_models(quick=quick)]
    files = [file for job, folder in trained for file in job.write(folder)]
    jobs = [job for job, _ in trained]
    passed = all(job.passed for job in jobs) and all(v.bit_equal for _, own in compared for v in own)
    screen.heading("Summary")
    screen.show(summary_table(jobs, compared))
    screen.show(closing_lines(files, time.perf_counter() - start, passed=passed))
    return 0 if passed else 1


def check_extras(extras: dict[str, str] = EXTRAS) -> None:
    """Raises ModelNotImportable that names every missing module and the command that installs them."""
    missing = [module for module in extras if find_spec(module) is None]
    if missing:
        names = ",".join(dict.fromkeys(extras[module] for module in missing))
        raise ModelNotImportable(
            "the demo's models and images need more packages",
            numbers=f"not installed: {', '.join(missing)}",
            next_step=f"pip install 'outsize[{names}]', or make demo",
        )


@contextmanager
def one_thread() -> Iterator[None]:
    """Measures and checks with one thread, as each training process has one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def summary_table(
    trained: Sequence[TrainedJob], compared: Sequence[tuple[ComparedModel, Sequence[Verdict]]]
) -> Table:
    """Returns one row for each model: the verdict on all its splits, and the first and last loss."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("model", "against one process", "loss"):
        table.add_column(column, no_wrap=column != "model")
    for job in trained:
        table.add_row(job.job.title, verdict_text(job.verdict.bit_equal), _loss_text(job))
    for model, verdicts in compared:
        table.add_row(model.title, verdict_text(all(v.bit_equal for v in verdicts)), "-")
    return table


def _loss_text(trained: TrainedJob) -> Text:
    goal = f", goal {trained.job.goal:.1f}" if trained.job.goal is not None else ""
    text = f"{trained.losses[0]:.2f} -> {trained.end_loss:.2f} ({len(trained.losses)} steps{goal})"
    return Text(text, "" if trained.learned else "bold red")


def closing_lines(files: Sequence[Path], seconds: float, *, passed: bool) -> Group:
    """Returns the written files, the overall verdict and the time."""
    verdict = Text("All checks passed", "bold green") if passed else Text("NOT all checks passed", "bold red")
    written = [Text(str(file), overflow="fold") for file in files]
    return Group(*written, Text(), Text.assemble(verdict, f", in {seconds_text(seconds)}."))
