"""Implements `outsize scale RUN COUNT`: a run goes on with another number of processes, same digits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from outsize.cli import options
from outsize.cli.screen import Screen
from outsize.errors import BadOption
from outsize.files.wanted_size import ask_for_size
from outsize.ir.answers.run_state import RunLaunch, run_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

Run = Annotated[
    str, typer.Argument(metavar="RUN", help="The run's number in `outsize top`.", show_default=False)
]
Count = Annotated[
    int, typer.Argument(metavar="COUNT", help="Processes on this machine from now on.", show_default=False)
]


def scale(run: Run, count: Count, json: options.Json = False) -> None:
    """Let a run grow or shrink: after its step it saves itself and goes on with COUNT processes.

    The run was started with `outsize run --devices MIN:MAX`, and its script calls `engine.state.checkpoint`.
    It is planned again for so many devices, on a layout that keeps every digit.
    """
    launch = run_of(run).launch
    _check(launch, count)
    if not ask_for_size(launch.pid, count):
        raise BadOption(
            f"run {launch.pid} has just ended", numbers=launch.command, next_step="outsize top --once"
        )

    def text() -> Iterable[RenderableType]:
        from rich.text import Text

        yield Text(f"run {launch.pid} is asked to go on with {count}; outsize top shows when it does")

    Screen(json).result({"run": launch.pid, "wanted": count}, text)


def _check(launch: RunLaunch, count: int) -> None:
    """Raises BadOption for a number that the run cannot have."""
    if launch.least == launch.most:
        raise BadOption(
            f"run {launch.pid} has a fixed number of processes",
            numbers=f"{launch.most} on this machine",
            next_step=f"stop it, then outsize run --devices 1:{max(2, launch.most)} {launch.command}",
        )
    if not launch.least <= count <= launch.most:
        raise BadOption(
            f"run {launch.pid} cannot have {count} processes",
            numbers=f"--devices {launch.least}:{launch.most}",
            next_step=f"outsize scale {launch.pid} {min(max(count, launch.least), launch.most)}",
        )
