"""Defines the verbs of the command line, and what an error looks like.

an OutsizeError        its one line on stderr, its exit code; under --json an object on stdout as well
a mistyped option      the same, as BadOption [E106]
anything unexpected    its traceback: a bug is a bug
Ctrl-C                 130
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, final

import typer
from typer.core import TyperGroup

from outsize import __version__
from outsize.cli import options
from outsize.cli.command_line import OLD, VerbCommand, instead_of
from outsize.cli.runs.scale import scale
from outsize.cli.runs.top import top
from outsize.cli.screen import Screen, warn_on_one_line
from outsize.cli.verbs.bench import bench
from outsize.cli.verbs.check import check
from outsize.cli.verbs.compare import compare
from outsize.cli.verbs.demo import demo
from outsize.cli.verbs.doctor import doctor
from outsize.cli.verbs.emit import emit
from outsize.cli.verbs.explain import explain
from outsize.cli.verbs.explain_plan import explain_plan
from outsize.cli.verbs.fit import fit
from outsize.cli.verbs.measure import measure
from outsize.cli.verbs.plan import plan
from outsize.cli.verbs.rehearse import rehearse
from outsize.cli.verbs.run import RunCommand
from outsize.cli.verbs.run import run as run_verb
from outsize.cli.verbs.trace import trace
from outsize.cli.verbs.tune import tune
from outsize.errors import BadOption, OutsizeError
from outsize.errors.names import COMMANDS
from outsize.errors.words import value_here

INTERRUPTED = 130

Version = Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)]


@final
class Verbs(TyperGroup):
    """The group of all verbs; turns an error of a verb into its exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the verb."""
        with shown_errors(ctx):
            return super().invoke(ctx)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; unexpected exceptions pass."""
    warn_on_one_line()
    try:
        returned = make_app()(list(arguments), prog_name="outsize", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:  # an option before the verb; `shown_errors` handles a verb's options
        return _show(_misuse(error), as_json=options.JSON in arguments)
    return returned if isinstance(returned, int) else 0


@final
@dataclass(frozen=True, slots=True)
class _Verb:
    """A verb's function, the group in which help shows it, and a line of at most 58 characters about it."""

    function: Callable[..., Any]
    group: str
    line: str
    name: str | None = None


_DECIDE, _RUN, _LOOK_AFTER = "Decide", "Run", "Look after"
_VERBS: Final = (
    _Verb(fit, _DECIDE, "Does training MODEL fit? YES, NO, or YES IF with a change"),
    _Verb(plan, _DECIDE, "Split MODEL over the devices, and say why so"),
    _Verb(explain_plan, _DECIDE, "Why a plan is as it is, and what would be faster", "explain-plan"),
    _Verb(compare, _DECIDE, "What differs between two plans or runs"),
    _Verb(measure, _DECIDE, "Time MODEL's units on this machine, for its plan"),
    _Verb(run_verb, _RUN, "Run a script over processes, or train MODEL some steps"),
    _Verb(check, _RUN, "Train MODEL split and plain; compare all numbers' bits"),
    _Verb(rehearse, _RUN, "Run a plan for many devices here, with a small model"),
    _Verb(tune, _RUN, "Find the fastest split of MODEL here by real steps"),
    _Verb(trace, _RUN, "Trace a step, predicted and measured, for Perfetto"),
    _Verb(emit, _RUN, "Write a job file for Slurm, Kubernetes, Ray, ..."),
    _Verb(demo, _RUN, "Train a GPT-2 and a ResNet-50 over two processes"),
    _Verb(bench, _RUN, "Measure an experiment here: outsize bench tutorial"),
    _Verb(top, _LOOK_AFTER, "Show the runs on this machine, against their plans"),
    _Verb(scale, _LOOK_AFTER, "Let a run go on with COUNT processes"),
    _Verb(doctor, _LOOK_AFTER, "Show devices, versions and limits, and what is missing"),
    _Verb(explain, _LOOK_AFTER, "Explain an error code, offline"),
)


def make_app() -> typer.Typer:
    """Returns the application with all verbs."""
    app = typer.Typer(cls=Verbs, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(outsize)
    for verb in _VERBS:
        kind = RunCommand if verb.function is run_verb else VerbCommand
        how: Any = {"rich_help_panel": verb.group, "short_help": verb.line}
        how["help"] = _flowing(verb.function.__doc__ or "")
        app.command(verb.name, cls=kind, **how)(verb.function)
    return app


def _flowing(text: str) -> str:
    """Returns a text with one line for each paragraph: a terminal has other widths than a docstring."""
    return "\n\n".join(" ".join(each.split()) for each in text.split("\n\n"))


def outsize(ctx: typer.Context, version: Version = False) -> None:
    """Plan, split and train PyTorch models that outsize your GPU."""
    if version:
        typer.echo(f"outsize {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@contextlib.contextmanager
def shown_errors(ctx: typer.Context) -> Iterator[None]:
    """Shows an OutsizeError or a usage error on one line and leaves with its exit code."""
    try:
        yield
    except OutsizeError as error:
        raise typer.Exit(_show(error, as_json=ctx.meta.get(options.JSON, False))) from error
    except Exception as error:
        raise typer.Exit(_show(_misuse(error), as_json=ctx.meta.get(options.JSON, False))) from error


def _show(error: OutsizeError, *, as_json: bool) -> int:
    """Shows the error and returns its exit code."""
    Screen(as_json).fail(error)
    return error.exit_code


def _misuse(error: Any) -> BadOption:
    """Returns typer's usage error as one of outsize; raises any other error again."""
    # typer's usage errors are click's or its own, by version; both have this method
    if not hasattr(error, "format_message"):
        raise error
    path = error.ctx.command_path if error.ctx is not None else "outsize"
    what = error.format_message().rstrip(".?")
    return BadOption(what, next_step=_instead(error, what) or f"{path} --help")


def _instead(error: Any, what: str) -> str:
    """Returns what to type for an option or a value as other tools call them; "" for other mistakes."""
    parameters = [] if error.ctx is None else error.ctx.command.params
    old = {} if error.ctx is None else OLD.get(error.ctx.info_name, {})
    flags = {flag for parameter in parameters for flag in parameter.opts}
    if (command := re.match(r"No such command '([^']*)'", what)) is not None:
        return COMMANDS.get(command[1], "")
    name = getattr(error, "option_name", None)
    if name is not None and hasattr(error, "possibilities"):  # no such option
        return instead_of(name, flags, old)
    parameter, value = getattr(error, "param", None), re.search(r"'([^']*)' is not one of", what)
    here = value_here(parameter.name, value[1]) if parameter is not None and value is not None else None
    return f"{parameter.opts[0]} {here}" if parameter is not None and here is not None else ""
