"""Writes what a verb returns: tables for people or one JSON document for programs on stdout, all else on
stderr.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from outsize.errors import OutsizeError, visible, visible_lines

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Progress = Callable[[int, int], None]
# A line that is improved in place is no longer, so that it stays one line.
_MOST_COLUMNS: Final = 79


@final
@dataclass(frozen=True)
class Screen:
    """The standard output and error of one verb; `as_json` is its option --json."""

    as_json: bool = False

    def result(self, document: Mapping[str, Any], tables: Callable[[], Iterable[RenderableType]]) -> None:
        """Writes the JSON document under --json, else the tables, which are made only then."""
        self.emit(document)
        for table in () if self.as_json else tables():
            self._print(table)

    def document_or_text(self, document: Mapping[str, Any], text: str) -> None:
        """Writes the JSON document under --json, else a text as it is, such as a file for another program."""
        self.emit(document)
        if not self.as_json:
            sys.stdout.write(text)

    def _print(self, table: RenderableType) -> None:
        """Writes the table to stdout; into a file or a pipe without the blanks that fill its columns."""
        from outsize.report.tables.table_style import Shown

        console = self._console(stderr=False)
        if console.is_terminal:
            console.print(Shown(table))
            return
        with console.capture() as captured:
            console.print(Shown(table))
        sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())

    def emit(self, document: Mapping[str, Any]) -> None:
        """Writes the JSON document of --json; nothing without it."""
        if self.as_json:
            sys.stdout.write(json.dumps(document, indent=2) + "\n")

    def note(self, text: str) -> None:
        """Writes a line to stderr, apart from the result."""
        sys.stderr.write(visible_lines(text) + "\n")

    def fail(self, error: OutsizeError) -> None:
        """Writes the error's one line (and picture) to stderr, and under --json a JSON object to stdout."""
        self.note(str(error))
        self.emit({"error": error_document(error)})

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[Callable[[str], None]]:
        """Shows a spinner with `what` on a terminal; under --json, what the model prints goes to stderr.

        The block may call `tell(text)`, whose line takes the place of `what`: on a terminal without --json.
        """
        from outsize.report.tables.table_style import Shown

        console = self._console(stderr=True)
        with contextlib.ExitStack() as stack:
            if self.as_json:
                stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            if not console.is_terminal:
                yield _untold
                return
            status, width = (
                stack.enter_context(console.status(Shown(what))),
                min(_MOST_COLUMNS, console.width),
            )
            spinner = len("x ")
            yield _untold if self.as_json else lambda text: status.update(Shown(text[: width - spinner]))

    @contextlib.contextmanager
    def bar(self, what: str) -> Iterator[Progress]:
        """Shows a bar on a terminal, nothing off one; the block calls `progress(done, total)`."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        console = self._console(stderr=True)
        description = TextColumn("{task.description}", markup=False)
        columns = (description, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
            task = bars.add_task(visible(what), total=None)
            yield lambda done, total: bars.update(task, completed=done, total=total)

    def _console(self, *, stderr: bool) -> Console:
        from rich.console import Console

        # A name such as `[/x]` or `:fire:` is shown as it is.
        return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def _untold(_: str) -> None:
    """Shows nothing of a line that is for a terminal."""


def warn_on_one_line() -> None:
    """Shows warnings without the line of source that raised them, from here on."""
    warnings.formatwarning = _one_line


def _one_line(message: Warning | str, category: type[Warning], *_place: object) -> str:
    return visible_lines(f"{category.__name__}: {message}\n")


def error_document(error: OutsizeError) -> dict[str, Any]:
    """Returns the parts of an error as --json gives them."""
    return {
        "name": type(error).__name__,
        "code": error.code,
        "exit_code": error.exit_code,
        "what": error.what,
        "numbers": error.numbers,
        "next_step": error.next_step,
        "picture": error.picture,
    }
