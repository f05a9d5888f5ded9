"""Runs the user's code and takes back what it wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from outsize.capture.guards.consumed import (
    copied,
    is_consumed,
    is_random_generator,
    random_state,
    set_random_state,
)
from outsize.capture.guards.notes import Notes, roots_of
from outsize.capture.guards.trace.read_trace import ReadTrace
from outsize.program.objects import Path, Scope, apply, fits, walk
from outsize.program.python_reads import LOSS
from outsize.program.weights.of_loss import modules_held

_HELD: Final = Scope(functions=True, modules="attributes and tables")


@contextmanager
def without_python_writes(function: Any) -> Iterator[None]:
    """Takes back what the function writes into Python objects within the context, without a look into all
    that it holds.
    """
    notes = Notes({}, roots_of(function), is_for_guards=False)
    try:
        with ReadTrace(notes, lambda: LOSS).active():
            yield
    finally:
        notes.writes.undo()


@contextmanager
def without_writes(*functions: Any) -> Iterator[None]:
    """Takes back what the functions write within the context: into Python objects, tensors and generators of
    random numbers that they hold.
    """
    roots = [root for function in functions for root in roots_of(function)]
    held = (module for function in functions for module in modules_held(function).values())
    roots += [part for module in held for part in module.modules()]
    notes, generators = Notes({}, roots), list[tuple[torch.Generator, Tensor]]()
    randoms, iterators = list[tuple[Any, Any]](), dict[Path, tuple[Any, Any]]()
    for path, part in walk(roots, _HELD):
        if isinstance(part, Tensor):
            notes.writes.remember_tensor(part)
        elif isinstance(part, torch.Generator):
            generators.append((part, part.get_state()))
        elif is_random_generator(part):
            randoms.append((part, random_state(part)))
        elif is_consumed(part) and fits(roots, path) and (other := copied(part)) is not None:
            iterators[path] = part, other
    try:
        apply(roots, [(path, other) for path, (_, other) in iterators.items()])
        with ReadTrace(notes, lambda: LOSS).active():
            yield
    finally:
        notes.writes.undo()
        apply(roots, [(path, one) for path, (one, _) in iterators.items()])
        for generator, state in generators:
            generator.set_state(state)
        for generator, state in randoms:
            set_random_state(generator, state)
