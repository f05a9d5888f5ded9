"""Within `recorded_once()` a model that was recorded before, in this process or in the one that it was forked
from, is not recorded again: half of what a rank of a test does otherwise.

Two calls are the same when their models have the same classes, parameters, states (as the engine tells two
states of a model apart) and other attributes, and their inputs, losses and modes agree. Of tapes that depend
on values of the inputs the one counts whose guards hold, as in the engine. Guards on what Python read are
those of the first model and are dropped: a test that changes values between steps uses `always_recorded()`.

Processes of one run of pytest share tapes through a folder (`share_in`), written by the first that records:
the ranks of a launch, which would all record the same model at the same time, and the files of several
workers. Most tapes take less than 10 ms to read where a recording takes 30 to 900.
"""

from __future__ import annotations

import fcntl
import io
import os
import pickle
import random
import time
from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from outsize.capture.recording import fallbacks
from outsize.program.replaying.modes import current_modes
from outsize.program.tape import Tape
from outsize.program.tree import leaves
from outsize.train.batch.batch import Batch
from outsize.train.optimizers.coupling import Coupling, CouplingTrial
from outsize.train.variants.model_state import snapshot
from outsize.train.variants.variant import InputGuards

_RECORD: Any = getattr(fallbacks, "_recorded")  # noqa: B009 - private; what each call of `record` ends in
_TRY: Any = CouplingTrial.run
_CACHES: Any = getattr(fallbacks, "Caches")  # noqa: B009 - private; walks all that the model reaches
_TAPES: defaultdict[Hashable, list[Tape]] = defaultdict(list)
# Whatever a test calls `torch.float32` (`all_in` of tests/dist/tensor_worker.py).
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_SHARED: list[Path] = []  # the folder of this run of pytest, once there is one
_LONGEST_WAIT_S = 20.0  # for another process that records: longer than a recording, and no deadlock


def share_in(folder: Path) -> None:
    """From now on this process, and forks of it, share tapes with others that have the same folder."""
    folder.mkdir(exist_ok=True)
    _SHARED[:] = [folder]


@contextmanager
def recorded_once(among: Hashable = None) -> Iterator[None]:
    """Within the block `record` returns the tape of an equal call, where there was one in a block of the same
    `among`.
    """
    with patch.multiple(fallbacks, _recorded=partial(_record_once, among), Caches=_LateCaches):
        yield


@contextmanager
def always_recorded() -> Iterator[None]:
    """Within the block `record` records."""
    with patch.multiple(fallbacks, _recorded=_RECORD, Caches=_CACHES):
        yield


@contextmanager
def tried_once() -> Iterator[None]:
    """Within the block the trial of what an optimizer couples (`CouplingTrial`) is not run again for equal
    weights and an equal factory: a fifteenth of what ranks do in tests that are not about optimizers.
    """
    with patch.object(CouplingTrial, "run", _try_once):
        yield


def _try_once(trial: CouplingTrial) -> Coupling:
    about = trial.divided, trial.spread, trial.sharded is not None, str(trial.device)
    key = "coupling", _factory(trial.make), tuple(map(tuple, trial.kinds)), about, torch.float32
    shelf = _Shelf.of(key)
    with shelf.locked():
        for found in shelf.values(after=0):
            return found
        found = _TRY(trial)
        shelf.add(found, 0)
        return found


def _factory(make: Any) -> Hashable:
    """A function by its place and what it encloses; what is no function has to have a name."""
    if not isinstance(make, FunctionType):
        return make
    code, cells = make.__code__, make.__closure__ or ()
    return code.co_filename, code.co_firstlineno, make.__defaults__, tuple(c.cell_contents for c in cells)


@final
class _LateCaches:
    """Looks for caches when a call is recorded."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    @cached_property
    def made(self) -> Any:
        """The caches in sight of the model."""
        return _CACHES(*self._arguments)


def _record_once(among: Hashable, call: Any, rule: Any, caches: Any, home: Any) -> Tape:
    model, part = call.model, Batch(call.args, call.kwargs, call.target)
    of_call = part.signature(), call.loss_fn, str(home), current_modes()
    key = among, _model_key(model), *of_call, torch.float32, torch.get_default_dtype()
    if (tape := _fitting(_TAPES[key], model, part, home)) is not None:
        return tape
    shelf = _Shelf.of(key)
    with shelf.locked():
        _TAPES[key] += shelf.values(after=len(_TAPES[key]))
        if (tape := _fitting(_TAPES[key], model, part, home)) is not None:
            return tape
        tape = _RECORD(call, rule, caches.made, home)
        if not _has_modules(tape):
            kept = replace(tape, reads=())
            if not _has_constants(tape):
                shelf.add(kept, len(_TAPES[key]))
            _TAPES[key].append(kept)
        return tape


def _fitting(tapes: list[Tape], model: nn.Module, part: Batch, home: Any) -> Tape | None:
    return next((tape for tape in tapes if InputGuards(tape, model, home).hold(part)), None)


# -- between processes ---------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class _Shelf:
    """The tapes, or other values, of one key in the folder, in the order of their making; without a folder
    nothing.
    """

    place: Path | None

    @classmethod
    def of(cls, key: Hashable) -> _Shelf:
        """Functions and classes in a key are known by their names; a key with others is of one process."""
        text = _pickled(key, remembers=False) if _SHARED else None
        return cls(None if text is None else _SHARED[0] / sha256(text).hexdigest())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Waits while another process records, for a while: a model may wait for that process's next step."""
        if self.place is None:
            yield
            return
        with self.place.with_suffix(".lock").open("w") as file:
            end = time.monotonic() + _LONGEST_WAIT_S
            while time.monotonic() < end:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.01)
            yield

    def values(self, after: int) -> Iterator[Any]:
        """What has been added, but for the first so many."""
        number = after
        while self.place is not None and (path := self._path(number)).exists():
            yield pickle.loads(path.read_bytes())
            number += 1

    def add(self, value: Any, number: int) -> None:
        """Adds a value, if it can be copied."""
        text = None if self.place is None else _pickled(value)
        if text is not None:
            path = self._path(number)
            beside = path.with_suffix(f".{os.getpid()}")
            beside.write_bytes(text)
            beside.replace(path)

    def _path(self, number: int) -> Path:
        assert self.place is not None
        return self.place.with_suffix(f".{number}.value")


def _has_constants(tape: Tape) -> bool:
    """Tensors that existed before are those of one process."""
    return bool(tape.constants) or (tape.loss_detail is not None and bool(tape.loss_detail.constants))


def _pickled(value: Any, *, remembers: bool = True) -> bytes | None:
    """The value in bytes, or None where it has what cannot be copied. Equal values have equal bytes unless it
    `remembers` which parts are one object.
    """
    text = io.BytesIO()
    pickler = _Pickler(text)
    pickler.fast = not remembers
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError, ValueError):
        return None
    return text.getvalue()


@final
class _Pickler(pickle.Pickler):
    """Refuses what has an identity. Fakes, in caches that a model returns, come back without a mode."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FakeTensor):
            return _meta, (tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, torch.dtype):
            return _dtype, (str(value),)
        if isinstance(value, (Tensor, nn.Module, torch.Generator, random.Random)):
            raise pickle.PicklingError(f"a {type(value).__name__} is that of one process")
        return NotImplemented


def _meta(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _dtype(name: str) -> torch.dtype:
    return _DTYPES[name]


# -- what a model is -----------------------------------------------------------------------------------


def _has_modules(tape: Tape) -> bool:
    """Modules that are arguments are those of one model, and not of its equals."""
    given = (leaf for i in tape.instructions for leaf in leaves((i.args, i.kwargs)))
    return any(isinstance(leaf, nn.Module) for leaf in given)


def _model_key(model: nn.Module) -> Hashable:
    state = tuple((name, value) for (_, name), value in snapshot(model, plain=True).items())
    modules = tuple((n, type(m), *map(_attribute, _own(m))) for n, m in model.named_modules())
    buffers = tuple((n, b.shape, b.dtype) for n, b in model.named_buffers())
    return state, modules, buffers


def _own(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes of a module, without the method that an engine takes from a model whose weights it has
    divided (train/crew/pretrained.py), which no forward calls.
    """
    return [item for item in vars(module).items() if item[0] != "save_pretrained"]


def _attribute(item: tuple[str, Any]) -> Hashable:
    """What `snapshot` does not look at: tuples of sizes, and functions that replace methods."""
    name, value = item
    if isinstance(value, MethodType):
        return name, value.__func__
    if isinstance(value, FunctionType):
        return item
    return name, _value(value)


def _value(value: Any) -> Hashable:
    """Sizes and names as they are, and what dataclasses hold; of others, such as the weights that an RNN
    lists, their class.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple((field.name, _value(getattr(value, field.name))) for field in fields(value))
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_value, value))
    return repr(value) if isinstance(value, (bool, int, float, str, torch.dtype)) else type(value)
