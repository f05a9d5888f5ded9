"""`outsize run`: a script over processes with torchrun's flags, or a MODEL trained for some steps.

outsize run --nproc-per-node 2 train.py ARGS...     what stands behind the script is the script's
outsize run -m package.module ARGS...
outsize run MODEL --steps 20 --report report.html    options may stand behind MODEL
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Final, final

import typer
from typer.core import TyperCommand

from outsize.cli import options
from outsize.cli.job import Job, Outcome
from outsize.cli.launching import Place, run_job
from outsize.cli.screen import Screen
from outsize.cli.subject import batch_size, load_plan_to_run, write_text
from outsize.cli.trace import outcome_tables, write_trace
from outsize.errors import BadOption
from outsize.train.launch import processes_for

STEPS: Final = 10
_PROCESSES: Final = "Processes (torchrun's flags, before TARGET)"
_FOR_MODELS: Final = (
    *("steps", "input", "batch", "lr", "plan", "weights", "stages", "devices", "microbatches", "schedule"),
    *("measure", "seed", "report", "trace", "json"),
)
# Handed on as they are. Their names are torchrun's own: its parser checks them, and reads PET_* beside.
_FOR_TORCHRUN: Final = (
    *("nnodes", "node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rdzv_id"),
    *("rdzv_conf", "standalone", "max_restarts", "monitor_interval", "local_addr", "log_dir", "redirects"),
    *("tee", "shutdown_timeout"),
)

Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="train.py, a module with -m, or a MODEL.", show_default=False)
]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="Of the script.", show_default=False)
]


def _torchruns(name: str, help: str, *short: str, **more: Any) -> Any:
    """An option that is handed on to torchrun's own parser, spelled in all ways as there."""
    names = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}", *short))
    return typer.Option(*names, help=help, rich_help_panel=_PROCESSES, show_default=False, **more)


Nproc = Annotated[
    str | None,
    _torchruns(
        "nproc-per-node",
        "Processes on this machine: a number, cpu, gpu or auto (default: 1 for a script; for a MODEL "
        "one per stage, else 2).",
        metavar="COUNT",
        envvar="PET_NPROC_PER_NODE",
        show_envvar=False,
    ),
]
Nnodes = Annotated[str | None, _torchruns("nnodes", "Machines, or MIN:MAX of them.", metavar="COUNT")]
NodeRank = Annotated[int | None, _torchruns("node-rank", "Number of this machine, from 0.")]
MasterAddr = Annotated[str | None, _torchruns("master-addr", "Where machine 0 is.")]
MasterPort = Annotated[int | None, _torchruns("master-port", "Its port (one machine: a free one).")]
Backend = Annotated[str | None, _torchruns("rdzv-backend", "How machines meet: static, c10d, etcd-v2.")]
Endpoint = Annotated[str | None, _torchruns("rdzv-endpoint", "Where they meet.", metavar="HOST:PORT")]
RunId = Annotated[str | None, _torchruns("rdzv-id", "The same on all machines of a run.")]
Conf = Annotated[str | None, _torchruns("rdzv-conf", "More of how they meet.", metavar="KEY=VALUE,...")]
Standalone = Annotated[bool, _torchruns("standalone", "One machine, whatever the rest says.")]
Restarts = Annotated[int | None, _torchruns("max-restarts", "Restarts of all processes when one fails.")]
Interval = Annotated[float | None, _torchruns("monitor-interval", "Seconds between two looks at them.")]
LocalAddr = Annotated[str | None, _torchruns("local-addr", "This machine's address for the others.")]
LogDir = Annotated[str | None, _torchruns("log-dir", "Where --tee and --redirects write.")]
Redirects = Annotated[
    str | None, _torchruns("redirects", "Streams to files: 3, or 0:1,1:2 by local rank.", "-r")
]
Tee = Annotated[str | None, _torchruns("tee", "Streams to files and here, as --redirects.", "-t")]
Shutdown = Annotated[int | None, _torchruns("shutdown-timeout", "Seconds from SIGTERM to SIGKILL (5).")]
Module = Annotated[
    bool,
    typer.Option("-m", "--module", help="TARGET is a module, as in python -m.", rich_help_panel=_PROCESSES),
]
Steps = Annotated[int, typer.Option("--steps", min=1, help="AdamW steps on one random batch.")]
Lr = Annotated[float, typer.Option("--lr", help="Learning rate.")]
Devices = Annotated[
    str | None,
    typer.Option("--devices", metavar="LIST", help="Of one process, instead of several: cuda:0,cuda:1."),
]
Report = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Write an offline HTML report.")
]
Trace = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write a timeline for ui.perfetto.dev.")
]


@final
class RunCommand(TyperCommand):
    """Options end at a script, as torchrun's do; they may follow a MODEL."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Look at TARGET first, then read the line the way that fits it."""
        ctx.allow_interspersed_args = False
        first, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        ctx.allow_interspersed_args = _is_model(first.get("target"), bool(first.get("module")))
        return super().parse_args(ctx, args)


def run(
    ctx: typer.Context,
    target: Target,
    arguments: Arguments = None,
    nproc_per_node: Nproc = None,
    nnodes: Nnodes = None,
    node_rank: NodeRank = None,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    rdzv_backend: Backend = None,
    rdzv_endpoint: Endpoint = None,
    rdzv_id: RunId = None,
    rdzv_conf: Conf = None,
    standalone: Standalone = False,
    max_restarts: Restarts = None,
    monitor_interval: Interval = None,
    local_addr: LocalAddr = None,
    log_dir: LogDir = None,
    redirects: Redirects = None,
    tee: Tee = None,
    shutdown_timeout: Shutdown = None,
    module: Module = False,
    steps: Steps = STEPS,
    input: options.Input = None,
    batch: options.Batch = None,
    lr: Lr = 1e-3,
    plan: options.PlanFile = None,
    weights: options.Weights = None,
    stages: options.Stages = None,
    devices: Devices = None,
    microbatches: options.Microbatches = None,
    schedule: options.AnySchedule = None,
    measure: options.Measure = False,
    seed: options.Seed = 0,
    report: Report = None,
    trace: Trace = None,
    json: options.Json = False,
) -> None:
    """Run a script or a module over processes, or train MODEL for some steps.

    What follows a script belongs to the script; the Options are for a MODEL.

    MODEL is trained on a random batch, one process per stage; its figures are shown beside the predicted.
    """
    given = {name: ctx.params[name] for name in _FOR_TORCHRUN}
    place = Place(
        nproc_per_node, {name: value for name, value in given.items() if value not in (None, False)}
    )
    if not _is_model(target, module):
        _refuse_for_scripts(ctx)
        _run_script(place, [target, *(arguments or ())], module)
        return
    if arguments:
        raise BadOption(f"{arguments[0]!r} behind the MODEL", next_step="outsize run MODEL --steps 10")
    screen, chosen = Screen(json), load_plan_to_run(plan)
    options.refuse_beside(chosen, "--plan", stages=stages, microbatches=microbatches, schedule=schedule)
    job = Job(
        model=target,
        input=input,
        batch=batch_size(batch, chosen),
        steps=steps,
        lr=lr,
        seed=seed,
        plan=chosen,
        weights=weights,
        devices=tuple(devices.split(",")) if devices else (),
        **options.ordered(schedule, stages, microbatches),
        measure=measure,
        watch_memory=trace is not None,
        as_json=json,
    )
    outcome = run_job(job, place, screen)
    if outcome is not None:
        _deliver(screen, job, outcome)
        _write_files(outcome, report, trace)


def _is_model(target: object, module: bool) -> bool:
    """`provider:name`, unless a file has this very name."""
    return isinstance(target, str) and ":" in target and not module and not Path(target).exists()


def _run_script(place: Place, argv: list[str], module: bool) -> None:
    target = argv[0]
    if not module and not Path(target).exists() and not target.endswith(".py"):
        raise BadOption(
            f"{target!r} is neither a file nor a MODEL",
            next_step=f"outsize run train.py, outsize run torchvision:{target}, or -m {target}",
        )
    code = place.launch(argv, processes_for(place.nproc_per_node or "1"), module=module)
    if code:
        raise typer.Exit(code)


def _refuse_for_scripts(ctx: typer.Context) -> None:
    """A MODEL's option before a script would be lost in silence."""
    given = [name for name in _FOR_MODELS if _source(ctx, name) == "COMMANDLINE"]
    if given:
        raise BadOption(
            f"--{given[0]} is an option of a MODEL run",
            next_step=f"put the script's own options behind it: outsize run train.py --{given[0]} ...",
        )


def _source(ctx: typer.Context, name: str) -> str:
    source = ctx.get_parameter_source(name)
    return source.name if source is not None else ""


def _deliver(screen: Screen, job: Job, outcome: Outcome) -> None:
    screen.result(outcome.document(), lambda: outcome_tables(job, outcome))


def _write_files(outcome: Outcome, report: Path | None, trace: Path | None) -> None:
    if trace is not None:
        write_trace(trace, outcome)
    if report is not None:
        write_text(report, _page(outcome))


def _page(outcome: Outcome) -> str:
    from outsize.report.html import render

    return render(
        plan=outcome.plan,
        graph=outcome.graph,
        predicted=outcome.predicted,
        measured=outcome.measured,
        losses=outcome.losses,
        verdict=None,
        commands=[shlex.join(["outsize", *sys.argv[1:]])],
    )
