"""`outsize measure MODEL`: time its units on this machine. `outsize measure --links`: time messages here."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize.cli import options
from outsize.cli.linking import measured_links
from outsize.cli.screen import Screen
from outsize.cli.subject import Subject, batch_size, make_subject, write_text
from outsize.errors import BadOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from outsize.capture.links import Links
    from outsize.capture.measure import How
    from outsize.ir.profile import ProfileSet
    from outsize.train.subject import Subject as Whole

Model = Annotated[
    str | None,
    typer.Argument(help="As for plan; not with --links.", metavar="MODEL", show_default=False),
]
Sizes = Annotated[
    str | None,
    typer.Option(
        "--microbatch-sizes",
        metavar="1,2,4",
        help="Samples of a microbatch, one profile each (default: powers of two up to --batch).",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="Of the process (default: the cores that --cluster leaves each)."),
]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Laps of each kind; the median counts.")]
All = Annotated[bool, typer.Option("--all", help="Time every copy of a repeated block, not the first two.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Time anew what earlier calls have kept.")]
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
    precision: options.Precision = options.PrecisionOption.fp32,
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
    """Time MODEL's units on this machine: forward, input gradient and weight gradient apart.

    What was timed is kept by the structure of units, and used again until --fresh.
    """
    from outsize.train.measuring import measure_sizes

    screen = Screen(json)
    if (model is None) != links:
        raise BadOption(
            "measure takes a MODEL or --links, one of the two",
            next_step="outsize measure torchvision:resnet50 --input 3x96x96, or outsize measure --links",
        )
    if model is None:
        _deliver_links(screen, measured_links(screen, nproc, repeats), out)
        return
    size = batch_size(batch, None)
    sizes = _sizes(microbatch_sizes)
    with screen.working(f"building {model}"):
        subject = make_subject(model, input, max(sizes or [size]), seed=seed)
    how = _how(cluster, threads, repeats=repeats, every=every, fresh=fresh, cache=_cache_folder())
    wanted = sizes or [2**k for k in range(size.bit_length())] + [size]
    whole = _whole(subject, precision.value)
    with screen.bar("measuring") as progress:
        needed = 1 if sizes else size
        found = measure_sizes(whole, wanted, how, progress, needed=needed)
    _deliver(screen, found, out)


def _sizes(text: str | None) -> list[int]:
    """`1,2,4` -> [1, 2, 4]; nothing for nothing."""
    if text is None:
        return []
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise BadOption(
            f"--microbatch-sizes {text!r} is no list of sizes", next_step="--microbatch-sizes 1,2,4"
        )
    return sorted({int(part) for part in parts})


def _how(cluster: str, threads: int | None, **wishes: Any) -> How:
    from outsize.capture.cluster import find_cluster
    from outsize.train.measuring import how_on

    where = find_cluster(cluster)
    if where.devices[0].kind != "cpu":
        _insist_on_gpu(cluster)
    how = how_on(where)
    return dataclasses.replace(how, threads=threads or how.threads, **wishes)


def _insist_on_gpu(cluster: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise BadOption(
            f"{cluster} is not here to be measured", next_step="--cluster 2xcpu, or plan by estimates"
        )


def _whole(subject: Subject, precision: str) -> Whole:
    """The subject as the library takes it, in this precision."""
    from outsize.train.measuring import in_earnest
    from outsize.train.subject import Subject as Whole
    from outsize.train.subject import as_batch

    model, args, kwargs = subject.call
    objective = subject.objective
    batch = as_batch(args, kwargs, objective.target)
    return in_earnest(Whole.of(model, batch, objective.loss_fn, None), precision)


def _deliver(screen: Screen, found: ProfileSet, out: Path | None) -> None:
    """Show the profile and write it. Under --json the document is the profile file itself."""
    if out is not None:
        write_text(out, found.to_json() + "\n")

    def tables() -> Iterable[RenderableType]:
        from outsize.report.measured import profile_tables

        yield profile_tables(found)

    screen.result(found.model_dump(mode="json"), tables)


def _deliver_links(screen: Screen, found: Links, out: Path | None) -> None:
    """Show the samples and the lines; the file is a cluster, which --cluster takes."""
    cluster = found.cluster(out.name if out is not None else f"{found.ranks} measured")
    lines = {kind: found.link(kind) for kind in found.kinds()}
    if out is not None:
        write_text(out, cluster.to_json() + "\n")

    def tables() -> Iterable[RenderableType]:
        from outsize.report.measured import links_tables

        kinds = found.kinds()
        points = {
            k: [(s.size_bytes, s.seconds, s.spread_s) for s in found.samples if s.kind == k] for k in kinds
        }
        yield links_tables(points, lines)

    samples = [sample.model_dump(mode="json") for sample in found.samples]
    links = {kind: link.model_dump(mode="json") for kind, link in lines.items()}
    screen.result({"cluster": cluster.model_dump(mode="json"), "links": links, "samples": samples}, tables)


def _cache_folder() -> Path:
    """Where this user's programs keep what can be made again (XDG)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "outsize" / "profiles"
