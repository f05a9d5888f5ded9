"""Detects draws from Python's and NumPy's generators, which no torch op shows (rule 9).

They are detected by a changed generator state around module calls. A leaf that draws is a random instruction;
a draw between leaves makes its frame one leaf, and in the model's own forward it is refused.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import numpy as np
import torch

State = tuple[Any, ...]
_MARK: Final = 0x0D15EA5E  # A seed by which a seed of the user's own is told.


@final
class PythonGenerators:
    """Remembers the state of the generators."""

    def __init__(self) -> None:
        self._state = _state()

    @property
    def state(self) -> State:
        """Returns the state of the generators when `drawn` was last called."""
        return self._state

    def drawn(self) -> bool:
        """Returns whether numbers were drawn since the last call."""
        before, self._state = self._state, _state()
        return before != self._state


@contextmanager
def restored_python_generators() -> Iterator[None]:
    """Restores Python's and NumPy's generators after the context."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def self_seeding() -> Iterator[list[str]]:
    """Collects the source lines that call `torch.seed()`, which takes a seed from the operating system."""
    places: list[str] = []
    original = torch.seed

    def seed() -> int:
        frame = traceback.extract_stack(limit=2)[0]
        places.append(f"{frame.filename}:{frame.lineno}")
        return original()

    torch.seed = seed
    try:
        yield places
    finally:
        torch.seed = original


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restores Python's, NumPy's and torch's default generator after the context."""
    state = torch.default_generator.get_state()
    try:
        with restored_python_generators():
            yield
    finally:
        torch.default_generator.set_state(state)


def mark_seed() -> None:
    """Seeds torch's default generator with a number of ours."""
    torch.default_generator.manual_seed(_MARK)


def is_seeded() -> bool:
    """Returns whether other code has seeded torch's default generator since `mark_seed`."""
    return torch.default_generator.initial_seed() != _MARK


def _state() -> State:
    numpy: Any = np.random.get_state()
    return (random.getstate(), numpy[1].tobytes(), *numpy[2:])
