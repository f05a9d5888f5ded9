"""What `make demo` shows: unmodified models on real data, planned, cut, checked and trained by two processes.

job         a training run as a user would write it           text, images   the two jobs
training    the script that each process executes             guests         two more models, only checked
act         plan, check, train, show                          outcome        what came of it, and its files
"""

from __future__ import annotations

from pathlib import Path


def main(out: Path, quick: bool = False) -> int:
    """Perform the demo, leave its files in `out`; 0 if every verdict is bit-equal and the losses fell enough.

    `quick` takes tiny models and a few steps, for a test. Raises ModelNotImportable when an extra is missing.
    """
    # not at the top: each training process imports this package
    from outsize.demo.show import show

    return show(out, quick=quick)
