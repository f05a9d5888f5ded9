"""Draws from Python's and NumPy's generators, which no torch op shows (rule 9).

They are seen by a changed generator state around module calls. A leaf that draws is a random instruction;
a draw between leaves makes its frame one leaf, and in the model's own forward it is refused.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch

State = tuple[Any, ...]


@final
class Chance:
    """Remembers the state of the generators."""

    def __init__(self) -> None:
        self._state = _state()

    @property
    def state(self) -> State:
        """Of the generators when last asked."""
        return self._state

    def drawn(self) -> bool:
        """Has anybody drawn since the last question?"""
        before, self._state = self._state, _state()
        return before != self._state


@contextmanager
def python_generators_kept() -> Iterator[None]:
    """Python's and NumPy's generators are afterwards as they were before."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def self_seeding() -> Iterator[list[str]]:
    """Places that call `torch.seed()`, which takes a seed from the operating system."""
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


def _state() -> State:
    numpy: Any = np.random.get_state()
    return (random.getstate(), numpy[1].tobytes(), *numpy[2:])
