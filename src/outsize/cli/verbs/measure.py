"""Implements `outsize measure MODEL` (times its units here) and `outsize measure --links` (times messages
here).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli import options
from outsize.cli.model_input import ModelInput, batch_size, cache_folder, make_model_input, write_text
from outsize.cli.processes.link_worker import measured_links
from outsize.cli.screen import Screen
from outsize.errors import BadOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outsize.capture.measure.links import LinkMeasurements
    from outsize.ir.profile import ProfileSet
    from outsize.train.measure.training_case import TrainingCase

Model = Annotated[
    str | None,
    typer.Argument(
        help="A model, spelled as for outsize plan; not with --links.", metavar="MODEL", show_default=False
    ),
]
Sizes = Annotated[
    str | None,
    typer.Option(
        "--microbatch-sizes",
        metavar="1,2,4",
        help="Sizes of microbatches in samples, one profile each (default: powers of two up to --batch).",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", min=1, help="Threads of the process (default: its share of the cores, by --cluster)."
    ),
]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Laps of each kind; the median is used.")]
All = Annotated[bool, typer.Option("--all", help="Time every copy of a repeated block, not only two.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Ignore the times that earlier calls have stored.")]
WithLinks = Annotated[bool, typer.Option("--links", help="Time messages between processes instead.")]
Nproc = Annotated[int, typer.Option("--nproc", min=2, help="Processes for --links.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write a profile for plan --profile; with --links a cluster."),
]


def measure(
    model: Model = None,
    input: options.Input = None,
    batch: options.Batch = None,
    microbatch_sizes: Sizes = None,
    cluster: options.Cluster = "local",
    precision: options.Precision = "fp32",
    threads: Threads = None,
    repeats: Repeats = 5,
    every: All = False,
    fresh: Fresh = False,
    links: WithLinks = False,
    nproc: Nproc = 2,
    out: Out = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Time MODEL's units on this machine: forward, input gradient and weight gradient separately.

    Times are stored by the structure of the units and used again, unless --fresh is given.
    """
    from outsize.capture.measure.local_cluster import find_cluster
    from outsize.train.measure.units import how_on, measure_sizes, timed_device

    screen = Screen(json)
    if (model is None) != links:
        raise BadOption(
            "measure takes either a MODEL or --links",
            next_step="outsize measure torchvision:resnet50 --input 3x96x96, or outsize measure --links",
        )
    if model is None:
        _deliver_links(screen, measured_links(screen, nproc, repeats), out)
        return
    size = batch_size(batch, None)
    sizes = options.sizes_in(microbatch_sizes, "--microbatch-sizes") if microbatch_sizes else ()
    where = find_cluster(cluster)
    timed_device(where)  # Whether the device is here is said before a model is built.
    with screen.working(f"building {model}"):
        inputs = make_model_input(model, input, max(sizes or (size,)), seed=seed)
    how, stored = how_on(where), {"cache": cache_folder("profiles"), "fresh": fresh}
    how = dataclasses.replace(how, threads=threads or how.threads, repeats=repeats, every=every, **stored)
    wanted = sizes or [2**k for k in range(size.bit_length())] + [size]
    case = _training_case(inputs, precision)
    with screen.bar("measuring") as progress:
        needed = 1 if sizes else size
        profiles = measure_sizes(case, wanted, how, progress, needed=needed, cluster=where)
    _deliver(screen, profiles, out)


def _training_case(inputs: ModelInput, precision: str) -> TrainingCase:
    """Returns the inputs as the library takes them, in this precision."""
    from outsize.train.measure.training_case import TrainingCase, as_batch
    from outsize.train.measure.units import with_values_in

    model, args, kwargs = inputs.call
    objective = inputs.objective
    batch = as_batch(args, kwargs, objective.target)
    return with_values_in(TrainingCase.of(model, batch, objective.loss_fn, None), precision)


def _deliver(screen: Screen, profiles: ProfileSet, out: Path | None) -> None:
    """Shows the profile and writes it. Under --json the document is the profile file itself."""
    if out is not None:
        write_text(out, profiles.to_json() + "\n")

    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables.measured import profile_tables

        yield profile_tables(profiles)

    screen.result(profiles.model_dump(mode="json"), tables)


def _deliver_links(screen: Screen, measured: LinkMeasurements, out: Path | None) -> None:
    """Shows the samples and the fitted lines; the file is a cluster, which --cluster takes."""
    cluster = measured.cluster(out.name if out is not None else f"{measured.ranks} measured")
    lines = {kind: measured.link(kind) for kind in measured.kinds()}
    if out is not None:
        write_text(out, cluster.to_json() + "\n")

    def tables() -> Iterable[RenderableType]:
        from outsize.report.tables.measured import links_tables

        kinds = measured.kinds()
        points = {
            k: [(s.size_bytes, s.seconds, s.spread_s) for s in measured.samples if s.kind == k] for k in kinds
        }
        yield links_tables(points, lines)

    samples = [sample.model_dump(mode="json") for sample in measured.samples]
    links = {kind: link.model_dump(mode="json") for kind, link in lines.items()}
    screen.result({"cluster": cluster.model_dump(mode="json"), "links": links, "samples": samples}, tables)
