"""The demo: unmodified models on real data, planned, checked against one process and trained by two.

job              a training run as a user would write it      text, images      the two jobs
training         the script that each process executes        trained_job       plan, check, train, report
compared_models  two more models, which are only checked      show              the order, and the summary
"""

from __future__ import annotations

from pathlib import Path


def main(out: Path, quick: bool = False) -> int:
    """Runs the demo and leaves its files in `out`; returns 0 if all checks are bit-equal and the losses fell.

    `quick` takes tiny models and a few steps, for a test. Raises ModelNotImportable when an extra is missing.
    """
    # This import is not at the top because each training process imports this package.
    from outsize.cli.demo.show import show

    return show(out, quick=quick)
