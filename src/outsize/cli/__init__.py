"""Implements the command line, `outsize VERB`: one file per verb; what they share is listed here.

    app          the verbs, and what an error looks like
    options      the options that several verbs have, spelled once
    flags        options of a verb as records of their subjects, and one flag for what is rare of each
    command_line what typer does not see: old spellings, and torchrun's own flags
    run_flags    the options of `outsize run`
    screen       standard output and error: tables or one JSON document, bars on a terminal only
    model_input  MODEL, --input and --batch to a model with its example batch and its loss
    verbs        one file for each verb
    processes    what the processes of a verb execute

No module here imports torch before a verb runs, so that `outsize --help` answers at once.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def main() -> None:
    """Runs the command line and ends the process with the verb's exit code."""
    with uncollected():
        app = importlib.import_module("outsize.cli.app")
    code = app.run(sys.argv[1:])
    gc.freeze()  # else Python scans all objects before it ends: a second for torch and a model
    sys.exit(code)


@contextmanager
def uncollected() -> Iterator[None]:
    """Turns Python's cycle collector off, since nearly all that is made in the block stays alive."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if before:
            gc.enable()


@contextmanager
def collected() -> Iterator[None]:
    """Turns it on where a verb searches many times: what a search leaves behind would stay until the end."""
    before = gc.isenabled()
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        if not before:
            gc.disable()
