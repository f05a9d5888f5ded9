"""Fails every test in which outsize pickles or unpickles, in this process and in forks of it.

`pickle.load`, `loads`, `dump`, `dumps`, `Pickler` and `Unpickler`, torch's names for them, and Python's audit
event `pickle.find_class`, which no reference that was taken before escapes, look at the stack: the innermost
frame that is outsize's or a test's is who asked. Test code may pickle; outsize may where `ALLOWED` says so.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

TESTS: Final = str(Path(__file__).parents[1])
OUTSIZE: Final = str(Path(__file__).parents[2] / "src" / "outsize")

# Functions of outsize, or files of torch below them, that pickle, and why no stranger writes what they read.
ALLOWED: Final = {
    "train/check/check.py:_launch": "a live model, where nothing can be forked: in a folder of mode 0700",
    "train/check/worker.py:_loaded": "reads that file; the folder belongs to the same user",
    "integrations/transformers.py:_save_rng_state": "a file of the Trainer, by the Trainer",
    "integrations/transformers.py:_load_optimizer_and_scheduler": "the same",
    "torch/utils/data": "a user's own worker processes send batches by pipes from this one",
    "torchdata/stateful_dataloader": "the same",
    "torch/_inductor": "compiled code, which torch.compile keeps in the user's own folder",
    "torch/_functorch": "the same",
    "torch/_dynamo": "the same",
    "<frozen importlib": "a library pickles while it is imported (jinja2 does)",
    "torch/distributed/elastic/rendezvous/dynamic_rendezvous.py": "machines that meet by --rdzv-backend",
}


@final
class Pickled(AssertionError):
    """Says that outsize pickles or unpickles where it must not."""


def guard() -> None:
    """Watches this process, and the forks that it makes, from now on."""
    sys.addaudithook(lambda event, args: insist(event) if event == "pickle.find_class" else None)
    for name in ("load", "loads", "dump", "dumps"):
        setattr(pickle, name, _watched(getattr(pickle, name)))
    for name in ("Pickler", "Unpickler"):
        setattr(pickle, name, _watched_class(getattr(pickle, name)))


def insist(what: str) -> None:
    """Raises Pickled where outsize is the one that asks."""
    place = asked_by(sys._getframe(1))
    if place is not None:
        raise Pickled(f"{what} is used by {place}; see {Path(__file__).name}")


def asked_by(frame: FrameType | None) -> str | None:
    """Returns the innermost function of outsize; None where a test is nearer, or where it is allowed."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(TESTS) and file != __file__:
            return None
        if any(part in file for part in ALLOWED):
            return None
        if file.startswith(OUTSIZE):
            place = f"{file.removeprefix(OUTSIZE).lstrip('/')}:{frame.f_code.co_name}"
            return None if place in ALLOWED else place
        frame = frame.f_back
    return None


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        insist(f"pickle.{function.__name__}")
        return function(*args, **kwargs)

    return watched


def _watched_class(kind: type) -> type:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        insist(f"pickle.{kind.__name__}")
        kind.__init__(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": "pickle"})
