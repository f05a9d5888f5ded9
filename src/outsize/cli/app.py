"""The verbs of the command line, and what an error looks like.

an OutsizeError        its one line on stderr, its exit code; under --json an object on stdout as well
a mistyped option      the same, as BadOption [E106]
anything unexpected    its traceback: a bug is a bug
Ctrl-C                 130
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, final

import typer
from typer.core import TyperGroup

from outsize import __version__
from outsize.cli import options
from outsize.cli.bench import bench
from outsize.cli.check import check
from outsize.cli.demo import demo
from outsize.cli.doctor import doctor
from outsize.cli.explain import explain
from outsize.cli.explain_plan import explain_plan
from outsize.cli.fit import fit
from outsize.cli.measure import measure
from outsize.cli.plan import plan
from outsize.cli.run import RunCommand
from outsize.cli.run import run as run_verb
from outsize.cli.screen import Screen, warn_on_one_line
from outsize.cli.trace import trace
from outsize.cli.tune import tune
from outsize.errors import BadOption, OutsizeError

INTERRUPTED = 130

Version = Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)]


@final
class Verbs(TyperGroup):
    """The group of all verbs; turns an error of a verb into its exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        with told(ctx):
            return super().invoke(ctx)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; unexpected exceptions pass."""
    warn_on_one_line()
    try:
        returned = make_app()(list(arguments), prog_name="outsize", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return returned if isinstance(returned, int) else 0


def make_app() -> typer.Typer:
    """The application with all verbs."""
    app = typer.Typer(cls=Verbs, add_completion=False, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(outsize)
    app.command()(fit)
    app.command()(measure)
    app.command()(plan)
    app.command()(check)
    app.command(cls=RunCommand)(run_verb)
    app.command()(tune)
    app.command()(bench)
    app.command()(trace)
    app.command()(explain)
    app.command("explain-plan")(explain_plan)
    app.command()(demo)
    app.command()(doctor)
    return app


def outsize(ctx: typer.Context, version: Version = False) -> None:
    """Plan, split and train PyTorch models that outsize your GPU."""
    if version:
        typer.echo(f"outsize {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


@contextlib.contextmanager
def told(ctx: typer.Context) -> Iterator[None]:
    """Show an OutsizeError or a usage error on one line and leave with its exit code."""
    try:
        yield
    except OutsizeError as error:
        Screen(ctx.meta.get(options.JSON, False)).fail(error)
        raise typer.Exit(error.exit_code) from error
    except Exception as error:
        # typer's usage errors have had two homes (click's and its own); this method is what they share
        if not hasattr(error, "format_message"):
            raise
        misused = _misused(error)
        Screen(ctx.meta.get(options.JSON, False)).fail(misused)
        raise typer.Exit(misused.exit_code) from error


def _misused(error: Any) -> BadOption:
    path = error.ctx.command_path if error.ctx is not None else "outsize"
    return BadOption(error.format_message().rstrip(".?"), next_step=f"{path} --help")
