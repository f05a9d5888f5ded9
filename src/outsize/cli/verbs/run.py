"""Implements `outsize run`: a script over processes with torchrun's flags, or a MODEL trained for some steps.

outsize run --nproc-per-node 2 train.py ARGS...     what follows the script belongs to the script
outsize run -m package.module ARGS...
outsize run MODEL --steps 20 --report report.html    options may follow the MODEL
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, final

import typer
from typer.core import TyperCommand

from outsize.cli import options
from outsize.cli.flags import with_records
from outsize.cli.model_input import is_model, plan_or_request, write_text
from outsize.cli.processes.job import FinishedRun, RunJob, RunOutcome
from outsize.cli.processes.launch import LaunchPlace, run_job
from outsize.cli.screen import Screen
from outsize.cli.verbs.trace import outcome_tables, write_trace
from outsize.errors import BadOption
from outsize.files.run_folders import RunFolder
from outsize.ir.answers.request import LayoutOptions
from outsize.ir.hardware.memory_share import checked_share
from outsize.ops.launch.launch import processes_for
from outsize.ops.watchdog.options import WatchOptions
from outsize.train.checkpoint.interval import SaveInterval

STEPS: Final = 10
_PROCESSES: Final = "Processes (torchrun's flags, before TARGET)"
_FOR_MODELS: Final = (
    *("steps", "input", "batch", "lr", "plan", "weights", "stages", "devices", "microbatches", "schedule"),
    *("exact", "measure", "seed", "report", "trace", "json"),
    *("checkpoint", "every", "keep"),
)
# How launchers call a count of processes or machines, and the option of it here.
_COUNTED: Final = {
    "nproc_per_node": "--nproc-per-node",
    "nproc": "--nproc-per-node",
    "num_processes": "--nproc-per-node",
    "nnodes": "--nnodes",
    "num_machines": "--nnodes",
}
_COUNTS: Final = re.compile(r"[0-9]{1,6}(:[0-9]{1,6})?")
# A run that saves itself gets as long after a signal as SLURM and Kubernetes give it.
SAVING_S: Final = 30
Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="train.py, a module with -m, or a MODEL.", show_default=False)
]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="The script's arguments.", show_default=False)
]


def _torchruns(name: str, help: str, *short: str, **more: Any) -> Any:
    """Returns an option that is passed on to torchrun's own parser, in all of its spellings."""
    names = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}", *short))
    return typer.Option(*names, help=help, rich_help_panel=_PROCESSES, show_default=False, **more)


Nproc = Annotated[
    str | None,
    _torchruns(
        "nproc-per-node",
        "Processes on this machine: a number, cpu, gpu, auto, or MIN:MAX, where one that is killed is not "
        "replaced (default: 1 for a script; for a MODEL one per stage, else 2).",
        metavar="COUNT",
        envvar="PET_NPROC_PER_NODE",
        show_envvar=False,
    ),
]
Nnodes = Annotated[str | None, _torchruns("nnodes", "Machines, or MIN:MAX of them.", metavar="COUNT")]
NodeRank = Annotated[int | None, _torchruns("node-rank", "Number of this machine, from 0.")]
MasterAddr = Annotated[str | None, _torchruns("master-addr", "Address of machine 0.")]
MasterPort = Annotated[
    int | None,
    _torchruns("master-port", "Port on machine 0 (one machine: a free one).", min=0, max=65535),
]
Backend = Annotated[str | None, _torchruns("rdzv-backend", "How machines meet: static, c10d, etcd-v2.")]
Endpoint = Annotated[str | None, _torchruns("rdzv-endpoint", "Where machines meet.", metavar="HOST:PORT")]
RunId = Annotated[str | None, _torchruns("rdzv-id", "Name of the run, the same on all machines.")]
Conf = Annotated[
    str | None, _torchruns("rdzv-conf", "Further settings of how machines meet.", metavar="KEY=VALUE,...")
]
Standalone = Annotated[bool, _torchruns("standalone", "One machine, whatever the other options say.")]
Restarts = Annotated[int | None, _torchruns("max-restarts", "Restarts of all processes when one fails.")]
Interval = Annotated[
    float | None, _torchruns("monitor-interval", "Seconds between two checks of the processes.")
]
LocalAddr = Annotated[str | None, _torchruns("local-addr", "This machine's address for the others.")]
LogDir = Annotated[str | None, _torchruns("log-dir", "Where --tee and --redirects write.")]
Redirects = Annotated[
    str | None,
    _torchruns("redirects", "Output to files: 1 stdout, 2 stderr, 3 both; 0:1,1:2 by local rank.", "-r"),
]
Tee = Annotated[
    str | None, _torchruns("tee", "Output to files and to the terminal; values as of --redirects.", "-t")
]
Shutdown = Annotated[
    int | None, _torchruns("shutdown-timeout", "Seconds from SIGTERM to SIGKILL (5; to save: 30).")
]
HangTimeout = Annotated[
    float | None,
    typer.Option(
        "--hang-timeout",
        metavar="SECONDS",
        help="Without progress for so long (10, and five steps at least) ranks find out for whom they wait; "
        "0: never.",
        rich_help_panel=_PROCESSES,
        show_default=False,
    ),
]
HangAction = Annotated[
    str | None,
    typer.Option(
        "--on-hang",
        metavar="end|wait",
        help="What follows when a run cannot go on: end it (default), or wait.",
        rich_help_panel=_PROCESSES,
        show_default=False,
    ),
]
OutOfMemory = Annotated[
    str | None,
    typer.Option(
        "--on-oom",
        metavar="raise|replan",
        help="Where a device of a script's run has no memory: end (default), or start again by a plan for "
        "less of it, from the newest checkpoint (--max-restarts).",
        rich_help_panel=_PROCESSES,
        show_default=False,
    ),
]
Copies = Annotated[
    str | None,
    typer.Option(
        "--peer-copies",
        metavar="INTERVAL",
        help="Copy the run into this machine's memory after every 1 (steps), 30s or 10m: a worker that is "
        "killed loses no more (--max-restarts).",
        rich_help_panel=_PROCESSES,
        show_default=False,
    ),
]
Share = Annotated[
    float | None,
    typer.Option(
        "--memory-share",
        metavar="SHARE",
        help="Plan with this share of each device's memory, and hold the run to it: 0.5 (default: all).",
        rich_help_panel=_PROCESSES,
        show_default=False,
    ),
]
PerDevice = Annotated[
    int,
    typer.Option(
        "--ranks-per-device",
        metavar="N",
        min=1,
        help="So many processes compute on each device, as if each had one of its own with an Nth of the "
        "memory: a layout for several devices, tried on one (NVIDIA: NCCL 2.30).",
        rich_help_panel=_PROCESSES,
        show_default=False,
    ),
]
Dashboard = Annotated[
    bool,
    typer.Option(
        "--dashboard",
        help="Serve a page and Prometheus metrics of the run on this machine alone; the address is shown.",
        rich_help_panel=_PROCESSES,
    ),
]
DashboardPort = Annotated[
    int,
    typer.Option(
        "--dashboard-port",
        min=0,
        max=65535,
        help="Port of --dashboard (0: a free one).",
        rich_help_panel=_PROCESSES,
    ),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        "--secret-file",
        metavar="FILE",
        help="A file of mode 0600 with the same text on every machine, which seals what they tell each other "
        "(or OUTSIZE_RUN_SECRET).",
        rich_help_panel=_PROCESSES,
        show_default=False,
    ),
]
Module = Annotated[
    bool,
    typer.Option("-m", "--module", help="TARGET is a module, as in python -m.", rich_help_panel=_PROCESSES),
]
Steps = Annotated[int, typer.Option("--steps", min=1, help="AdamW steps on one random batch.")]
Lr = Annotated[float, typer.Option("--lr", help="Learning rate.")]
Devices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="COUNT|MIN:MAX|LIST",
        help="So many processes, each with a device; of 2:8 as many as `outsize scale` says; or, for a "
        "MODEL, these devices in one process: cuda:0,cuda:1.",
    ),
]
Report = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Write an offline HTML report.")
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint", metavar="DIR", help="Save the run here, and go on from the newest checkpoint here."
    ),
]
Every = Annotated[
    str | None,
    typer.Option(
        "--every", metavar="INTERVAL", help="Save every 500 (steps), 90s, 10m or 2h, and at the end."
    ),
]
Keep = Annotated[int | None, typer.Option("--keep", min=1, help="How many checkpoints stay (default: all).")]
Trace = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write a timeline for ui.perfetto.dev.")
]


@final
class RunCommand(TyperCommand):
    """A command whose options end at a script, as torchrun's do; they may follow a MODEL."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses TARGET first, then the whole line in the way that fits it."""
        ctx.allow_interspersed_args = False
        first, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        ctx.allow_interspersed_args = is_model(first.get("target"), bool(first.get("module")))
        return super().parse_args(ctx, args)


@final
@dataclass(frozen=True)
class TorchrunFlags:
    """torchrun's own flags, which are passed on to its parser unchanged."""

    nproc_per_node: Nproc = None
    nnodes: Nnodes = None
    node_rank: NodeRank = None
    master_addr: MasterAddr = None
    master_port: MasterPort = None
    rdzv_backend: Backend = None
    rdzv_endpoint: Endpoint = None
    rdzv_id: RunId = None
    rdzv_conf: Conf = None
    standalone: Standalone = False
    max_restarts: Restarts = None
    monitor_interval: Interval = None
    local_addr: LocalAddr = None
    log_dir: LogDir = None
    redirects: Redirects = None
    tee: Tee = None
    shutdown_timeout: Shutdown = None

    def passed_on(self, *, saves: bool) -> dict[str, Any]:
        """Returns what is given, by name, but the processes of this machine; a run that `saves` itself has
        time for it after a signal.
        """
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "nproc_per_node"}
        if saves and self.shutdown_timeout is None:
            given["shutdown_timeout"] = SAVING_S
        return {name: value for name, value in given.items() if value not in (None, False)}


@final
@dataclass(frozen=True)
class ProcessFlags:
    """How the processes of a run are watched, restarted, shown and share their devices."""

    hang_timeout: HangTimeout = None
    on_hang: HangAction = None
    on_oom: OutOfMemory = None
    peer_copies: Copies = None
    secret_file: SecretFile = None
    memory_share: Share = None
    ranks_per_device: PerDevice = 1
    dashboard: Dashboard = False
    dashboard_port: DashboardPort = 0

    @property
    def beside(self) -> Callable[[RunFolder | None], AbstractContextManager[None]]:
        """Returns what goes on beside the run in the launcher: the server of its page, if asked for."""
        return _dashboard(self.dashboard_port) if self.dashboard or self.dashboard_port else _nothing


@final
@dataclass(frozen=True)
class TrainingFlags:
    """How a MODEL is trained."""

    steps: Steps = STEPS
    input: options.Input = None
    batch: options.Batch = None
    lr: Lr = 1e-3


@final
@dataclass(frozen=True)
class PlanFlags:
    """The plan of a MODEL run, or what is asked of one, and where it runs."""

    plan: options.PlanFile = None
    weights: options.WeightFiles = None
    stages: options.Stages = None
    devices: Devices = None
    microbatches: options.Microbatches = None
    schedule: options.ScheduleOrFile = None
    exact: options.Exact = False
    measure: options.Measure = False

    @property
    def layout(self) -> LayoutOptions:
        """Returns what is asked of a plan. Raises BadOption and InvalidSchedule."""
        return {
            "stages": self.stages,
            "microbatches": self.microbatches,
            "schedule": options.schedule_or_file(self.schedule),
            "exact": self.exact if self.plan is None else None,
        }

    @property
    def is_counted(self) -> bool:
        """Tells whether `--devices` is a number of processes, or a range of it."""
        return self.devices is not None and _COUNTS.fullmatch(self.devices) is not None


@final
@dataclass(frozen=True)
class SaveFlags:
    """Where and how often a MODEL run saves itself."""

    checkpoint: Checkpoint = None
    every: Every = None
    keep: Keep = None

    def check(self) -> None:
        """Raises BadOption for an interval that makes no sense, or where there is no folder to save in."""
        if self.checkpoint is None and (self.every is not None or self.keep is not None):
            option = "--every" if self.every is not None else "--keep"
            raise BadOption(
                f"{option} is for checkpoints, and there is no folder for them",
                next_step="--checkpoint DIR",
            )
        if self.every is not None:
            SaveInterval.parse(self.every)


# As if nothing were given: a place for each record among parameters that have a default.
_TORCHRUN: Final = TorchrunFlags()
_PROCESS: Final = ProcessFlags()
_TRAINING: Final = TrainingFlags()
_PLANNED: Final = PlanFlags()
_SAVES: Final = SaveFlags()


@with_records
def run(
    ctx: typer.Context,
    target: Target,
    arguments: Arguments = None,
    launcher: TorchrunFlags = _TORCHRUN,
    processes: ProcessFlags = _PROCESS,
    module: Module = False,
    training: TrainingFlags = _TRAINING,
    planned: PlanFlags = _PLANNED,
    seed: options.Seed = 0,
    saves: SaveFlags = _SAVES,
    report: Report = None,
    trace: Trace = None,
    json: options.Json = False,
) -> None:
    """Run a script or a module over processes, or train MODEL for some steps.

    What follows a script belongs to the script; the Options are for a MODEL.

    MODEL is trained on a random batch, one process per stage; measured and predicted figures are shown.
    """
    scales, is_for_model = planned.is_counted, is_model(target, module)
    if scales and launcher.nproc_per_node is not None:
        raise BadOption(
            "--devices and --nproc-per-node both say how many processes there are",
            numbers=f"--devices {planned.devices}, --nproc-per-node {launcher.nproc_per_node}",
            next_step=f"--devices {planned.devices}",
        )
    share = processes.memory_share
    place = LaunchPlace(
        planned.devices if scales else launcher.nproc_per_node,
        launcher.passed_on(saves=saves.checkpoint is not None),
        WatchOptions.given(processes.hang_timeout, processes.on_hang, os.environ),
        _checked(processes.on_oom, launcher.max_restarts, is_model=is_for_model),
        _checked_copies(processes.peer_copies, launcher.max_restarts),
        processes.secret_file,
        publishes=True,
        memory_share=None if share is None else checked_share(share),
        ranks_per_device=processes.ranks_per_device,
        beside=processes.beside,
    )
    if not is_for_model:
        _refuse_for_scripts(ctx, [name for name in _FOR_MODELS if not (scales and name == "devices")])
        _run_script(place, [target, *(arguments or ())], module)
        return
    if arguments:
        raise BadOption(
            f"{arguments[0]!r} follows the MODEL, which takes only options",
            next_step="outsize run MODEL --steps 10",
        )
    saves.check()
    screen = Screen(json)
    chosen, request = plan_or_request(planned.plan, training.batch, planned.layout)
    job = RunJob(
        model=target,
        input=training.input,
        request=request,
        steps=training.steps,
        lr=training.lr,
        seed=seed,
        plan=chosen,
        weights=planned.weights,
        devices=tuple(planned.devices.split(",")) if planned.devices and not scales else (),
        checkpoint=saves.checkpoint,
        every=saves.every,
        keep=saves.keep,
        measure=planned.measure,
        watched=json or trace is not None or report is not None,
        as_json=json,
    )
    outcome = run_job(job, place, screen)
    if isinstance(outcome, FinishedRun):
        screen.emit(outcome.document())  # in words a note has said so
    elif outcome is not None:
        _deliver(screen, job, outcome)
        _write_files(outcome, report, trace)


def _nothing(_: RunFolder | None) -> AbstractContextManager[None]:
    return nullcontext()


def _dashboard(port: int) -> Callable[[RunFolder | None], AbstractContextManager[None]]:
    """Returns what serves the run's page. Raises BadOption."""
    from outsize.ops.publish import dashboard

    return dashboard.dashboard(port, os.environ.get(dashboard.TOKEN), dashboard.say)


def _checked(on_oom: str | None, max_restarts: int | None, *, is_model: bool) -> str | None:
    """Returns what follows where a device has no memory. Raises BadOption for what cannot be done."""
    if on_oom not in (None, "raise", "replan"):
        raise BadOption(f"--on-oom {on_oom} is unknown", next_step="--on-oom raise, or replan")
    if on_oom == "replan" and is_model:
        raise BadOption(
            "--on-oom replan is for scripts, whose parallelize(resume=FOLDER) says where checkpoints are",
            next_step="leave it out, or outsize run --max-restarts 3 --on-oom replan train.py",
        )
    if on_oom == "replan" and not max_restarts:
        raise BadOption(
            "--on-oom replan starts the run again, which --max-restarts has to allow",
            next_step="--max-restarts 3",
        )
    return on_oom


def _checked_copies(interval: str | None, max_restarts: int | None) -> str | None:
    """Returns how often the run copies itself into memory. Raises BadOption for what makes no sense."""
    if interval is None:
        return None
    if not max_restarts:
        raise BadOption(
            "copies in memory are for a run that starts again, which --max-restarts has to allow",
            next_step="--max-restarts 3",
        )
    SaveInterval.parse(interval)
    return interval


def _run_script(place: LaunchPlace, argv: list[str], module: bool) -> None:
    target = argv[0]
    if not module and not Path(target).exists() and not target.endswith(".py"):
        from outsize.capture.models.load import guess_provider

        raise BadOption(
            f"{target!r} is neither a file nor a MODEL",
            next_step=f"outsize run train.py, -m {target} for a module; for a MODEL {guess_provider(target)}",
        )
    if not module:
        _refuse_flags_of_ours(target, argv[1:])
    code = place.launch(argv, processes_for(place.most_nproc or "1"), module=module)
    if code:
        raise typer.Exit(code)


def _refuse_flags_of_ours(script: str, arguments: Sequence[str]) -> None:
    """Raises BadOption for the number of processes or machines behind a script that does not know the word:
    it would be the script's, and one process would train.
    """
    with suppress(OSError):
        text = Path(script).read_text(encoding="utf-8", errors="replace")
        for place, argument in enumerate(arguments):
            flag, _, value = argument.partition("=")
            word = flag.lstrip("-").replace("-", "_")
            if argument.startswith("--") and word in _COUNTED and word not in text.replace("-", "_"):
                value = value or next(iter(arguments[place + 1 :]), "2")
                raise BadOption(
                    f"{flag} follows {script}, so it is an argument of the script, and one process would run",
                    numbers=f"the script does not have the word {word}",
                    next_step=f"outsize run {_COUNTED[word]} {value} {script}",
                )


def _refuse_for_scripts(ctx: typer.Context, names: Sequence[str]) -> None:
    """Raises BadOption for a MODEL's option before a script, where it would have no effect."""
    model_options = [name for name in names if _source(ctx, name) == "COMMANDLINE"]
    if model_options:
        raise BadOption(
            f"--{model_options[0]} is an option of a MODEL run",
            next_step=f"put the script's options after it: outsize run train.py --{model_options[0]} ...",
        )


def _source(ctx: typer.Context, name: str) -> str:
    source = ctx.get_parameter_source(name)
    return source.name if source is not None else ""


def _deliver(screen: Screen, job: RunJob, outcome: RunOutcome) -> None:
    screen.result(outcome.document(), lambda: outcome_tables(job, outcome))


def _write_files(outcome: RunOutcome, report: Path | None, trace: Path | None) -> None:
    if trace is not None:
        write_trace(trace, outcome)
    if report is not None:
        write_text(report, _page(outcome))


def _page(outcome: RunOutcome) -> str:
    from outsize.report.html.page import PageFacts, render

    return render(
        PageFacts(
            plan=outcome.plan,
            graph=outcome.graph,
            profile=outcome.profile,
            predicted=outcome.predicted,
            measured=outcome.measured,
            history=outcome.history,
            verdict=None,
            commands=[shlex.join(["outsize", *sys.argv[1:]])],
        )
    )
