"""What a verb writes: tables for people or one JSON document for programs on stdout, all else on stderr."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from outsize.errors import OutsizeError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Progress = Callable[[int, int], None]


@final
@dataclass(frozen=True)
class Screen:
    """Standard output and error of one verb; `as_json` is its option --json."""

    as_json: bool = False

    def result(self, document: Mapping[str, Any], tables: Callable[[], Iterable[RenderableType]]) -> None:
        """The JSON document under --json, else the tables, which are only then made."""
        self.emit(document)
        for table in () if self.as_json else tables():
            self._console(stderr=False).print(table)

    def emit(self, document: Mapping[str, Any]) -> None:
        """The JSON document of --json; nothing without it."""
        if self.as_json:
            sys.stdout.write(json.dumps(document, indent=2) + "\n")

    def note(self, text: str) -> None:
        """A line beside the result, on stderr."""
        sys.stderr.write(text + "\n")

    def fail(self, error: OutsizeError) -> None:
        """The error's one line (and picture) on stderr, and as a JSON object under --json."""
        self.note(str(error))
        self.emit({"error": error_document(error)})

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """A spinner with `what` on a terminal; under --json, what the model prints goes to stderr."""
        console = self._console(stderr=True)
        with contextlib.ExitStack() as stack:
            if self.as_json:
                stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            if console.is_terminal:
                stack.enter_context(console.status(what))
            yield

    @contextlib.contextmanager
    def bar(self, what: str) -> Iterator[Progress]:
        """A bar on a terminal, nothing off one; the block calls `progress(done, total)`."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        console = self._console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
            task = bars.add_task(what, total=None)
            yield lambda done, total: bars.update(task, completed=done, total=total)

    def _console(self, *, stderr: bool) -> Console:
        from rich.console import Console

        return Console(stderr=stderr, highlight=False)


def warn_on_one_line() -> None:
    """Warnings without the line of source that raised them, from here on."""
    warnings.formatwarning = _one_line


def _one_line(message: Warning | str, category: type[Warning], *_place: object) -> str:
    return f"{category.__name__}: {message}\n"


def error_document(error: OutsizeError) -> dict[str, Any]:
    """The parts of an error as --json gives them."""
    return {
        "name": type(error).__name__,
        "code": error.code,
        "exit_code": error.exit_code,
        "what": error.what,
        "numbers": error.numbers,
        "next_step": error.next_step,
        "picture": error.picture,
    }
