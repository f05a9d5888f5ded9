"""Implements `outsize emit ENGINE TARGET`: a job file for a cluster, with only the numbers of nodes that have
a plan.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize import __version__
from outsize.cli import options, uncollected
from outsize.cli.model_input import (
    ModelInput,
    batch_size,
    is_model,
    load_plan_to_run,
    make_model_input,
    write_text,
)
from outsize.cli.screen import Screen
from outsize.errors import BadOption
from outsize.ir.answers.job import DNS_LABEL
from outsize.ir.formatting import whole_number
from outsize.ops.jobs.engines import Engine, Scheduler

if TYPE_CHECKING:
    from outsize.api.options import OutlookOptions
    from outsize.ir.answers.job import ClusterJob, JobRequest
    from outsize.ir.plan import Plan

_MOST_NODES = 4096

JobEngine = Annotated[
    Engine, typer.Argument(metavar="ENGINE", help="slurm, kubernetes, ray, skypilot or dstack.")
]
Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="The script that runs, or a MODEL (see outsize run).", show_default=False
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- ARGS...]", help="The script's arguments, behind --.", show_default=False),
]
Nodes = Annotated[str, typer.Option("--nodes", metavar="COUNT|MIN:MAX", help="Numbers of nodes to plan for.")]
Plans = Annotated[
    list[Path] | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        help="The plan of the run. Other numbers of nodes are planned like it; without --model, give one for "
        "each.",
    ),
]
ScriptModel = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="The MODEL that the script trains, to plan it.")
]
NodeCluster = Annotated[
    str | None,
    typer.Option("--cluster", help="The devices of one node: 8xh100-80gb (default: those of --plan)."),
]
PodScheduler = Annotated[
    Scheduler, typer.Option("--scheduler", help="On Kubernetes: what starts all pods together.")
]
Name = Annotated[
    str | None, typer.Option("--name", help="Name of the job (default: that of the script or model).")
]
Image = Annotated[
    str, typer.Option("--image", help="Container image with outsize and the script's packages.")
]
Claim = Annotated[
    str, typer.Option("--claim", help="On Kubernetes: the volume claim with script and checkpoints.")
]
Folder = Annotated[
    str,
    typer.Option(
        "--folder", metavar="DIR", help="Where the claim is mounted, and a MODEL's checkpoints are."
    ),
]
Queue = Annotated[
    str | None,
    typer.Option("--queue", help="Queue or partition that is there (default: the file makes one)."),
]
Grace = Annotated[
    int, typer.Option("--grace", min=10, metavar="SECONDS", help="Time to save the run after a signal.")
]
Restarts = Annotated[int, typer.Option("--max-restarts", min=0, help="Restarts of a run that has failed.")]
Minutes = Annotated[int | None, typer.Option("--minutes", min=1, help="Limit of the job's time.")]
Elastic = Annotated[
    bool,
    typer.Option("--elastic/--fixed", help="Whether fewer nodes will do, where the engine can change them."),
]
Share = Annotated[
    bool,
    typer.Option(
        "--share-gpus", help="With --scheduler kai: ask for the memory that the plans need, not whole GPUs."
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Write the job here (default: stdout).")
]


@uncollected()
def emit(
    engine: JobEngine,
    target: Target,
    arguments: Arguments = None,
    nodes: Nodes = "1",
    plan: Plans = None,
    model: ScriptModel = None,
    input: options.Input = None,
    batch: options.Batch = None,
    cluster: NodeCluster = None,
    optimizer: options.Optimizer = "adamw",
    precision: options.Precision = "fp32",
    exact: options.Exact = False,
    scheduler: PodScheduler = "kubeflow",
    name: Name = None,
    image: Image = "outsize:latest",
    claim: Claim = "outsize",
    folder: Folder = "/work",
    queue: Queue = None,
    grace: Grace = 120,
    max_restarts: Restarts = 3,
    minutes: Minutes = None,
    elastic: Elastic = True,
    share_gpus: Share = False,
    out: Out = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Write a job file that starts a script, or trains MODEL, on a cluster.

    Each number of nodes is planned; the file has those that fit, with what is predicted of each, and why the
    others are left out. All nodes start together; a signal before the end saves the run (exit code 75), and
    the engine starts it again.
    """
    from outsize.ir.answers.job import ClusterJob
    from outsize.ops.jobs.engines import job_text

    if share_gpus and (engine, scheduler) != ("kubernetes", "kai"):
        raise BadOption(
            "--share-gpus is for the KAI scheduler, which gives parts of a GPU",
            numbers=f"ENGINE {engine}, --scheduler {scheduler}",
            next_step="outsize emit kubernetes TARGET --scheduler kai --share-gpus",
        )
    screen, plans = Screen(json), _plans(plan)
    trained = target if is_model(target) else model
    if trained is None:
        request = _request_of_plans(plans, nodes, cluster)
    else:
        asked: OutlookOptions = {"optimizer": optimizer, "precision": precision, "exact": exact}
        with screen.working(f"planning {trained} for {nodes} nodes"):
            size = batch_size(batch, plans[0] if plans else None)
            inputs = make_model_input(trained, input, size, meta=True, seed=seed)
            request = _request(inputs, asked, plans, nodes, cluster)
    if share_gpus and not request.has_accelerators:
        raise BadOption(
            "--share-gpus gives parts of a GPU, and the nodes have none",
            numbers=f"nodes of {request.node}",
            next_step="leave it out",
        )
    label = _label("--name", name) or _label_of(target)
    job = ClusterJob(
        name=label,
        request=request,
        target=(target, *(arguments or ()), *_model_options(target, input, request, label)),
        elastic=elastic,
        grace_s=grace,
        restarts=max_restarts,
        minutes=minutes,
        image=image,
        claim=claim,
        folder=folder,
        queue=_label("--queue", queue),
        share=share_gpus,
        made_by=f"outsize {__version__}: {shlex.join(['outsize', *sys.argv[1:]])}",
    )
    _deliver(screen, job, job_text(job, engine, scheduler), out)


def nodes_in(text: str) -> range:
    """Returns the numbers of nodes of `4` or `1:4`. Raises BadOption."""
    least, colon, most = text.partition(":")
    numbers = [whole_number(part) or 0 for part in (least, most if colon else least)]
    if not 0 < numbers[0] <= numbers[1] <= _MOST_NODES:
        raise BadOption(
            f"--nodes {text} is no number of nodes",
            numbers=f"at most {_MOST_NODES}",
            next_step="--nodes 4, or --nodes 1:4",
        )
    return range(numbers[0], numbers[1] + 1)


def _plans(paths: Sequence[Path] | None) -> list[Plan]:
    """Returns the plans of --plan. Raises BadPlan and UnsupportedPlan."""
    return [plan for path in paths or () if (plan := load_plan_to_run(path)) is not None]


def _request_of_plans(plans: Sequence[Plan], nodes: str, cluster: str | None) -> JobRequest:
    """Returns the request of a script whose model is not known. Raises BadOption without a plan."""
    from outsize.ops.jobs.requests import job_request_of_plans

    if not plans:
        raise BadOption(
            "nothing says how much memory and time the script's model takes",
            next_step="--plan FILE (outsize plan MODEL --out FILE), or --model package.module:builder",
        )
    return job_request_of_plans(plans, nodes_in(nodes), cluster)


def _request(
    inputs: ModelInput, asked: OutlookOptions, plans: Sequence[Plan], nodes: str, cluster: str | None
) -> JobRequest:
    """Returns the request of a model that is planned here. Raises BadOption for several plans."""
    from outsize.ops.jobs.requests import job_request

    if len(plans) > 1:
        raise BadOption(
            "the model is planned here, like one plan",
            numbers=f"{len(plans)} plans",
            next_step="one --plan, or leave out --model",
        )
    options_with_loss: OutlookOptions = {**asked, **inputs.loss}
    if plans:
        options_with_loss["plan"] = plans[0]
    if cluster is not None or not plans:
        options_with_loss["cluster"] = cluster or "local"
    return job_request(*inputs.call, nodes=nodes_in(nodes), **options_with_loss)


def _model_options(target: str, input: str | None, request: JobRequest, name: str) -> tuple[str, ...]:
    """Returns the options of `outsize run MODEL` by which it trains the model that was planned."""
    if not is_model(target):
        return ()
    shape = () if input is None else ("--input", input)
    return (*shape, "--batch", str(request.batch_size), "--checkpoint", f"{name},every=10m")


def _label_of(target: str) -> str:
    """Returns the name of a job of a script or a MODEL: `train.py` gives `train`."""
    last = re.split(r"[/:]", target.partition("?")[0])[-1].removesuffix(".py").lower()
    return re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:48].strip("-") or "outsize"


def _label(option: str, text: str | None) -> str | None:
    """Returns the text. Raises BadOption for one that Kubernetes takes for no name."""
    if text is not None and not re.fullmatch(DNS_LABEL, text):
        raise BadOption(
            f"{option} {text} is no name of a job or queue",
            numbers="small letters, digits and -, at most 48",
            next_step=f"{option} {_label_of(text)}",
        )
    return text


def _deliver(screen: Screen, job: ClusterJob, text: str, out: Path | None) -> None:
    """Writes the job file, and what it is made of under --json."""
    if out is not None:
        write_text(out, text)
    document = {"job": job.model_dump(mode="json"), "text": text}
    if screen.as_json or out is None:
        screen.document_or_text(document, text)
        return
    sizes = ", ".join(str(size.nodes) for size in job.request.sizes)
    screen.note(f"{out}: numbers of nodes that have a plan: {sizes}")
