"""Implements `outsize run`: a script over processes with torchrun's flags, or a MODEL trained for some steps.

outsize run --nproc-per-node 2 train.py ARGS...     what follows the script belongs to the script
outsize run -m package.module ARGS...
outsize run MODEL --steps 20 --report report.html    options may follow the MODEL

A flag that is not listed here goes to torchrun's parser as it is, where that knows it.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, final

import typer
from typer.core import TyperCommand

from outsize.cli.command_line import TORCHRUN, Known, Line, read_line
from outsize.cli.flags import with_records
from outsize.cli.model_input import is_model, plan_or_request, write_text
from outsize.cli.processes.job import FinishedRun, RunJob, RunOutcome
from outsize.cli.processes.launch import LaunchPlace, run_job
from outsize.cli.run_flags import (
    Json,
    PlanFlags,
    ProcessFlags,
    RankFlags,
    Ranks,
    Report,
    ReportFlags,
    SaveFlags,
    Saves,
    Train,
    TrainFlags,
    TrainingFlags,
    Watch,
    WatchFlags,
)
from outsize.cli.screen import Screen
from outsize.cli.verbs.trace import outcome_tables, write_trace
from outsize.errors import BadOption
from outsize.ops.launch.launch import processes_for, torchrun_flags
from outsize.ops.launch.spec import LaunchOptions
from outsize.ops.watchdog.options import WatchOptions

_FOR_MODELS: Final = (
    *("steps", "input", "batch", "plan", "weights", "stages", "devices", "microbatches", "schedule"),
    *("axes", "exact", "checkpoint", "train", "report", "json"),
)
# How launchers call a count of processes or machines, and the option of it here.
_COUNTED: Final = {
    "nproc_per_node": "--nproc-per-node",
    "nproc": "--nproc-per-node",
    "num_processes": "--nproc-per-node",
    "nnodes": "--nnodes",
    "num_machines": "--nnodes",
}
# A run that saves itself gets as long after a signal as SLURM and Kubernetes give it.
SAVING_S: Final = 30
Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="train.py, a module with -m, or a MODEL.", show_default=False)
]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="The script's arguments.", show_default=False)
]


@final
class RunCommand(TyperCommand):
    """A command whose options end at a script, as torchrun's do; they may follow a MODEL."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Puts torchrun's flags aside, and parses the rest in the way that fits TARGET."""
        known = Known.of(ctx)
        if not ctx.resilient_parsing:
            known = replace(known, torchruns=torchrun_flags, of_models=[f"--{name}" for name in _FOR_MODELS])
        line = read_line(args, known, _is_at_script)
        is_for_model = line.target is not None and is_model(line.target, _names_module(line))
        ctx.allow_interspersed_args = is_for_model
        if not ctx.resilient_parsing:  # else a shell asks how the line may go on
            for_models = [flag for flag, old in line.old.items() if old.flag.lstrip("-") in _FOR_MODELS]
            if for_models and line.target is not None and not is_for_model:
                raise _not_for_scripts(for_models[0])
            line.warn(ctx.info_name)
        ctx.meta[TORCHRUN] = line.torchruns
        return super().parse_args(ctx, line.arguments)


def _names_module(line: Line) -> bool:
    return not {"-m", "--module"}.isdisjoint(line.plain)


def _is_at_script(target: str, line: Line) -> bool:
    """Tells whether what follows TARGET belongs to a script."""
    return not is_model(target, _names_module(line))


# As if nothing were given: a place for each record among parameters that have a default.
_PROCESS: Final = ProcessFlags()
_TRAINING: Final = TrainingFlags()
_PLANNED: Final = PlanFlags()
_RANKS: Final = RankFlags()
_WATCH: Final = WatchFlags()
_SAVES: Final = SaveFlags()
_TRAIN: Final = TrainFlags()
_REPORT: Final = ReportFlags()


@with_records
def run(
    ctx: typer.Context,
    target: Target,
    arguments: Arguments = None,
    processes: ProcessFlags = _PROCESS,
    ranks: Ranks = _RANKS,
    watch: Watch = _WATCH,
    training: TrainingFlags = _TRAINING,
    planned: PlanFlags = _PLANNED,
    checkpoint: Saves = _SAVES,
    train: Train = _TRAIN,
    report: Report = _REPORT,
    json: Json = False,
) -> None:
    """Run a script or a module over processes, or train MODEL for some steps.

    What follows a script belongs to it. MODEL is trained on a random batch.

    torchrun's flags go to torchrun: --nnodes, --rdzv-endpoint, --max-restarts.
    """
    is_for_model = is_model(target, processes.module)
    watched = WatchOptions.given(watch.hang_timeout, watch.on_hang, watch.verify, os.environ)
    how = LaunchOptions(watch=watched, publishes=True, beside=watch.beside)
    bare = LaunchPlace(processes.count, _torchruns(ctx, saves=checkpoint.folder is not None), how)
    place = ranks.launched(bare, is_model=is_for_model)
    if not is_for_model:
        _refuse_for_scripts(
            ctx, [name for name in _FOR_MODELS if not (processes.is_counted and name == "devices")]
        )
        _run_script(place, [target, *(arguments or ())], processes.module)
        return
    if arguments:
        raise BadOption(
            f"{arguments[0]!r} follows the MODEL, which takes only options",
            next_step="outsize run MODEL --steps 10",
        )
    checkpoint.check()
    screen = Screen(json)
    chosen, request = plan_or_request(planned.plan, training.batch, planned.layout)
    job = RunJob(
        model=target,
        input=training.input,
        request=request,
        steps=training.steps,
        lr=train.lr,
        seed=train.seed,
        plan=chosen,
        weights=planned.weights,
        devices=processes.places,
        checkpoint=checkpoint.folder,
        every=checkpoint.every,
        keep=checkpoint.keep,
        measure=train.measure,
        watched=json or report != _REPORT,
        as_json=json,
    )
    outcome = run_job(job, place, screen)
    if isinstance(outcome, FinishedRun):
        screen.emit(outcome.document())  # in words a note has said so
    elif outcome is not None:
        _deliver(screen, job, outcome)
        _write_files(outcome, report)


def _torchruns(ctx: typer.Context, *, saves: bool) -> dict[str, Any]:
    """Returns torchrun's flags by name; a run that `saves` itself has time for it after a signal."""
    return ({"shutdown_timeout": SAVING_S} if saves else {}) | ctx.meta[TORCHRUN]


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
        raise _not_for_scripts(f"--{model_options[0]}")


def _not_for_scripts(flag: str) -> BadOption:
    return BadOption(
        f"{flag} is an option of a MODEL run",
        next_step=f"put the script's options after it: outsize run train.py {flag} ...",
    )


def _source(ctx: typer.Context, name: str) -> str:
    source = ctx.get_parameter_source(name)
    return source.name if source is not None else ""


def _deliver(screen: Screen, job: RunJob, outcome: RunOutcome) -> None:
    screen.result(outcome.document(), lambda: outcome_tables(job, outcome))


def _write_files(outcome: RunOutcome, report: ReportFlags) -> None:
    if report.trace is not None:
        write_trace(report.trace, outcome)
    if report.file is not None:
        write_text(report.file, _page(outcome))


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
