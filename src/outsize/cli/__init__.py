"""The command line: `outsize VERB`. One file per verb; what they share is in app, options, screen, subject.

    app       the verbs, and what an error looks like
    options   the options that several verbs have, spelled once
    screen    standard output and error: tables or one JSON document, bars on a terminal only
    subject   MODEL, --input and --batch to a model with its example batch and its loss

No module here imports torch before a verb runs, so that `outsize --help` answers at once.
"""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    """The entry point `outsize`; ends the process with the verb's exit code."""
    app = importlib.import_module("outsize.cli.app")
    sys.exit(app.run(sys.argv[1:]))
