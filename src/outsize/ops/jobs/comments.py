"""Says at the top of a job file which numbers of nodes have a plan, and what is predicted of each."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from outsize.errors import visible
from outsize.ir.answers.job import ClusterJob, JobSize, JobSizeLeftOut
from outsize.ir.formatting import axes_text, bytes_text, microbatches_text, rate_text, seconds_text

WIDTH = 100
_COLUMNS = ("nodes", "devices", "step", "samples/s", "fullest device, P95", "layout")


def header(job: ClusterJob, notes: Sequence[str] = ()) -> str:
    """Returns lines of comments, each ending in a line end; `notes` are what the engine needs to be told."""
    return "".join(f"# {visible(line)}".rstrip() + "\n" for line in _lines(job, notes))


def _lines(job: ClusterJob, notes: Sequence[str]) -> Iterator[str]:
    request = job.request
    yield f"Written by {job.made_by}"
    yield f"{request.model}, batch {request.batch_size}, on nodes of {request.node}"
    yield ""
    rows = [_COLUMNS, *(_row(size) for size in request.sizes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        yield "  ".join([*cells, row[-1]])
    for left_out in request.left_out:
        yield from _wrapped(_reason(left_out))
    for note in notes:
        yield ""
        yield from _wrapped(note)


def _row(size: JobSize) -> tuple[str, ...]:
    how = [axes_text(size.axes.used), size.schedule, microbatches_text(size.microbatches)]
    how += ["bits of one device"] if size.bit_identical else []
    memory = bytes_text(size.p95_bytes)
    memory += f" of {bytes_text(size.device_bytes)}" if size.device_bytes else ""
    rate = rate_text(size.samples_per_s)
    return str(size.nodes), str(size.ranks), seconds_text(size.step_s), rate, memory, ", ".join(how)


def _reason(left_out: JobSizeLeftOut) -> str:
    nodes = "1 node" if left_out.nodes == 1 else f"{left_out.nodes} nodes"
    numbers = f"; {left_out.numbers}" if left_out.numbers else ""
    return f"{nodes}: left out [{left_out.code}]: {left_out.what}{numbers}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
