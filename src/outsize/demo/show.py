"""The order of the demo, and its end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.text import Text

from outsize.demo.act import Act
from outsize.demo.catalogue import image_job, text_job
from outsize.demo.finale import cut_and_check, files_lines, summary
from outsize.demo.guests import guests
from outsize.demo.needs import check_needs
from outsize.demo.screen import Screen


def show(out: Path, *, quick: bool) -> int:
    """All acts and the summary; see `outsize.demo.main`."""
    check_needs()
    start, screen = time.perf_counter(), Screen()
    screen.title("outsize demo", "Unmodified models, planned, split and trained over two processes.")
    with one_thread():
        outcomes = []
        for number, job in enumerate((text_job(quick=quick), image_job(quick=quick)), start=1):
            screen.heading(f"{number}. {job.title} learns {job.source}")
            screen.line(Text(job.about))
            folder = out if number == 1 else out / job.name
            outcomes.append((Act(job, screen, folder, quick=quick).perform(), folder))
        screen.heading("3. Cut into two and into three, and compared with the plain loop")
        others = [(guest, cut_and_check(guest, screen)) for guest in guests(quick=quick)]
    written = [file for outcome, folder in outcomes for file in outcome.write(folder)]
    holds = all(o.holds for o, _ in outcomes) and all(v.bit_equal for _, vs in others for v in vs)
    screen.heading("What holds")
    screen.show(summary([o for o, _ in outcomes], others))
    screen.show(files_lines(written, time.perf_counter() - start, holds=holds))
    return 0 if holds else 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Time and check with the one thread that each training process will have."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
