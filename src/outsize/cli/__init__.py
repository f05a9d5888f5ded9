"""The command line: `outsize VERB`. One file per verb; what they share is in app, options, screen, subject.

    app       the verbs, and what an error looks like
    options   the options that several verbs have, spelled once
    screen    standard output and error: tables or one JSON document, bars on a terminal only
    subject   MODEL, --input and --batch to a model with its example batch and its loss

No module here imports torch before a verb runs, so that `outsize --help` answers at once.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def main() -> None:
    """The entry point `outsize`; ends the process with the verb's exit code."""
    with uncollected():
        app = importlib.import_module("outsize.cli.app")
    code = app.run(sys.argv[1:])
    gc.freeze()  # or Python looks through all that is left before it ends: a second for torch and a model
    sys.exit(code)


@contextmanager
def uncollected() -> Iterator[None]:
    """Python's cycle collector rests, and never looks at what is made meanwhile: nearly all is kept."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if before:
            gc.enable()
