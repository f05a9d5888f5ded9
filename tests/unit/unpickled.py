"""Fails every test in which outsize pickles or unpickles, in this process and in forks of it.

`pickle.load`, `loads`, `dump`, `dumps`, `Pickler` and `Unpickler`, in every namespace that has them by then
(of modules, classes and objects, as the garbage collector knows them), look at the stack: the innermost frame
that is outsize's or a test's is who asked. Test code may pickle; outsize may where `ALLOWED` says so.

Python's audit event `pickle.find_class` would say the same, but an audit hook is called for each `id()` and
for each frame and code object that is read: 260,000 times in one `outsize.check` of a small GPT-2, about a
tenth of its seconds.
"""

from __future__ import annotations

import gc
import pickle
import sys
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

TESTS: Final = str(Path(__file__).parents[1])
OUTSIZE: Final = str(Path(__file__).parents[2] / "src" / "outsize")

# Functions of outsize, or files of torch below them, that pickle, and why no stranger writes what they read.
ALLOWED: Final = {
    "train/check/check.py:_send": "a live model, where nothing can be forked: in a folder of mode 0700",
    "train/check/worker.py:_loaded": "reads that file; the folder belongs to the same user",
    "integrations/transformers.py:evaluation_loop": "what a trainer broadcasts by itself, to its own ranks",
    "integrations/transformers.py:_save_rng_state": "a file of the Trainer, by the Trainer",
    "integrations/transformers.py:_load_optimizer_and_scheduler": "the same",
    "gliner/model.py": "a file that a model's own class writes",
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


@cache
def guard() -> None:
    """Watches this process, and the forks that it makes, from now on."""
    functions = (pickle.load, pickle.loads, pickle.dump, pickle.dumps)
    kinds = (pickle.Pickler, pickle.Unpickler)
    watched: dict[int, Any] = {id(function): _watched(function) for function in functions}
    watched |= {id(kind): _watched_class(kind) for kind in kinds}
    in_python: Any = getattr(pickle, "_Unpickler")  # noqa: B009 - private; what classes in Python derive from
    in_python.load = _watched(in_python.load)
    for namespace in gc.get_referrers(*functions, *kinds):
        if isinstance(namespace, dict):
            namespace.update({name: watched[id(v)] for name, v in namespace.items() if id(v) in watched})


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
    @wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        insist(f"pickle.{function.__name__}")
        return function(*args, **kwargs)

    return watched


def _watched_class(kind: type) -> type:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        insist(f"pickle.{kind.__name__}")
        kind.__init__(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": "pickle"})
