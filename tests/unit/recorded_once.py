"""Within `recorded_once()` a model that was recorded before, in this process or in the one that it was forked
from, is not recorded again: half of what a rank of a test does otherwise.

Two calls are the same when their models have the same classes, parameters, states (as the engine tells two
states of a model apart) and other attributes, and their inputs, losses and modes agree. Of tapes that depend
on values of the inputs the one counts whose guards hold, as in the engine. Guards on what Python read are
those of the first model and are dropped: a test that changes values between steps uses `always_recorded()`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, partial
from types import FunctionType, MethodType
from typing import Any, final
from unittest.mock import patch

import torch
from torch import nn

from outsize.capture.recording import fallbacks
from outsize.program.replaying.modes import current_modes
from outsize.program.tape import Tape
from outsize.program.tree import leaves
from outsize.train.batch.batch import Batch
from outsize.train.variants.input_guards import InputGuards
from outsize.train.variants.model_state import snapshot

_RECORD: Any = getattr(fallbacks, "_recorded")  # noqa: B009 - private; what each call of `record` ends in
_CACHES: Any = getattr(fallbacks, "Caches")  # noqa: B009 - private; walks all that the model reaches
_TAPES: defaultdict[Hashable, list[Tape]] = defaultdict(list)


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
    if rule.numbers is not None:  # Numbers or lengths that are followed are in this tape alone.
        return _RECORD(call, rule, caches.made, home)
    model, part = call.model, Batch(call.args, call.kwargs, call.target)
    of_call = part.signature(), call.loss_fn, str(home), current_modes()
    key = among, _model_key(model), *of_call, torch.float32
    for tape in _TAPES[key]:
        if InputGuards(tape, model, home).hold(part):
            return tape
    tape = _RECORD(call, rule, caches.made, home)
    if not _has_modules(tape):
        _TAPES[key].append(replace(tape, reads=()))
    return tape


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
